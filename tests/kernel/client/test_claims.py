"""Many claimers at once: nobody gets a part, nobody starves, nobody waits for the dead."""

from __future__ import annotations

import os
import time

import pytest

import hostprep
from hostprep.client import claim as tickets
from hostprep.client.claim import claim_lock
from hostprep.errors import BusyError
from hostprep.node.apply.service import Node
from hostprep.paths import PoolPaths
from testbed.claimers import run_claimers
from testbed.machine import POOL, pool_of
from tests.support.processes import forked, wait_until

pytestmark = pytest.mark.kernel


def test_eight_processes_claim_two_to_four_of_six_regions(node: Node) -> None:
    node.prepare([pool_of(regions=6, mib=1)])

    reports = run_claimers(node.root, POOL, processes=8, rounds=25, regions=6, seed=1)

    assert [report.rounds for report in reports] == [25] * 8
    assert not any(report.partial_sets for report in reports)
    assert not any(report.overlaps for report in reports)
    # A fair share is 8 turns of a few ms; ten times the whole run means somebody starved.
    assert max(report.longest_wait_s for report in reports) < 60


def test_a_large_batch_is_not_starved_by_small_ones(node: Node) -> None:
    node.prepare([pool_of(regions=3, mib=1)])

    def nibble(ready: object) -> None:
        assert callable(ready)
        ready()
        while True:
            hostprep.attach(POOL, root=node.root, wait_timeout_s=60).close()

    with forked(nibble), forked(nibble), forked(nibble):
        for _ in range(3):
            held = hostprep.attach_many(POOL, count=3, root=node.root, wait_timeout_s=60)
            for memory in held:
                memory.close()


def test_the_large_batch_would_starve_without_tickets(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A test of the tests: small claims that overtake never leave three regions free."""
    node.prepare([pool_of(regions=3, mib=1)])
    first = hostprep.attach(POOL, region="node0-0", root=node.root)
    monkeypatch.setattr("hostprep.client.claim.left_by_earlier", lambda *given: given[-1])
    with forked(lambda ready: _wait_for(node, 3, ready)):
        wait_until(lambda: bool(os.listdir(PoolPaths(node.root, POOL).tickets)))
        second = hostprep.attach(POOL, root=node.root)
    first.close()
    second.close()


def test_who_came_first_is_served_first(node: Node) -> None:
    node.prepare([pool_of(regions=3, mib=1)])
    first = hostprep.attach(POOL, region="node0-0", root=node.root)
    with forked(lambda ready: _wait_for(node, 3, ready)):
        wait_until(lambda: bool(os.listdir(PoolPaths(node.root, POOL).tickets)))
        with pytest.raises(BusyError, match="others that came before"):
            hostprep.attach(POOL, root=node.root)
    first.close()


def _wait_for(node: Node, count: int, ready: object) -> None:
    assert callable(ready)
    ready()
    globals()["_held"] = hostprep.attach_many(POOL, count=count, root=node.root, wait_timeout_s=60)


def test_a_claim_passes_waiters_that_want_other_regions(node: Node) -> None:
    node.prepare([pool_of(regions=2, mib=1)])
    held = hostprep.attach(POOL, region="node0-0", root=node.root)

    def wait_for_the_first(ready: object) -> None:
        assert callable(ready)
        ready()
        hostprep.attach(POOL, region="node0-0", root=node.root, wait_timeout_s=60)

    with forked(wait_for_the_first):
        wait_until(lambda: bool(os.listdir(PoolPaths(node.root, POOL).tickets)))
        hostprep.attach(POOL, region="node0-1", root=node.root).close()
    held.close()


def test_the_ticket_of_a_dead_waiter_is_skipped_and_removed(node: Node) -> None:
    node.prepare([pool_of(regions=1, mib=1)])
    paths = PoolPaths(node.root, POOL)
    held = hostprep.attach(POOL, root=node.root)
    with forked(lambda ready: _wait_for(node, 1, ready)):
        wait_until(lambda: bool(os.listdir(paths.tickets)))
    held.close()
    assert os.listdir(paths.tickets)

    hostprep.attach(POOL, root=node.root).close()

    assert not os.listdir(paths.tickets)


def test_waiters_hold_nothing(node: Node) -> None:
    node.prepare([pool_of(regions=2, mib=1)])
    held = hostprep.attach(POOL, region="node0-0", root=node.root)
    with forked(lambda ready: _wait_for(node, 2, ready)) as waiter:
        wait_until(lambda: bool(os.listdir(PoolPaths(node.root, POOL).tickets)))
        inode = os.stat(f"{node.root}/{POOL}/mem/node0-1").st_ino
        time.sleep(0.1)
        with open("/proc/locks", encoding="ascii") as file:
            held_by_waiter = [line for line in file if f" {waiter} " in line]
        assert held_by_waiter, "the ticket's lock should show"
        assert not any(line.split()[5].endswith(f":{inode}") for line in held_by_waiter)
    held.close()


def test_a_stopped_holder_of_the_decision_lock_is_named_not_waited_for(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    node.prepare([pool_of(regions=1, mib=1)])
    paths = PoolPaths(node.root, POOL)
    monkeypatch.setattr("hostprep.client.claim._LOCK_TIMEOUT_S", 0.2)
    with claim_lock(paths):
        with pytest.raises(BusyError, match="claim.lock"):
            hostprep.attach(POOL, root=node.root)


def test_tickets_are_numbered_in_order_of_arrival(node: Node) -> None:
    node.prepare([pool_of(regions=1, mib=1)])
    paths = PoolPaths(node.root, POOL)
    wanted = frozenset({"node0-0"})
    first = tickets.draw_ticket(paths, wanted)
    second = tickets.draw_ticket(paths, wanted)
    assert tickets.left_by_earlier(paths, first, wanted) == wanted
    assert not tickets.left_by_earlier(paths, second, wanted)
    first.give_up()
    assert tickets.left_by_earlier(paths, second, wanted) == wanted
    second.give_up()
