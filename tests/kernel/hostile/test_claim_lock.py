"""A claim lock that an engine holds for ever costs its own pool, and root next to no time."""

from __future__ import annotations

import fcntl
import os
import time

import pytest

from hostprep.agent.verification import verify_node
from hostprep.client import claim
from hostprep.errors import BusyError
from tests.kernel.hostile.attackers import ATTACKED, ENGINE, REGION, Pools

pytestmark = pytest.mark.kernel


def _hold(pools: Pools) -> int:
    fd = os.open(pools.attacked.claim_lock, os.O_RDONLY)
    fcntl.flock(fd, fcntl.LOCK_EX)
    return fd


@pytest.fixture(autouse=True)
def _nothing_remembered() -> None:
    claim._held.clear()


def test_other_pools_are_not_delayed_and_the_holder_is_named(pools: Pools) -> None:
    pools.dirty(ATTACKED)
    with ENGINE.keeps(lambda: _hold(pools)) as pid:
        begin_s = time.monotonic()
        for _ in range(5):
            verify_node(pools.root)
            error = pools.errors()[ATTACKED]
        took_s = time.monotonic() - begin_s
        pools.bystander_works(within_s=8)
    assert error is not None
    assert error.reason == claim.CLAIM_LOCK_HELD
    assert f"process {pid} " in error.message
    assert took_s < 5, "each look waits"
    claim._held.clear()
    assert pools.errors()[ATTACKED] is None
    assert os.path.exists(pools.attacked.clean_mark(REGION))


def test_a_lock_that_a_child_inherited_has_the_child_named(pools: Pools) -> None:
    """/proc/locks gives the process that took it, which has ended."""

    def hold_in_a_child() -> int:
        fd = _hold(pools)
        pid = os.fork()
        if pid:
            os.close(fd)
            return pid
        time.sleep(600)
        os._exit(0)

    with ENGINE.keeps(hold_in_a_child) as parent:
        with pytest.raises(BusyError) as caught, claim.claim_lock_briefly(pools.attacked):
            pass
        child = int(caught.value.message.split()[1])
        with open(f"/proc/{child}/stat", encoding="ascii") as file:
            assert file.read().rpartition(")")[2].split()[1] == str(parent)
        os.kill(child, 9)


def test_a_release_says_who_is_in_the_way_and_by_force_does_without(pools: Pools) -> None:
    pools.node.prepare(pools.specs)
    with ENGINE.keeps(lambda: _hold(pools)) as pid:
        with pytest.raises(BusyError, match=f"process {pid} ") as caught:
            pools.node.release([ATTACKED])
        assert "--force" in str(caught.value)
        pools.node.release([ATTACKED], force=True)
    assert not os.path.exists(pools.attacked.folder)
