"""flock asks for no right but to open a file for reading: what root locks is root's alone."""

from __future__ import annotations

import fcntl
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from hostprep.agent.instance import lock_state_dir
from hostprep.backing import Backing
from hostprep.errors import BadInputError, BusyError
from hostprep.linux.locks import hold_own_lock, open_own_lock
from hostprep.node.apply import hugepages
from testbed.machine import huge_pages_total, pool_of
from tests.kernel.hostile.attackers import STRANGER, Pools
from tests.support.processes import hostprep as run_hostprep

pytestmark = pytest.mark.kernel

_NODES = "/sys/devices/system/node"


def _lock_everything(*folders: str) -> list[int]:
    """Take an exclusive lock on every file and folder that may be opened, and keep them all."""
    paths = [path for folder in folders for path in _below(folder)]
    paths += [str(path) for path in Path(_NODES).glob("node*/hugepages/*/*")]
    taken = []
    for path in paths:
        try:
            fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            taken.append(fd)
        except OSError:
            pass
    return taken


def _below(folder: str) -> Iterator[str]:
    yield folder
    for found, folders, files in os.walk(folder):
        yield from (f"{found}/{name}" for name in (*folders, *files))


def test_a_stranger_with_every_lock_it_can_have_stops_neither_command_line_nor_agent(
    pools: Pools, tmp_path: Path
) -> None:
    state = Path(pools.root).parent / "agent"
    state.mkdir(mode=0o755)
    os.close(lock_state_dir(str(state)))  # with the file of an earlier agent
    kept = lambda: _lock_everything(pools.root, str(state), "/run")  # noqa: E731
    before = huge_pages_total()
    with STRANGER.keeps(kept):
        begin_s = time.monotonic()
        first = lock_state_dir(str(state))
        with pytest.raises(BadInputError, match="another agent"):
            lock_state_dir(str(state))
        os.close(first)
        pools.node.prepare([pool_of(name="huge", backing=Backing.HUGETLB_2MI)])
        pools.node.release(["huge"])
        assert time.monotonic() - begin_s < 10, "root waited for the stranger's locks"
        assert huge_pages_total() == before
        demo = run_hostprep("demo", "--size", "16Mi", "--progress", "none")
        assert demo.returncode == 0, demo.stderr
        assert "waits" not in demo.stderr
        pools.bystander_works()


def test_two_changes_of_huge_pages_exclude_each_other_and_the_lock_leaves_no_file() -> None:
    """In whatever container: the lock is one file of the host."""
    path = hugepages._machine_lock()
    order = []

    def other() -> None:
        with hugepages._locked(0, 2 << 20):
            order.append("other")

    with hugepages._locked(0, 2 << 20):
        assert os.stat(path).st_mode & 0o777 == 0o600
        thread = threading.Thread(target=other)
        thread.start()
        time.sleep(0.2)
        order.append("first")
    thread.join(10)
    assert order == ["first", "other"]
    assert not os.path.exists(path)


def test_an_earlier_versions_lock_on_the_kernels_file_is_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(hugepages, "_OLD_LOCK_TIMEOUT_S", 5.0)
    folder = hugepages._folder(0, 2 << 20)
    with open(f"{folder}/nr_hugepages", encoding="ascii") as old:
        fcntl.flock(old, fcntl.LOCK_EX)
        timer = threading.Timer(0.3, lambda: fcntl.flock(old, fcntl.LOCK_UN))
        timer.start()
        begin_s = time.monotonic()
        with hugepages._locked(0, 2 << 20):
            assert time.monotonic() - begin_s >= 0.25
        timer.join()


def test_a_lock_file_of_another_user_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    path.touch()
    os.chown(path, 1001, 1001)
    with pytest.raises(BadInputError):
        open_own_lock(str(path))


def test_a_waiter_takes_no_lock_that_was_removed(tmp_path: Path) -> None:
    """The holder removes its file: who waits on it must not think to have the next one."""
    path = str(tmp_path / "lock")

    def busy() -> BusyError:
        return BusyError("held")

    with hold_own_lock(path, timeout_s=0, busy=busy):
        with pytest.raises(BusyError), hold_own_lock(path, timeout_s=0.05, busy=busy):
            pass
        assert os.path.exists(path)
    with hold_own_lock(path, timeout_s=0, busy=busy):
        assert os.stat(path).st_mode & 0o777 == 0o600
    assert not os.path.exists(path)


def test_of_many_that_take_turns_two_never_hold_the_lock(tmp_path: Path) -> None:
    """Some open the file that its holder removes in the same instant."""
    path = str(tmp_path / "lock")
    holding: list[int] = []
    together: list[int] = []

    def take_turns() -> None:
        for _ in range(400):
            with hold_own_lock(path, timeout_s=30, busy=lambda: BusyError("held")):
                holding.append(1)
                time.sleep(0)
                together.append(len(holding))
                holding.pop()

    threads = [threading.Thread(target=take_turns) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert together == [1] * 3200
