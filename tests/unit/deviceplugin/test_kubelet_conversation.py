"""Our plugins and a kubelet's device half, over real sockets and the real protocol."""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import socket
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import grpc
import pytest

from hostprep.backing import Backing
from hostprep.deviceplugin import v1beta1_pb2 as api
from hostprep.deviceplugin.devices import Device
from hostprep.deviceplugin.plugins import PluginEvents, Plugins
from hostprep.deviceplugin.views import make_view, refresh_views
from hostprep.handoff import Handoff, Region
from hostprep.kernel.processes import boot_id
from hostprep.paths import PoolPaths
from tests.support.kubelet_devices import KubeletDevices
from tests.support.waiting import wait_for

pytestmark = pytest.mark.unit

RESOURCE = "hostprep.dev/kv"
FREE = (Device("node0-0", healthy=True, numa_node=0), Device("node1-0", healthy=True, numa_node=1))


class Offering:
    """Plugins that run in a loop of their own, as in the agent."""

    def __init__(self, root: str, kubelet_dir: Path) -> None:
        self.said: list[str] = []
        events = PluginEvents(
            registered=lambda pool: self.said.append(f"registered {pool}"),
            failed=lambda pool, error: self.said.append(f"failed {pool}: {error.reason}"),
            gone=lambda pool: self.said.append(f"gone {pool}"),
        )
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()
        self.plugins = Plugins(root, "hostprep.pyz", str(kubelet_dir), events)
        self._task = asyncio.run_coroutine_threadsafe(self.plugins.run(), self._loop)

    def show(self, **pools: tuple[Device, ...]) -> None:
        async def tell() -> None:
            self.plugins.show(pools)

        asyncio.run_coroutine_threadsafe(tell(), self._loop).result(10)

    def close(self) -> None:
        self._task.cancel()
        with contextlib.suppress(BaseException):
            self._task.result(10)

        async def rest() -> None:
            await asyncio.sleep(0.05)

        asyncio.run_coroutine_threadsafe(rest(), self._loop).result(10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()


class SlowKubelet(KubeletDevices):
    """One that answers a registration only when it is told to."""

    def __init__(self, root_dir: Path) -> None:
        super().__init__(root_dir)
        self.asked = threading.Event()
        self.answers = threading.Event()

    def _register(self, request: api.RegisterRequest, context: grpc.ServicerContext) -> api.Empty:
        self.asked.set()
        assert self.answers.wait(10)
        return super()._register(request, context)


@pytest.fixture
def paths(tmp_path: Path) -> PoolPaths:
    """A pool's folder as the agent leaves it; its regions are files of one page."""
    paths = PoolPaths(str(tmp_path / "root"), "kv")
    for folder in (paths.mem, paths.tickets, paths.links):
        os.makedirs(folder)
    Path(paths.claim_lock).touch()
    Path(paths.root, "hostprep.pyz").touch()
    for name in ("node0-0", "node1-0"):
        os.makedirs(paths.state_of(name))
        Path(paths.mem, name).write_bytes(bytes(4096))
    publish(paths, "node0-0", "node1-0")
    return paths


def publish(paths: PoolPaths, *names: str, generation: int = 1) -> None:
    regions = []
    for name in names:
        status = os.stat(f"{paths.mem}/{name}")
        regions.append(
            Region(
                name=name,
                path=f"mem/{name}",
                st_dev=status.st_dev,
                st_ino=status.st_ino,
                size_bytes=4096,
                backing=Backing.BASE,
                page_bytes=4096,
                placement=name.replace("node", "node:").split("-")[0],
                pinned=True,
            )
        )
    handoff = Handoff(
        pool=paths.pool,
        pool_uid="",
        generation=generation,
        boot_id=boot_id(),
        agent_version="1",
        regions=tuple(regions),
    )
    Path(paths.handoff).write_bytes(handoff.to_bytes())


@pytest.fixture
def kubelet_dir() -> Iterator[Path]:
    """A short one: sockets lie in it, and pytest's own folders leave too little of 107 bytes."""
    with tempfile.TemporaryDirectory(prefix="hp-", dir="/tmp") as folder:
        yield Path(folder, "kubelet")


@pytest.fixture
def offering(paths: PoolPaths, kubelet_dir: Path) -> Iterator[Offering]:
    offering = Offering(paths.root, kubelet_dir)
    yield offering
    offering.close()


@pytest.fixture
def kubelet(kubelet_dir: Path) -> Iterator[KubeletDevices]:
    with KubeletDevices(kubelet_dir) as kubelet:
        yield kubelet


def test_kubelet_hears_of_every_device_and_its_numa_node(
    offering: Offering, kubelet: KubeletDevices
) -> None:
    offering.show(kv=(*FREE, Device("interleave-0", healthy=False, numa_node=None)))
    wait_for(lambda: kubelet.health(RESOURCE))
    assert kubelet.health(RESOURCE) == {
        "node0-0": "Healthy",
        "node1-0": "Healthy",
        "interleave-0": "Unhealthy",
    }
    assert kubelet.numa_nodes(RESOURCE) == {"node0-0": [0], "node1-0": [1], "interleave-0": []}
    wait_for(lambda: offering.said == ["registered kv"])


def test_the_options_are_the_same_both_ways_they_are_told(
    offering: Offering, kubelet: KubeletDevices
) -> None:
    offering.show(kv=FREE)
    wait_for(lambda: kubelet.is_connected(RESOURCE))
    assert kubelet.ask_options(RESOURCE) == kubelet.options(RESOURCE)
    assert kubelet.options(RESOURCE).get_preferred_allocation_available
    assert not kubelet.options(RESOURCE).pre_start_required


def test_a_change_is_told_at_once_and_no_change_never(
    offering: Offering, kubelet: KubeletDevices
) -> None:
    offering.show(kv=FREE)
    wait_for(lambda: kubelet.updates(RESOURCE) == 1)
    offering.show(kv=FREE)
    offering.show(kv=(replace(FREE[0], healthy=False), FREE[1]))
    wait_for(lambda: kubelet.health(RESOURCE)["node0-0"] == "Unhealthy")
    assert kubelet.updates(RESOURCE) == 2


def test_kubelet_restarts_and_is_told_again(offering: Offering, kubelet: KubeletDevices) -> None:
    offering.show(kv=FREE)
    wait_for(lambda: kubelet.is_connected(RESOURCE))
    for restarts in (1, 2):
        kubelet.restart()
        wait_for(lambda: kubelet.health(RESOURCE).get("node0-0") == "Healthy")
        assert offering.said == ["registered kv"] * (restarts + 1)


def test_kubelet_is_away_at_first_and_that_is_said_once(
    offering: Offering, kubelet_dir: Path
) -> None:
    offering.show(kv=FREE)
    wait_for(lambda: offering.said == ["failed kv: NoKubelet"])
    with KubeletDevices(kubelet_dir) as kubelet:
        wait_for(lambda: kubelet.is_connected(RESOURCE))
        wait_for(lambda: offering.said == ["failed kv: NoKubelet", "registered kv"])
    wait_for(lambda: offering.said[2:] == ["failed kv: NoKubelet"])


def test_a_refusal_is_said_with_kubelets_words_and_tried_again(
    offering: Offering, kubelet_dir: Path
) -> None:
    with KubeletDevices(kubelet_dir, refuse="the version is not one of ours") as kubelet:
        offering.show(kv=FREE)
        wait_for(lambda: offering.said == ["failed kv: Refused"])
        kubelet.refuse = ""
        wait_for(lambda: kubelet.is_connected(RESOURCE))
    assert offering.said[:2] == ["failed kv: Refused", "registered kv"]


def test_a_kubelet_that_was_killed_is_awaited_and_the_next_one_told_at_once(
    offering: Offering, kubelet: KubeletDevices, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its socket stays behind, and nobody listens there: the pauses grow."""
    monkeypatch.setattr("hostprep.deviceplugin.plugins._DROPPED_AFTER_S", 0.1)
    offering.show(kv=FREE)
    wait_for(lambda: kubelet.is_connected(RESOURCE))
    kubelet.stop()
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(kubelet.folder / "kubelet.sock"))
    wait_for(lambda: "failed kv: Refused" in offering.said, 30)
    offering.plugins._pools["kv"].retry_at_s = math.inf
    kubelet.start()
    wait_for(lambda: kubelet.health(RESOURCE).get("node0-0") == "Healthy", 30)


def test_a_socket_that_was_deleted_is_made_again(
    offering: Offering, kubelet: KubeletDevices
) -> None:
    offering.show(kv=FREE)
    wait_for(lambda: kubelet.is_connected(RESOURCE))
    (kubelet.folder / "hostprep-kv.sock").unlink()
    wait_for(lambda: kubelet.registrations == 2)
    wait_for((kubelet.folder / "hostprep-kv.sock").is_socket)
    wait_for(lambda: kubelet.health(RESOURCE).get("node0-0") == "Healthy")


def test_one_that_kubelet_dropped_without_a_word_registers_again(
    offering: Offering, kubelet: KubeletDevices, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hostprep.deviceplugin.plugins._DROPPED_AFTER_S", 0.5)
    offering.show(kv=FREE)
    wait_for(lambda: kubelet.is_connected(RESOURCE))
    kubelet.drop(RESOURCE)
    wait_for(lambda: kubelet.is_connected(RESOURCE))


def test_a_pool_that_goes_while_kubelet_takes_its_time_is_no_trouble(
    offering: Offering, kubelet_dir: Path
) -> None:
    with SlowKubelet(kubelet_dir) as kubelet:
        offering.show(kv=FREE, tier=FREE)  # tier waits for its turn all the while
        wait_for(kubelet.asked.is_set)
        offering.show(other=FREE)
        kubelet.answers.set()
        wait_for(lambda: kubelet.is_connected("hostprep.dev/other"))
        wait_for(lambda: "registered other" in offering.said)
        wait_for(lambda: not kubelet.is_connected(RESOURCE))
        assert not (kubelet.folder / "hostprep-tier.sock").exists(), "served after it was gone"
    assert "registered kv" not in offering.said
    assert not [said for said in offering.said if said.startswith("failed kv")]
    assert kubelet.health("hostprep.dev/tier") == {}


def test_a_pool_whose_mode_changes_there_and_back_is_registered_anew(
    offering: Offering, kubelet_dir: Path
) -> None:
    with SlowKubelet(kubelet_dir) as kubelet:
        offering.show(kv=FREE)
        wait_for(kubelet.asked.is_set)
        offering.show()
        offering.show(kv=FREE[:1])
        kubelet.answers.set()
        wait_for(lambda: kubelet.health(RESOURCE) == {"node0-0": "Healthy"})
        wait_for(lambda: offering.said == ["gone kv", "registered kv"])


def test_an_error_that_nobody_foresaw_is_said_once_and_tried_again(
    offering: Offering, kubelet: KubeletDevices, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As protobuf's VersionError, which comes of importing and is no ImportError."""
    tried: list[None] = []

    def fails(*_: object, **__: object) -> None:
        tried.append(None)
        raise RuntimeError("gencode is newer than the runtime")

    with monkeypatch.context() as patch:
        patch.setattr("hostprep.deviceplugin.plugin.PoolPlugin.__init__", fails)
        offering.show(kv=FREE)
        wait_for(lambda: len(tried) >= 2)
        assert offering.said == ["failed kv: Unexpected"]
    wait_for(lambda: kubelet.is_connected(RESOURCE))
    wait_for(lambda: offering.said == ["failed kv: Unexpected", "registered kv"])


def test_a_pool_that_is_no_longer_offered_signs_off_alone(
    offering: Offering, kubelet: KubeletDevices
) -> None:
    offering.show(kv=FREE, tier=FREE)
    wait_for(lambda: kubelet.is_connected("hostprep.dev/tier"))
    offering.show(tier=FREE)
    wait_for(lambda: not kubelet.is_connected(RESOURCE))
    wait_for(lambda: not (kubelet.folder / "hostprep-kv.sock").exists())
    assert kubelet.is_connected("hostprep.dev/tier")
    assert "gone kv" in offering.said


def test_the_end_of_the_agent_leaves_no_socket(
    paths: PoolPaths, kubelet: KubeletDevices, kubelet_dir: Path
) -> None:
    offering = Offering(paths.root, kubelet_dir)
    offering.show(kv=FREE)
    wait_for(lambda: kubelet.is_connected(RESOURCE))
    offering.close()
    wait_for(lambda: not kubelet.is_connected(RESOURCE))
    assert [entry.name for entry in kubelet.folder.iterdir()] == ["kubelet.sock"]


def test_what_lies_in_the_sockets_place_goes(offering: Offering, kubelet_dir: Path) -> None:
    with KubeletDevices(kubelet_dir) as kubelet:
        (kubelet.folder / "hostprep-kv.sock").write_text("left by a killed agent")
        offering.show(kv=FREE)
        wait_for(lambda: kubelet.is_connected(RESOURCE))


def test_a_folder_that_cannot_be_written_is_said(offering: Offering, kubelet_dir: Path) -> None:
    with KubeletDevices(kubelet_dir) as kubelet:
        (kubelet.folder / "hostprep-kv.sock").mkdir()
        offering.show(kv=FREE)
        wait_for(lambda: offering.said == ["failed kv: NoSocket"])
        (kubelet.folder / "hostprep-kv.sock").rmdir()
        wait_for(lambda: kubelet.is_connected(RESOURCE))


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


def test_a_view_that_says_the_same_is_not_written_again(paths: PoolPaths) -> None:
    make_view(paths, ["node0-0"])
    handoff = Path(paths.devices, "node0-0", "handoff.json")
    before = handoff.stat().st_ino
    make_view(paths, ["node0-0"])
    refresh_views(paths)
    assert handoff.stat().st_ino == before
