"""A pool that kubelet hands out opens its node once kubelet has all of its regions to give."""

from __future__ import annotations

from typing import Any

import pytest

from hostprep_operator.marks import Marks
from hostprep_operator.records import NodeRecord
from tests.unit.hostprep_operator.reconcile.cluster_model import TAINT, Cluster
from tests.unit.hostprep_operator.reconcile.write_checks import LABEL, check_write, labels

pytestmark = pytest.mark.unit

DEVICES = {"attach": {"mode": "devicePlugin"}}
REGIONS = [{"name": f"node{node}-0", "state": "Free"} for node in (0, 1)]


def prepared(*, regions: list[dict[str, Any]] | None = None, **spec: Any) -> Cluster:
    """A tainted node whose memory is ready, and of which kubelet has said nothing yet."""
    cluster = Cluster(check=check_write)
    cluster.add_pool("kv", **{**DEVICES, **spec})
    cluster.now_s += 10
    cluster.add_node("n1", tainted=True)
    cluster.add_agent("n1")
    cluster.reconcile("n1")
    cluster.now_s += 20
    cluster.agent_reports("n1", regions=REGIONS if regions is None else regions)
    cluster.reconcile("n1")
    return cluster


def advertise(cluster: Cluster, count: object, pool: str = "kv") -> None:
    cluster.nodes["n1"]["status"]["allocatable"][f"hostprep.dev/{pool}"] = str(count)
    cluster.touch(cluster.nodes["n1"])
    cluster.reconcile("n1")


def said(cluster: Cluster) -> tuple[str, str]:
    condition = cluster.condition("n1")
    assert condition is not None
    return condition["status"], condition["reason"]


def is_tainted(cluster: Cluster) -> bool:
    return any(taint["key"] == TAINT for taint in cluster.nodes["n1"]["spec"]["taints"])


def test_the_node_stays_closed_until_kubelet_has_every_region() -> None:
    cluster = prepared()
    assert said(cluster) == ("False", "DevicesNotAdvertised")
    assert is_tainted(cluster)
    assert labels(cluster) == set()

    advertise(cluster, 1)
    assert said(cluster) == ("False", "DevicesNotAdvertised")

    advertise(cluster, 2)
    assert said(cluster) == ("True", "Ready")
    assert not is_tainted(cluster)
    assert labels(cluster) == {LABEL}


def test_the_message_says_what_is_missing_and_where_to_look() -> None:
    condition = prepared().condition("n1")
    assert condition is not None
    assert "0 of its 2 regions as hostprep.dev/kv" in condition["message"]
    assert "agent.kubeletDir" in condition["message"]


@pytest.mark.parametrize("count", [0, 1])
def test_an_open_node_stays_open_while_regions_change_hands(count: int) -> None:
    """And while the agent is upgraded or kubelet restarts: then none is allocatable."""
    cluster = prepared()
    advertise(cluster, 2)
    writes = len(cluster.writes)
    advertise(cluster, count)
    assert said(cluster) == ("True", "Ready")
    assert len(cluster.writes) == writes


def test_after_a_reboot_the_devices_count_again() -> None:
    cluster = prepared()
    advertise(cluster, 2)
    cluster.now_s += 100
    cluster.reboot("n1")
    cluster.nodes["n1"]["status"]["allocatable"]["hostprep.dev/kv"] = "0"
    cluster.kubelet("n1")
    cluster.reconcile("n1")
    assert said(cluster) == ("False", "Rebooted")

    cluster.agent_reports("n1", regions=REGIONS)
    cluster.reconcile("n1")
    assert said(cluster) == ("False", "DevicesNotAdvertised")
    advertise(cluster, 2)
    assert said(cluster) == ("True", "Ready")


@pytest.mark.parametrize("spec", [{"attach": {"mode": "hostPath"}}, {"attach": None}])
def test_other_pools_need_no_device(spec: dict[str, Any]) -> None:
    assert said(prepared(**spec)) == ("True", "Ready")


def test_devices_of_another_pool_do_not_count() -> None:
    cluster = prepared()
    advertise(cluster, 2, pool="kv2")
    assert said(cluster) == ("False", "DevicesNotAdvertised")


def test_a_pool_that_names_no_regions_needs_one_device() -> None:
    cluster = prepared(regions=[])
    assert said(cluster) == ("False", "DevicesNotAdvertised")
    advertise(cluster, 1)
    assert said(cluster) == ("True", "Ready")


def test_memory_that_is_not_ready_is_said_first() -> None:
    cluster = prepared()
    cluster.agent_reports("n1", {"kv": "Failed"}, regions=REGIONS)
    cluster.reconcile("n1")
    assert said(cluster) == ("False", "Failed")


def test_a_pool_that_is_not_required_closes_nothing() -> None:
    cluster = prepared(readiness={"required": False})
    assert cluster.condition("n1") is None
    assert labels(cluster) == {LABEL}


def test_the_opening_rests_on_the_boot_that_advertised() -> None:
    cluster = prepared()
    advertise(cluster, 2)
    marks = Marks.parse(NodeRecord.from_json(cluster.nodes["n1"]).marks)
    assert marks.opened_boot == cluster.machine_boots["n1"]


@pytest.mark.parametrize(("text", "devices"), [("2", 2), ("0", 0), ("x", 0), ("-1", 0)])
def test_quantities_are_read_with_distrust(text: str, devices: int) -> None:
    cluster = prepared()
    cluster.nodes["n1"]["status"]["allocatable"]["hostprep.dev/kv"] = text
    assert NodeRecord.from_json(cluster.nodes["n1"]).allocatable["hostprep.dev/kv"] == devices
