"""Root waits for no other process when it opens a file: not for a FIFO, not for a lease.

A lease (fcntl(2), F_SETLEASE), which a file's owner may take, delays whoever opens the file by
/proc/sys/fs/lease-break-time, 45 s, and again at the next opening: all but those who open it with
O_NONBLOCK.
"""

from __future__ import annotations

import fcntl
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import pytest

from hostprep.deviceplugin.views import make_view, refresh_views, view_name
from hostprep.errors import BadInputError
from hostprep.node.apply.exclusive import AgentLock
from hostprep.node.apply.root import AGENT_LOCK, LOCK
from hostprep.node.observe.pools import observe_pools
from hostprep.paths import PoolPaths
from tests.kernel.hostile.attackers import ATTACKED, BYSTANDER, ENGINE, REGION, Attacker, Pools
from tests.support.processes import forked
from tests.support.processes import hostprep as run_hostprep

pytestmark = pytest.mark.kernel

ROOT = Attacker(0, 0)
"""An engine that runs as root: the owner of all that root made."""

AT_ONCE = os.O_NONBLOCK | os.O_EXCL | os.O_DIRECTORY | os.O_PATH
"""With one of these open(2) waits for nobody: what is new, and a folder, has no lease."""


def _lease(path: str) -> int:
    """Take a lease and keep it, whoever asks for its end; a file is made where there is none."""
    os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o660))
    fd = os.open(path, os.O_RDONLY)
    signal.signal(signal.SIGIO, signal.SIG_IGN)
    fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_WRLCK)
    return fd


def _part(paths: PoolPaths) -> str:
    """Return what a killed run left of a region, which root has to go on with."""
    path, part = f"{paths.mem}/{REGION}", paths.part_of("mem", REGION)
    Path(part).touch()
    os.truncate(part, os.stat(path).st_size)
    os.unlink(path)
    return part


def _view(paths: PoolPaths) -> str:
    return f"{paths.devices}/{view_name([REGION])}/handoff.json"


LEASED: dict[str, Callable[[PoolPaths], str]] = {
    "a region that is made": _part,
    "a region": lambda paths: f"{paths.mem}/{REGION}",
    "the handoff": lambda paths: paths.handoff,
    "the ledger": lambda paths: paths.ledger,
    "the claim lock": lambda paths: paths.claim_lock,
    "a view's handoff": _view,
    "the zipapp": lambda paths: f"{os.path.dirname(paths.folder)}/hostprep.pyz",
}
STATE: dict[str, Callable[[PoolPaths], str]] = {
    "the users": lambda paths: paths.users_lock(REGION),
    "the holder": lambda paths: paths.sidecar(REGION),
    "the clean mark": lambda paths: paths.clean_mark(REGION),
    "the bad mark": lambda paths: paths.bad_mark(REGION),
    "the gate": lambda paths: paths.board(REGION),
    "a ticket": lambda paths: f"{paths.tickets}/000000000001",
}


def _again(path: str) -> int:
    """Lease a file of one's own, in place of what was there."""
    if os.path.lexists(path):
        os.unlink(path)
    return _lease(path)


def _bystander_works(pools: Pools) -> None:
    begin_s = time.monotonic()
    refresh_views(pools.attacked)
    assert time.monotonic() - begin_s < 20, "the device plugin had to wait"
    pools.bystander_works()


@pytest.mark.parametrize("name", LEASED)
def test_the_lease_of_an_engine_that_runs_as_root_delays_no_other_pool(
    pools: Pools, name: str
) -> None:
    make_view(pools.attacked, [REGION])
    path = LEASED[name](pools.attacked)
    with ROOT.keeps(lambda: _lease(path)):
        _bystander_works(pools)
    assert pools.errors() == {ATTACKED: None, BYSTANDER: None}


@pytest.mark.parametrize("name", STATE)
def test_an_engines_lease_on_what_it_put_beside_a_region_delays_no_other_pool(
    pools: Pools, name: str
) -> None:
    pools.dirty(ATTACKED)
    path = STATE[name](pools.attacked)
    with ENGINE.keeps(lambda: _again(path)):
        _bystander_works(pools)
    assert pools.errors() == {ATTACKED: None, BYSTANDER: None}
    assert os.path.exists(pools.attacked.clean_mark(REGION))


def test_a_leased_lock_of_the_root_counts_as_held(pools: Pools) -> None:
    with ROOT.keeps(lambda: [_lease(f"{pools.root}/{name}") for name in (LOCK, AGENT_LOCK)]):
        release = ("release", BYSTANDER, "--wait", "0.1", "--root", pools.root)
        done = run_hostprep(*release, timeout_s=20)
        assert (done.returncode, "is at work below" in done.stderr) == (1, True), done
        begin_s = time.monotonic()
        with pytest.raises(BadInputError, match="another agent"):
            AgentLock(pools.root).hold()
        assert time.monotonic() - begin_s < 20, "the agent had to wait"


def test_every_file_below_the_root_is_opened_without_waiting(pools: Pools, tmp_path: Path) -> None:
    """By all that root does: what the tests above do not think of included."""
    found = tmp_path / "found"
    found.touch()

    def work(ready: Callable[[], None]) -> None:
        sys.addaudithook(lambda event, args: _note(event, args, pools.root, found))
        make_view(pools.attacked, [REGION])
        for pool in (ATTACKED, BYSTANDER):
            pools.dirty(pool)
        os.truncate(f"{pools.attacked.mem}/{REGION}", 4096)
        pools.reconcile()
        observe_pools(pools.root)
        refresh_views(pools.attacked)
        pools.node.release([ATTACKED])
        pools.node.prepare(pools.specs)
        lock = AgentLock(pools.root)
        lock.hold()
        with pytest.raises(BadInputError):
            AgentLock(pools.root).hold()
        lock.close()
        ready()

    with forked(work):
        assert found.read_text() == ""


def _note(event: str, args: tuple[object, ...], root: str, found: Path) -> None:
    """Note an open(2) that could wait: of a path below the root, or relative to a folder there."""
    if event != "open":
        return
    path, _, flags = args
    if not isinstance(path, str) or not isinstance(flags, int) or flags & AT_ONCE:
        return
    if path.startswith(root) or not path.startswith("/"):
        with os.fdopen(os.open(found, os.O_WRONLY | os.O_APPEND | os.O_NONBLOCK), "w") as file:
            file.write(f"{path}\n{''.join(traceback.format_stack()[-6:-1])}\n")
