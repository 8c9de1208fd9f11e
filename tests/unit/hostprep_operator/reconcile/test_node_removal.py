"""What goes when a pool goes: everything of ours, and nothing else."""

from __future__ import annotations

import json

import pytest

from hostprep.api.names import MARKS_ANNOTATION
from hostprep_operator.reconcile.changes import (
    DeleteHostMemoryNode,
    PatchHostMemoryNodeSpec,
    PatchNode,
    PatchNodeStatus,
    Settings,
)
from hostprep_operator.reconcile.taint_and_labels import strip_node
from tests.unit.hostprep_operator.reconcile.cluster_model import Cluster
from tests.unit.hostprep_operator.reconcile.write_checks import joining, labels, opened

pytestmark = pytest.mark.unit


def releasing(cluster: Cluster) -> str:
    condition = cluster.condition("n1", "hostprep.dev/HostMemoryReleasing")
    return condition["reason"] if condition else ""


def test_deleting_the_pool_releases_the_memory_and_leaves_no_trace() -> None:
    cluster = joining()
    before = cluster.nodes["n1"]["metadata"]["labels"], cluster.nodes["n1"]["status"]["conditions"]
    cluster.reconcile("n1")
    cluster.agent_reports("n1")
    cluster.reconcile("n1")
    del cluster.pools["kv"]
    writes = cluster.reconcile("n1").writes
    assert [type(w) for w in writes] == [PatchNode, PatchNodeStatus, PatchHostMemoryNodeSpec]
    assert releasing(cluster) == "GracePeriod"
    cluster.now_s += 600
    cluster.reconcile_pool("kv")
    assert cluster.reconcile("n1").events[0].reason == "ReleaseStarted"
    assert releasing(cluster) == "Releasing"
    assert cluster.nodes["n1"]["metadata"].get("annotations", {}) == {}
    assert cluster.reconcile("n1").writes == ()  # the agent is away, or still at it
    cluster.agent_reports("n1", {"kv": "Releasing"})
    assert cluster.reconcile("n1").writes == ()
    cluster.agent_reports("n1")
    changes = cluster.reconcile("n1")
    assert isinstance(changes.writes[-1], DeleteHostMemoryNode)
    metadata, status = cluster.nodes["n1"]["metadata"], cluster.nodes["n1"]["status"]
    assert (metadata["labels"], status["conditions"]) == before
    assert [event.reason for event in changes.events] == ["MemoryReleased"]
    assert cluster.reconcile("n1").writes == ()


def test_a_pool_deleted_before_it_was_prepared_takes_its_taint_along() -> None:
    cluster = joining()
    cluster.reconcile("n1")
    del cluster.pools["kv"]
    cluster.reconcile("n1")
    assert not cluster.has_taint("n1")
    assert cluster.condition("n1") is None


def test_clean_up_takes_what_marks_name_and_nothing_else() -> None:
    cluster = opened()
    metadata = cluster.nodes["n1"]["metadata"]
    metadata["labels"]["ready.hostprep.dev/by-hand"] = "true"
    writes = strip_node(cluster.view("n1").node, Settings())  # type: ignore[arg-type]
    cluster.carry_out("n1", writes[0])
    assert labels(cluster) == {"ready.hostprep.dev/by-hand"}
    again = strip_node(cluster.view("n1").node, Settings())  # type: ignore[arg-type]
    assert [type(write) for write in again] == [PatchNodeStatus]


@pytest.mark.parametrize("key", ["kubernetes.io/hostname", "ready.hostprep.dev/", "x"])
def test_marks_that_somebody_edited_take_no_label_away_that_is_not_ours(key: str) -> None:
    cluster = opened()
    metadata = cluster.nodes["n1"]["metadata"]
    metadata["labels"][key] = "kept"
    marks = json.loads(metadata["annotations"][MARKS_ANNOTATION])
    marks["labels"].append(key)
    metadata["annotations"][MARKS_ANNOTATION] = json.dumps(marks)
    writes = strip_node(cluster.view("n1").node, Settings())  # type: ignore[arg-type]
    cluster.carry_out("n1", writes[0])
    assert cluster.nodes["n1"]["metadata"]["labels"][key] == "kept"


def test_clean_up_leaves_a_node_alone_that_was_never_managed() -> None:
    cluster = Cluster()
    cluster.add_node("n1", tainted=True)
    assert strip_node(cluster.view("n1").node, Settings()) == ()  # type: ignore[arg-type]
