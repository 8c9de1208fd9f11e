"""Folders that others fill are removed whatever is in them, and mounts are not entered."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from hostprep.api.pool_spec import PoolState
from hostprep.cuda.turnstile_files import make_turnstiles
from hostprep.linux.files import closing_fd, remove_tree
from hostprep.linux.locks import try_lock
from hostprep.node.apply import exclusive
from hostprep.node.apply.folder import remove_put_aside
from hostprep.paths import TURNSTILE
from testbed.machine import pool_of
from tests.kernel.hostile.attackers import (
    ATTACKED,
    BYSTANDER,
    ENGINE,
    GID,
    REGION,
    STRANGER,
    Pools,
)
from tests.support.processes import hostprep as run_hostprep

pytestmark = pytest.mark.kernel

_DEPTH = 1500
"""More than the recursion limit of Python, and than a process may open files."""


def nest(folder: str, depth: int = _DEPTH) -> None:
    """Make folders within each other, each with a file, deeper than any path is long."""
    at = os.open(folder, os.O_RDONLY)
    for _ in range(depth):
        os.mkdir("folder", 0o755, dir_fd=at)
        os.close(os.open("file", os.O_CREAT | os.O_WRONLY, dir_fd=at))
        below = os.open("folder", os.O_RDONLY | os.O_DIRECTORY, dir_fd=at)
        os.close(at)
        at = below
    os.close(at)


def _turnstile(pools: Pools) -> str:
    return f"{pools.root}/{TURNSTILE}/node"


def _state(pools: Pools) -> str:
    return pools.attacked.state_of(REGION)


def _tickets(pools: Pools) -> str:
    return pools.attacked.tickets


def _links(pools: Pools) -> str:
    return pools.attacked.links


@pytest.mark.parametrize("where", [_turnstile, _state, _tickets, _links])
def test_nested_folders_stop_no_round_and_no_release(
    pools: Pools, where: Callable[[Pools], str]
) -> None:
    attacker = STRANGER if where is _turnstile else ENGINE
    attacker.does(lambda: nest(where(pools)))
    pools.node.publish_shared_files()
    pools.bystander_works()
    pools.dirty(ATTACKED)
    assert pools.errors()[ATTACKED] is None
    done = run_hostprep("release", ATTACKED, BYSTANDER, "--root", pools.root)
    assert done.returncode == 0, done.stderr
    assert not os.path.exists(pools.root)


def _fill(folder: str, files: int = 10) -> None:
    for number in range(files):
        os.close(os.open(f"{folder}/{number}", os.O_CREAT | os.O_WRONLY))


def _by_release(pools: Pools) -> None:
    pools.node.release([ATTACKED])


def _by_the_agent(pools: Pools) -> None:
    pools.specs[0] = replace(pools.specs[0], state=PoolState.ABSENT)
    assert pools.errors()[ATTACKED] is None


def _by_a_smaller_pool(pools: Pools) -> None:
    pools.specs[0] = pool_of(name=ATTACKED, gid=GID)
    pools.node.prepare(pools.specs)


@pytest.mark.parametrize(
    ("where", "remove"),
    [
        (_state, _by_release),
        (_tickets, _by_release),
        (_links, _by_release),
        (_links, _by_the_agent),
        (lambda pools: pools.attacked.state_of("node0-1"), _by_a_smaller_pool),
    ],
)
def test_no_other_process_waits_while_what_an_engine_left_is_removed(
    pools: Pools,
    monkeypatch: pytest.MonkeyPatch,
    where: Callable[[Pools], str],
    remove: Callable[[Pools], None],
) -> None:
    ENGINE.does(lambda: _fill(where(pools)))
    unlink, held = os.unlink, []

    def unlink_and_see(path: str, *, dir_fd: int | None = None) -> None:
        if dir_fd is not None and path.isdigit():
            with closing_fd(os.open(f"{pools.root}/.lock", os.O_RDONLY)) as lock:
                held.append(not try_lock(lock, exclusive=True))
        unlink(path, dir_fd=dir_fd)

    monkeypatch.setattr(os, "unlink", unlink_and_see)
    remove(pools)
    assert held == [False] * 10
    pools.bystander_works_in_process()


def test_what_a_killed_release_left_stops_no_other_and_goes_with_the_next(
    pools: Pools, monkeypatch: pytest.MonkeyPatch
) -> None:
    def release_and_be_killed() -> None:
        with monkeypatch.context() as patched:
            patched.setattr(exclusive, "remove_put_aside", lambda _: os._exit(9))
            pools.node.release([ATTACKED])

    for _ in range(2):  # of one name
        ENGINE.does(lambda: _fill(pools.attacked.links))
        pid = os.fork()
        if pid == 0:
            release_and_be_killed()
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 9
        assert not os.path.exists(pools.attacked.folder)
        with monkeypatch.context() as patched:
            patched.setattr(exclusive, "remove_put_aside", lambda _: None)
            pools.node.prepare(pools.specs)
    assert len([name for name in os.listdir(pools.root) if name.startswith(f".{ATTACKED}.")]) > 1
    pools.node.release([ATTACKED, BYSTANDER])
    assert not os.path.exists(pools.root)


def test_two_processes_may_remove_the_same(tmp_path_on_tmpfs: Path) -> None:
    top = tmp_path_on_tmpfs / ".kv.0.gone"
    top.mkdir()
    nest(str(top), 100)
    _fill(str(top), 20_000)
    children = []
    for _ in range(2):
        children.append(os.fork())
        if children[-1] == 0:
            remove_put_aside(str(tmp_path_on_tmpfs))
            os._exit(0)
    for pid in children:
        assert os.waitpid(pid, 0)[1] == 0
    assert not top.exists()


def test_a_folder_nested_in_the_place_of_a_file_is_replaced(pools: Pools) -> None:
    clean = pools.attacked.clean_mark(REGION)

    def attack() -> None:
        os.unlink(clean)
        os.mkdir(clean)
        nest(clean)

    ENGINE.does(attack)
    assert pools.errors()[ATTACKED] is None
    assert os.path.isfile(clean)


@pytest.mark.parametrize("depth", [1500, 100_000])
def test_any_depth_is_removed_by_one_call(tmp_path_on_tmpfs: Path, depth: int) -> None:
    top = tmp_path_on_tmpfs / "top"
    top.mkdir()
    nest(str(top), depth)
    (top / "folder" / "link").symlink_to(tmp_path_on_tmpfs)
    (tmp_path_on_tmpfs / "precious").touch()
    remove_tree(str(top))
    assert os.listdir(tmp_path_on_tmpfs) == ["precious"]


def test_a_mount_within_is_not_entered(tmp_path_on_tmpfs: Path) -> None:
    """A bind mount of the same file system: its device number does not tell it apart."""
    precious = tmp_path_on_tmpfs / "precious"
    precious.mkdir()
    (precious / "file").touch()
    for depth in ("mount", "a/mount", "a/b/c/mount"):
        target = tmp_path_on_tmpfs / "top" / depth
        target.mkdir(parents=True)
        subprocess.run(["mount", "--bind", precious, target], check=True)
        try:
            remove_tree(str(tmp_path_on_tmpfs / "top"))
            assert os.listdir(precious) == ["file"]
        finally:
            mounts = Path("/proc/mounts").read_text(encoding="ascii").splitlines()
            for at in (line.split()[1] for line in mounts if str(tmp_path_on_tmpfs) in line):
                subprocess.run(["umount", at], check=True)
        remove_tree(str(tmp_path_on_tmpfs / "top"))
        assert not (tmp_path_on_tmpfs / "top").exists()


def test_who_has_a_folder_open_cannot_go_on_filling_it(tmp_path_on_tmpfs: Path) -> None:
    """Else a removal would last as long as its attacker likes."""
    tmp_path_on_tmpfs.chmod(0o777)
    top = tmp_path_on_tmpfs / "top"

    def fill_for_ever() -> int:
        os.mkdir(top)
        at = os.open(top, os.O_RDONLY)
        if os.fork() == 0:
            number = 0
            while True:
                try:
                    os.mkdir(f"{number}", dir_fd=at)
                    os.mkdir(f"{number}/full", dir_fd=at)
                except OSError:
                    os._exit(0)
                number += 1
        return at

    with STRANGER.keeps(fill_for_ever):
        remove_tree(str(top))
        assert not top.exists()


def test_what_the_turnstile_keeps_is_not_looked_through(pools: Pools) -> None:
    STRANGER.does(lambda: os.mkdir(f"{_turnstile(pools)}/other"))
    STRANGER.does(lambda: nest(f"{_turnstile(pools)}/other", 20))
    make_turnstiles(pools.root)
    assert os.listdir(_turnstile(pools)) == ["slot0"]


@pytest.fixture
def tmp_path_on_tmpfs(node: object) -> Iterator[Path]:
    """A folder of a memory file system, as the root's is."""
    del node  # which says that this takes root
    folder = Path(f"/dev/shm/hostprep-test-trees-{os.getpid()}")
    folder.mkdir()
    yield folder
    remove_tree(str(folder))


def _calls_of(work: Callable[[], object]) -> int:
    """Return how many functions of the interpreter a piece of work calls: its cost, on any day."""
    calls = 0

    def count(_frame: object, event: str, _function: object) -> None:
        nonlocal calls
        calls += event == "c_call"

    sys.setprofile(count)
    try:
        work()
    finally:
        sys.setprofile(None)
    return calls


def test_files_named_like_regions_cost_a_round_as_much_as_their_number(pools: Pools) -> None:
    # An engine that runs as root can make them. One action each, that observes the whole pool,
    # takes minutes with some thousands; other pools wait.
    def round_with(files: int) -> int:
        for number in range(10, 10 + files):
            Path(f"{pools.attacked.folder}/mem/node0-{number}").touch()
        for number in range(100 * files):
            Path(f"{pools.attacked.folder}/junk{number}").touch()
        for number in range(20 * files):
            Path(f"{pools.attacked.links}/junk{number}").touch()
        calls = _calls_of(pools.reconcile)
        assert sorted(os.listdir(f"{pools.attacked.folder}/mem")) == ["node0-0", "node0-1"]
        return calls

    few = round_with(25)
    assert round_with(100) < 6 * few
    for number in range(100 * 100):
        os.unlink(f"{pools.attacked.folder}/junk{number}")


def test_more_files_than_a_pool_may_have_regions_are_that_pools_error(pools: Pools) -> None:
    mem = f"{pools.attacked.folder}/mem"
    for number in range(10, 10 + 4096):
        os.close(os.open(f"{mem}/node0-{number}", os.O_CREAT | os.O_EXCL))
    pools.dirty(BYSTANDER)

    errors = pools.errors()

    assert errors[BYSTANDER] is None
    assert os.path.exists(pools.bystander.clean_mark(REGION))
    assert len(os.listdir(mem)) == 2 + 4096, "other pools waited for their removal"
    shown = run_hostprep("status", ATTACKED, "--root", pools.root)
    assert "delete what is not hostprep's" in shown.stdout, shown
    for number in range(10, 10 + 4096):
        os.unlink(f"{mem}/node0-{number}")
    assert pools.errors() == {ATTACKED: None, BYSTANDER: None}
