"""Shared fixtures: folders on real memory, and a machine left as it was found."""

from __future__ import annotations

import functools
import os
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from hostprep.node.apply.service import Node
from testbed.machine import clean_node, machine_lock

_IS_LONG = os.environ.get("LONG", "") not in {"", "0"}

# No deadline: a noisy machine is no defect.
settings.register_profile("quick", max_examples=25, deadline=None)
settings.register_profile("long", max_examples=1000, deadline=None)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "long" if _IS_LONG else "quick"))

_TIERS = ("gpu", "unit", "kernel", "cluster", "node", "engines")
_outcomes: Counter[tuple[str, str]] = Counter()
_seconds: defaultdict[str, float] = defaultdict(float)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With `--dist loadscope`, keep in one process what counts the machine's pages and mounts.

    That is all but the files that say `parallel`. (Groups need pytest's own names of tests, which
    xdist 3.8 no longer changes with pytest 9.)
    """
    from xdist.scheduler import LoadScopeScheduling  # type: ignore[import-untyped]

    class Scheduling(LoadScopeScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.partition("::")[0]
            return file if _says_parallel(config.rootpath / file) else "machine"

    return Scheduling(config, log) if config.getoption("dist") == "loadscope" else None


@functools.cache
def _says_parallel(path: Path) -> bool:
    return "pytest.mark.parallel" in path.read_text()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Each test has a tier; what is `long` runs where it is asked for."""
    for item in items:
        if not any(item.get_closest_marker(tier) for tier in _TIERS):
            raise pytest.UsageError(f"{item.nodeid} belongs to no tier")
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
