"""What others published, beside what we compute, here and in docs/sizing.md."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.unit.sizing.figures import FIGURES, Figure
from tests.unit.sizing.models import MODELS

pytestmark = pytest.mark.unit

DOCS = Path(__file__).parents[3] / "docs" / "sizing.md"


@pytest.mark.parametrize("figure", FIGURES, ids=lambda f: f"{f.model}: {f.what[:40]}")
def test_ours_is_the_published_figure_to_its_last_digit(figure: Figure) -> None:
    # Published numbers are rounded or cut off: either is less than one of the last digit.
    assert abs(figure.ours_in_unit - figure.published) < max(figure.digit, 1e-9)


def test_there_are_enough_of_them() -> None:
    assert len(FIGURES) >= 8
    assert len({figure.address for figure in FIGURES}) >= 8
    assert all(figure.address.startswith("https://") and figure.quote for figure in FIGURES)


@pytest.mark.parametrize("figure", FIGURES, ids=lambda f: f"{f.model}: {f.what[:40]}")
def test_the_documentation_shows_both(figure: Figure) -> None:
    ours = f"{figure.ours_in_unit:.2f}" if figure.digit < 1 else f"{figure.ours_in_unit:.0f}"
    row = f"| {figure.model} | {figure.what} | {figure.quote.replace('|', chr(92) + '|')} | "
    row += f"{ours} {figure.shown} | [source]({figure.address}) |"
    assert row in DOCS.read_text(encoding="utf-8"), row


def test_every_example_says_where_its_numbers_are_from() -> None:
    readme = (MODELS / "README.md").read_text(encoding="utf-8")
    for path in MODELS.glob("*.json"):
        assert f"`{path.name}`" in readme
        assert "model_type" in json.loads(path.read_text(encoding="utf-8"))
