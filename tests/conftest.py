"""Shared fixtures: folders on real memory, and a machine left as it was found."""

from __future__ import annotations

import os
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from hostprep.node.apply.service import Node
from tests.support.machine import clean_node, machine_lock

_IS_LONG = os.environ.get("LONG", "") not in {"", "0"}

# No deadline: a noisy machine is no defect.
settings.register_profile("quick", max_examples=25, deadline=None)
settings.register_profile("long", max_examples=1000, deadline=None)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "long" if _IS_LONG else "quick"))

_TIERS = ("gpu", "unit", "kernel", "cluster", "node", "engines")
_outcomes: Counter[tuple[str, str]] = Counter()
_seconds: defaultdict[str, float] = defaultdict(float)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what is `long`, and keep together what counts the machine's pages and mounts."""
    for item in items:
        if not any(item.get_closest_marker(tier) for tier in _TIERS):
            raise pytest.UsageError(f"{item.nodeid} belongs to no tier")
        if item.get_closest_marker("kernel") and not item.get_closest_marker("parallel"):
            item.add_marker(pytest.mark.xdist_group("machine"))
    if not _IS_LONG:
        long = [item for item in items if item.get_closest_marker("long")]
        items[:] = [item for item in items if not item.get_closest_marker("long")]
        config.hook.pytest_deselected(items=long)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Count by tier; called in the main process, wherever the test ran."""
    tier = next((tier for tier in _TIERS if tier in report.keywords), "none")
    _seconds[tier] += report.duration
    if report.skipped:
        _outcomes[tier, "skipped"] += 1
    elif report.when == "call" and report.passed:
        _outcomes[tier, "passed"] += 1


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    total = sum(_seconds.values()) or 1.0
    for tier, seconds in _seconds.items():
        share = f" ({100 * seconds / total:.0f} %)" if len(_seconds) > 1 else ""
        terminalreporter.write_line(
            f"tier {tier}: {_outcomes[tier, 'passed']} passed, "
            f"{_outcomes[tier, 'skipped']} skipped, {seconds:.0f} s{share}"
        )


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """Where a tier is required (CI), a test of it that skips is a failure."""
    required = os.environ.get("REQUIRE_TIERS", "").split()
    skipped = [tier for tier in required if _outcomes[tier, "skipped"]]
    if skipped and exitstatus == 0:
        print(f"\nrequired tiers skipped tests: {', '.join(skipped)}")
        session.exitstatus = 1


@pytest.fixture
def memory_folder() -> Iterator[Path]:
    """A new folder on tmpfs; gone afterwards."""
    import shutil
    import tempfile

    folder = tempfile.mkdtemp(prefix="hostprep-test-", dir="/dev/shm")
    yield Path(folder)
    shutil.rmtree(folder, ignore_errors=True)


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
