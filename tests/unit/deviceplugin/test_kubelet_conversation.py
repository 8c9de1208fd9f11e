"""Our plugins and a kubelet's device half, over real sockets and the real protocol."""

from __future__ import annotations

import math
import socket
import threading
from dataclasses import replace
from pathlib import Path

import grpc
import pytest

from hostprep.deviceplugin import v1beta1_pb2 as api
from hostprep.deviceplugin.devices import Device
from hostprep.paths import PoolPaths
from testbed.processes import wait_for
from tests.support.kubelet_devices import KubeletDevices
from tests.unit.deviceplugin.offering import FREE, RESOURCE, Offering

pytestmark = pytest.mark.unit


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
        # Said when kubelet has answered, which may be after it began to list.
        _wait_until_said(offering, restarts + 1)


def _wait_until_said(offering: Offering, times: int) -> None:
    wait_for(lambda: offering.said == ["registered kv"] * times)


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
    monkeypatch.setattr("hostprep.deviceplugin.manager._DROPPED_AFTER_S", 0.1)
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
    monkeypatch.setattr("hostprep.deviceplugin.manager._DROPPED_AFTER_S", 0.5)
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
