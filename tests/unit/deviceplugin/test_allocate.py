"""What a container gets of a pool by its devices, and that it follows the handoff."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import grpc
import pytest

from hostprep.deviceplugin.views import make_view, refresh_views
from hostprep.errors import HostprepError
from hostprep.paths import PoolPaths
from testbed.processes import wait_for
from tests.support.kubelet_devices import KubeletDevices
from tests.unit.deviceplugin.offering import FREE, RESOURCE, Offering, publish

pytestmark = pytest.mark.unit


def test_a_container_gets_mounts_that_are_there(
    offering: Offering, kubelet: KubeletDevices, paths: PoolPaths
) -> None:
    offering.show(kv=FREE)
    wait_for(lambda: kubelet.is_connected(RESOURCE))
    got = kubelet.allocate(RESOURCE, "node0-0")
    assert dict(got.envs)["HOSTPREP_REGION"] == "node0-0"
    assert all(os.path.exists(mount.host_path) for mount in got.mounts)
    view = next(m.host_path for m in got.mounts if m.container_path == paths.folder)
    assert os.path.samefile(f"{view}/claim.lock", paths.claim_lock)
    for mount in got.mounts:  # nothing is made by the runtime in a folder that it sees read-only
        below = mount.container_path.removeprefix(paths.folder + "/")
        if below != mount.container_path:
            assert os.path.exists(f"{view}/{below}"), mount


def test_a_container_takes_turns_with_the_whole_node_where_there_is_a_turnstile(
    offering: Offering, kubelet: KubeletDevices, paths: PoolPaths
) -> None:
    offering.show(kv=FREE)
    wait_for(lambda: kubelet.is_connected(RESOURCE))
    turnstile = f"{paths.root}/turnstile"
    before = [mount.host_path for mount in kubelet.allocate(RESOURCE, "node0-0").mounts]
    assert turnstile not in before, "a mount of what is not there fails the pod"
    os.mkdir(turnstile)
    got = kubelet.allocate(RESOURCE, "node0-0").mounts
    assert [m.read_only for m in got if m.host_path == turnstile] == [False]


def test_two_devices_are_one_pool_of_two_regions(
    offering: Offering, kubelet: KubeletDevices, paths: PoolPaths
) -> None:
    offering.show(kv=FREE)
    wait_for(lambda: kubelet.is_connected(RESOURCE))
    got = kubelet.allocate(RESOURCE, "node1-0", "node0-0")
    assert dict(got.envs)["HOSTPREP_REGION"] == "node0-0:node1-0"
    view = next(m.host_path for m in got.mounts if m.container_path == paths.folder)
    text = Path(view, "handoff.json").read_text()
    assert '"node0-0"' in text
    assert '"node1-0"' in text


@pytest.mark.parametrize("device", ["node7-0", "../kv", ""])
def test_a_device_that_is_not_published_fails_the_pod_and_says_why(
    offering: Offering, kubelet: KubeletDevices, paths: PoolPaths, device: str
) -> None:
    offering.show(kv=FREE)
    wait_for(lambda: kubelet.is_connected(RESOURCE))
    before = sorted(os.listdir(paths.folder))
    with pytest.raises(grpc.RpcError, match="not published"):
        kubelet.allocate(RESOURCE, device)
    assert sorted(os.listdir(paths.folder)) == before


def test_a_pool_whose_handoff_was_dropped_gives_nothing_out(
    offering: Offering, kubelet: KubeletDevices, paths: PoolPaths
) -> None:
    offering.show(kv=FREE)
    wait_for(lambda: kubelet.is_connected(RESOURCE))
    os.unlink(paths.handoff)
    with pytest.raises(grpc.RpcError, match="not prepared"):
        kubelet.allocate(RESOURCE, "node0-0")


def test_a_handoff_that_is_published_anew_is_waited_for(
    offering: Offering, kubelet: KubeletDevices, paths: PoolPaths
) -> None:
    """A pod would fail for good, only since another region is being rebuilt."""
    offering.show(kv=FREE)
    wait_for(lambda: kubelet.is_connected(RESOURCE))
    os.unlink(paths.handoff)
    again = threading.Timer(0.3, publish, (paths, "node0-0"), {"generation": 2})
    again.start()
    assert kubelet.allocate(RESOURCE, "node0-0").mounts
    again.join()


def test_kubelet_asks_which_devices_are_best(offering: Offering, kubelet: KubeletDevices) -> None:
    offering.show(kv=FREE)
    wait_for(lambda: kubelet.is_connected(RESOURCE))
    assert kubelet.prefer(RESOURCE, ["node0-0", "node1-0"], ["node1-0"], count=1) == ["node1-0"]


def test_views_follow_the_pools_handoff(
    offering: Offering, kubelet: KubeletDevices, paths: PoolPaths
) -> None:
    offering.show(kv=FREE)
    wait_for(lambda: kubelet.is_connected(RESOURCE))
    for devices in (["node0-0"], ["node1-0"], ["node0-0", "node1-0"]):
        kubelet.allocate(RESOURCE, *devices)

    publish(paths, "node0-0", generation=2)
    refresh_views(paths)

    handoffs = {
        view: Path(paths.devices, view, "handoff.json") for view in os.listdir(paths.devices)
    }
    assert set(handoffs) == {"node0-0", "node1-0", "node0-0+node1-0"}
    assert '"generation": 2' in handoffs["node0-0"].read_text()
    assert not handoffs["node1-0"].exists()
    assert '"node1-0"' not in handoffs["node0-0+node1-0"].read_text()

    publish(paths, "node0-0", "node1-0", generation=3)
    refresh_views(paths)
    assert '"node1-0"' in handoffs["node1-0"].read_text()
    assert '"node1-0"' in handoffs["node0-0+node1-0"].read_text()

    os.unlink(paths.handoff)
    refresh_views(paths)
    assert not any(handoff.exists() for handoff in handoffs.values())


@pytest.mark.parametrize("gone", ["links", "claim.lock"])
def test_a_pool_that_is_being_released_costs_its_views_an_error_of_its_own(
    paths: PoolPaths, gone: str
) -> None:
    """Whatever the system says of its files: the agent goes on with the next pool."""
    make_view(paths, ["node0-0"])
    os.rename(f"{paths.folder}/{gone}", f"{paths.folder}/gone")
    for work in (lambda: make_view(paths, ["node0-0"]), lambda: refresh_views(paths)):
        with pytest.raises(HostprepError, match=f"make {paths.devices}/node0-0"):
            work()


def test_a_view_that_says_the_same_is_not_written_again(paths: PoolPaths) -> None:
    make_view(paths, ["node0-0"])
    handoff = Path(paths.devices, "node0-0", "handoff.json")
    before = handoff.stat().st_ino
    make_view(paths, ["node0-0"])
    refresh_views(paths)
    assert handoff.stat().st_ino == before
