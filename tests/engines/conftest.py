"""Which of the engines' tests run, and what is written down of them."""

from __future__ import annotations

import os

import pytest

from tests.engines.recording import Recorder

_recorder = Recorder()
_TEST_SECONDS = 1200
"""Against hangs only: vLLM's start takes minutes on a machine with other work."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A longer time-out; engines that only `make test-engines-all` tries are marked `long`."""
    ours = [item for item in items if item.get_closest_marker("engines")]
    for item in ours:
        if not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(_TEST_SECONDS))


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Count what comes of each module."""
    if report.when == "call" or report.outcome != "passed":
        file, _, test = report.location
        _recorder.add(file.rpartition("/")[2].removesuffix(".py"), report.outcome, test)


def pytest_sessionfinish() -> None:
    """Write it down where `make test-engines-all` asks for it."""
    if os.environ.get("RECORD_ENGINES"):
        _recorder.write()
