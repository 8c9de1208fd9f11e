"""Models' published files for the tests of tier engines."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from testbed import model_configs


def published_or_skip() -> Mapping[str, model_configs.PublishedModel]:
    """The models by name. Skips the test where their files were not fetched."""
    folder = model_configs.locate()
    if folder is None:
        pytest.skip("no models' files: run .venv/bin/python -m testbed build --engines")
    return model_configs.published_models(folder)
