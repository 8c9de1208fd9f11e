"""Real memory for the engines' tests, and the machine left as it was found."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from hostprep.apply.service import Node
from tests.engines.recording import Recorder
from tests.support.machine import clean_node, machine_lock

_recorder = Recorder()
_TEST_SECONDS = 1200
"""Against hangs only: vLLM's start takes minutes on a machine with other work."""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Engines that only `make test-engines-all` tries are marked `long`."""
    ours = [item for item in items if item.get_closest_marker("engines")]
    for item in ours:
        if not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(_TEST_SECONDS))
    if os.environ.get("LONG", "") in {"", "0"}:
        long = [item for item in ours if item.get_closest_marker("long")]
        items[:] = [item for item in items if item not in long]
        config.hook.pytest_deselected(items=long)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Count what comes of each module."""
    if report.when == "call" or report.outcome != "passed":
        _recorder.add(report.location[0].rpartition("/")[2].removesuffix(".py"), report.outcome)


def pytest_sessionfinish() -> None:
    """Write it down where `make test-engines-all` asks for it."""
    if os.environ.get("RECORD_ENGINES"):
        _recorder.write()


@pytest.fixture(scope="session")
def machine() -> Iterator[None]:
    """The machine's huge pages for this session alone."""
    with machine_lock():
        yield


@pytest.fixture
def node(machine: None) -> Iterator[Node]:
    """This machine with a root of its own. Fails the test that leaves pages or mounts behind."""
    if os.geteuid() != 0:
        pytest.skip("needs root: huge pages and mounts")
    with clean_node() as node:
        yield node
