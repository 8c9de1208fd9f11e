"""A run begins without free huge pages, whatever was killed before it, and gives them back."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from hostprep.backing import Backing
from testbed import machine

pytestmark = [
    pytest.mark.kernel,
    # Runs that these tests start have a lock of their own: this session holds the machine's.
    pytest.mark.usefixtures("machine"),
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root: huge pages and mounts"),
]

_REPOSITORY = Path(__file__).parents[3]
_POOL = machine._HUGE_PAGE_POOLS[0]
_COUNT = "with machine.machine_lock(): print(machine.huge_pages_total())"
_PREPARE = f"""
import os, shutil, signal
from hostprep.backing import Backing
with machine.clean_node() as node:
    node.prepare([machine.pool_of(backing=Backing.{Backing.HUGETLB_2MI.name})])
    print(node.root, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""


def _run(program: str, folder: Path) -> subprocess.CompletedProcess[str]:
    header = f"from testbed import machine; machine._LOCK = {str(folder / 'lock')!r}\n"
    around = {name: text for name, text in os.environ.items() if name != machine._HELD}
    return subprocess.run(
        [sys.executable, "-c", header + program],
        cwd=_REPOSITORY, env=around, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip


def test_free_huge_pages_are_away_while_a_run_counts_and_there_again_afterwards(
    tmp_path: Path,
) -> None:
    before = machine.huge_pages_total()
    machine._add_pages(_POOL, 5)
    try:
        assert machine.huge_pages_total() == before + 5
        run = _run(_COUNT, tmp_path)
        assert (run.stdout, run.returncode) == (f"{before}\n", 0), run.stderr
        assert machine.huge_pages_total() == before + 5
    finally:
        machine._add_pages(_POOL, -5)


def test_only_as_many_are_given_back_as_were_taken(tmp_path: Path) -> None:
    """Others' pages go meanwhile: they were free when looked at, and are gone when taken."""
    before = machine.huge_pages_total()
    looked = f"machine._unused_pages = lambda folder: {before} + 7\n"
    run = _run(looked + _COUNT, tmp_path)
    assert run.returncode == 0, run.stderr
    assert machine.huge_pages_total() == before


def test_what_a_killed_run_had_broken_before_is_unmounted(tmp_path: Path) -> None:
    before = machine.huge_pages_total()
    broken = "shutil.rmtree(f'{node.root}/{machine.POOL}', ignore_errors=True)\n    os.kill("
    killed = _run(_PREPARE.replace("os.kill(", broken), tmp_path)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    root = killed.stdout.strip()
    try:
        assert os.path.ismount(root)
        run = _run(_COUNT, tmp_path)
        assert (run.stdout, run.returncode) == (f"{before}\n", 0), run.stderr
        assert not os.path.exists(os.path.dirname(root))
    finally:
        machine._add_pages(_POOL, before - machine.huge_pages_total())


def test_what_a_killed_run_left_is_released_by_the_next_one(tmp_path: Path) -> None:
    before = machine.huge_pages_total()
    killed = _run(_PREPARE, tmp_path)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    root = killed.stdout.strip()
    assert machine.huge_pages_total() == before + 4
    assert os.path.isdir(root)

    run = _run(_COUNT, tmp_path)

    assert (run.stdout, run.returncode) == (f"{before}\n", 0), run.stderr
    assert f"releasing {os.path.dirname(root)}" in run.stderr
    assert not os.path.exists(os.path.dirname(root))
