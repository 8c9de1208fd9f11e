"""Pools of huge pages that grow and shrink: further mounts, each as large as its regions."""

from __future__ import annotations

import json
import os
import signal

import pytest

import hostprep
from hostprep.api.pool_spec import PoolSpec, mount_options
from hostprep.backing import MIB, Backing
from hostprep.client.handoff import read_handoff, verify_handoff
from hostprep.linux.mounts import mount
from hostprep.node.apply.runner import ProgressReporter
from hostprep.node.apply.service import Node
from hostprep.node.observe.host import read_mounts
from hostprep.node.observe.pools import observe_pools
from hostprep.node.plan.actions import Action, CreateRegion, MountMemory
from hostprep.paths import PoolPaths
from testbed.machine import POOL, huge_pages_total, pool_of
from tests.support.processes import hostprep as run_hostprep

pytestmark = pytest.mark.kernel

FURTHER = "mem-hugetlb2mi"


def of_size(mib: int) -> PoolSpec:
    return pool_of(mib=mib, backing=Backing.HUGETLB_2MI)


def paths_of(node: Node) -> list[str]:
    """Where the regions lie, each checked against the kernel."""
    paths = PoolPaths(node.root, POOL)
    handoff = read_handoff(paths)
    assert [problem for _, problem in verify_handoff(paths, handoff) if problem] == []
    return [region.path for region in handoff.regions]


def limits(node: Node) -> dict[str, int | None]:
    """What each mount may hold, in MiB."""
    folder = PoolPaths(node.root, POOL).folder
    found = {m.path: m.limit_bytes for m in read_mounts() if os.path.dirname(m.path) == folder}
    return {os.path.basename(p): limit and limit // MIB for p, limit in sorted(found.items())}


def test_growing_twice_shrinking_and_growing_again(node: Node) -> None:
    before = huge_pages_total()
    node.prepare([of_size(8)])
    with hostprep.attach(POOL, root=node.root) as memory:
        memory.buffer[:4] = b"live"
        for mib in (14, 24):
            node.prepare([of_size(mib)])
        last = f"{FURTHER}-1"
        assert paths_of(node) == ["mem/node0-0", f"{FURTHER}/node0-1", f"{last}/node0-2"]
        assert limits(node) == {"mem": 8, FURTHER: 6, last: 10}

        node.prepare([of_size(14)])
        assert limits(node) == {"mem": 8, FURTHER: 6}
        assert not os.path.exists(f"{node.root}/{POOL}/{last}")
        assert huge_pages_total() == before + 7
        node.prepare([of_size(16)])
        assert limits(node) == {"mem": 8, FURTHER: 6, last: 2}
        assert memory.buffer[:4].tobytes() == b"live"
    node.release([POOL])
    assert huge_pages_total() == before
    assert not os.path.exists(node.root)


def test_regions_on_several_mounts_are_claimed_scrubbed_shown_and_verified(node: Node) -> None:
    for mib in (8, 16):
        node.prepare([of_size(mib)])
    one, other = hostprep.attach_many(POOL, count=2, root=node.root)
    with one, other:
        other.buffer[:4] = b"dirt"
    node.prepare([of_size(16)])
    assert all(region.clean for region in observe_pools(node.root)[0].regions)
    verified = run_hostprep("verify", POOL, "--root", node.root)
    assert verified.returncode == 0, verified.stdout
    shown = json.loads(run_hostprep("status", "-o", "json", "--root", node.root).stdout)
    (pool,) = shown["pools"]
    assert [region["state"] for region in pool["regions"]] == ["Free", "Free"]
    report = run_hostprep("doctor", "--root", node.root).stdout
    assert FURTHER not in report, report


def test_room_that_a_removed_region_left_is_used_again(node: Node) -> None:
    two = pool_of(regions=2, backing=Backing.HUGETLB_2MI)
    node.prepare([two])
    for _ in range(3):
        node.prepare([of_size(8)])
        node.prepare([two])
        assert paths_of(node) == ["mem/node0-0", "mem/node0-1"]
        assert limits(node) == {"mem": 16}


def test_a_mount_of_an_earlier_version_goes_on_being_used(node: Node) -> None:
    """It has no limit: a boot script of then made it, and leased regions are on it."""
    folder = f"{node.root}/{POOL}/mem"
    os.makedirs(folder)
    mount("hugetlbfs", folder, mount_options(Backing.HUGETLB_2MI, gid=None))
    for mib in (8, 16):
        node.prepare([of_size(mib)])
    assert paths_of(node) == ["mem/node0-0", "mem/node0-1"]
    assert limits(node) == {"mem": None}


class _Dying(ProgressReporter):
    """Ends the process at the begin, at the first progress or at the end of an action."""

    def __init__(self, kind: type[Action], when: str) -> None:
        self._kind, self._when = kind, when

    def begin(self, action: Action) -> None:
        self._die(action, "begin")

    def advance(self, action: Action, size_bytes: int) -> None:
        _ = size_bytes
        self._die(action, "advance")

    def end(self, action: Action, *, took_s: float) -> None:
        _ = took_s
        self._die(action, "end")

    def _die(self, action: Action, when: str) -> None:
        if isinstance(action, self._kind) and when == self._when:
            os.kill(os.getpid(), signal.SIGKILL)


def _killed(node: Node, spec: PoolSpec, dying: ProgressReporter) -> None:
    pid = os.fork()
    if pid == 0:
        try:
            node.prepare([spec], progress=dying)
        finally:
            os._exit(0)
    _, status = os.waitpid(pid, 0)
    assert os.WTERMSIG(status) == signal.SIGKILL


@pytest.mark.parametrize(
    ("kind", "when"),
    [
        (MountMemory, "begin"),
        (MountMemory, "end"),
        (CreateRegion, "begin"),
        (CreateRegion, "advance"),
        (CreateRegion, "end"),
    ],
)
def test_killed_while_growing_the_next_run_uses_the_same_mount(
    node: Node, kind: type[Action], when: str
) -> None:
    node.prepare([of_size(8)])
    _killed(node, of_size(136), _Dying(kind, when))
    node.prepare([of_size(136)])
    assert paths_of(node) == ["mem/node0-0", f"{FURTHER}/node0-1"]
    assert limits(node) == {"mem": 8, FURTHER: 128}


def test_killed_while_populating_and_asked_for_less_then(node: Node) -> None:
    """The half-made region had reserved all of its mount."""
    _killed(node, of_size(128), _Dying(CreateRegion, "advance"))
    assert os.listdir(f"{node.root}/{POOL}/mem") == [".node0-0.part"]
    node.prepare([of_size(64)])
    assert paths_of(node) == ["mem/node0-0"]
    assert os.listdir(f"{node.root}/{POOL}/mem") == ["node0-0"]
