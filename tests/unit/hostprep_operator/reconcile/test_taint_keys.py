"""Keys of taints that the operator may not write: it says so, and leaves nodes' taints alone."""

from __future__ import annotations

from typing import Any

import pytest

from hostprep.api.names import CLUSTER_AUTOSCALER_TAINT
from hostprep_operator.reconcile.changes import PatchNode, Settings
from tests.unit.hostprep_operator.reconcile.cluster_model import Cluster
from tests.unit.hostprep_operator.reconcile.write_checks import check_write

pytestmark = pytest.mark.unit

_USUAL_ONLY = Settings(taint_keys=frozenset({CLUSTER_AUTOSCALER_TAINT}))
_OWN = {"taintKey": "example.com/host-memory"}


def _cluster(**readiness: Any) -> Cluster:
    """A pool, and a node that joins after it."""
    cluster = Cluster(check=check_write, settings=_USUAL_ONLY)
    cluster.add_pool("kv", readiness=readiness)
    cluster.now_s += 10
    cluster.add_node("n1")
    cluster.add_agent("n1")
    return cluster


def _taint_keys(cluster: Cluster) -> list[str]:
    return [taint["key"] for taint in cluster.nodes["n1"]["spec"].get("taints") or ()]


def _conflicted(cluster: Cluster) -> dict[str, str]:
    conditions = cluster.pools["kv"]["status"]["conditions"]
    return next(c for c in conditions if c["type"] == "Conflicted")


def test_a_key_that_may_not_be_written_is_reported_once_with_the_remedy() -> None:
    cluster = _cluster(**_OWN)
    cluster.reconcile("n1")
    events = cluster.reconcile_pool("kv").events
    assert ("Warning", "TaintKeyNotAllowed") in [(event.type, event.reason) for event in events]
    condition = _conflicted(cluster)
    assert (condition["status"], condition["reason"]) == ("True", "TaintKeyNotAllowed")
    assert "example.com/host-memory" in condition["message"]
    assert "admissionPolicy.taintKeys" in condition["message"]
    assert CLUSTER_AUTOSCALER_TAINT in condition["message"]
    assert cluster.reconcile_pool("kv").events == ()
    cluster.change_pool("kv", readiness={})
    cluster.reconcile_pool("kv")
    assert _conflicted(cluster)["status"] == "False"


@pytest.mark.parametrize("keys", [None, frozenset({"nvidia.com/gpu"})])
def test_another_programs_taint_that_an_old_pool_names_stays(keys: frozenset[str] | None) -> None:
    """Stored before keys had to have one of our words in them."""
    cluster = _cluster(taintKey="nvidia.com/gpu")
    cluster.settings = Settings(taint_keys=keys)
    taints = cluster.nodes["n1"]["spec"]["taints"]
    taints.append({"key": "nvidia.com/gpu", "effect": "NoSchedule"})
    cluster.reconcile("n1")
    cluster.agent_reports("n1")
    cluster.settle()
    assert (cluster.condition("n1") or {})["status"] == "True"
    assert "nvidia.com/gpu" in _taint_keys(cluster)
    cluster.reconcile_pool("kv")
    assert _conflicted(cluster)["reason"] == "TaintKeyNotAllowed"
    del cluster.pools["kv"]
    cluster.settle()
    assert "nvidia.com/gpu" in _taint_keys(cluster)


def test_a_pool_that_marks_no_nodes_may_name_any_key() -> None:
    cluster = _cluster(required=False, **_OWN)
    cluster.reconcile_pool("kv")
    assert _conflicted(cluster)["status"] == "False"


def test_taints_stay_and_everything_else_is_written() -> None:
    cluster = _cluster(**_OWN)
    taints = cluster.nodes["n1"]["spec"]["taints"]
    taints.append({"key": "example.com/host-memory", "effect": "NoSchedule"})
    cluster.reconcile("n1")
    assert (cluster.condition("n1") or {})["status"] == "False"
    cluster.agent_reports("n1")
    cluster.settle()
    assert (cluster.condition("n1") or {})["status"] == "True"
    assert cluster.nodes["n1"]["metadata"]["labels"]["ready.hostprep.dev/kv"] == "true"
    cluster.reboot("n1")
    cluster.kubelet("n1")
    cluster.settle()
    assert (cluster.condition("n1") or {})["reason"] == "Rebooted"
    assert _taint_keys(cluster) == ["other.example/taint", "example.com/host-memory"]
    patches = [write.patch for _, write in cluster.writes if isinstance(write, PatchNode)]
    assert not [patch for patch in patches if "taints" in patch.get("spec", {})]


def test_a_closed_node_stays_closed_when_its_pool_names_a_key_that_may_not_be_written() -> None:
    cluster = _cluster()
    cluster.reconcile("n1")
    assert CLUSTER_AUTOSCALER_TAINT in _taint_keys(cluster)
    cluster.change_pool("kv", readiness=_OWN)
    cluster.settle()
    assert CLUSTER_AUTOSCALER_TAINT in _taint_keys(cluster)
    cluster.settings = Settings()  # the key is allowed now
    cluster.settle()
    assert _taint_keys(cluster) == ["other.example/taint", "example.com/host-memory"]


def test_a_closing_without_a_taint_does_not_say_that_the_node_is_closed() -> None:
    cluster = _cluster(**_OWN)
    (event,) = cluster.reconcile("n1").events
    assert event.reason == "MemoryNotReady"


def test_removal_leaves_a_taint_that_may_no_longer_be_written() -> None:
    cluster = _cluster(**_OWN)
    cluster.settings = Settings()
    cluster.reconcile("n1")
    assert "example.com/host-memory" in _taint_keys(cluster)
    cluster.settings = _USUAL_ONLY
    del cluster.pools["kv"]
    cluster.settle()
    assert _taint_keys(cluster) == ["other.example/taint", "example.com/host-memory"]
    assert (
        "annotations" not in cluster.nodes["n1"]["metadata"]
        or not cluster.nodes["n1"]["metadata"]["annotations"]
    )
