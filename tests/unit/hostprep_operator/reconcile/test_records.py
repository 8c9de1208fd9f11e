"""What is kept of each object, and what makes two of them differ."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hostprep.units import parse_capacity
from hostprep_operator.marks import Marks
from hostprep_operator.records import AgentRecord, HostMemoryNodeRecord, NodeRecord, PoolRecord
from tests.unit.hostprep_operator.reconcile.cluster_model import Cluster, Document

pytestmark = pytest.mark.unit


def documents() -> Cluster:
    cluster = Cluster()
    cluster.add_pool("kv")
    cluster.add_node("n1", tainted=True)
    cluster.add_agent("n1")
    cluster.reconcile("n1")
    cluster.agent_reports("n1", {"kv": "Preparing"})
    return cluster


def test_a_heartbeat_is_no_change_of_a_node() -> None:
    cluster = documents()
    before = NodeRecord.from_json(cluster.nodes["n1"])
    later: Document = copy.deepcopy(cluster.nodes["n1"])
    later["metadata"]["resourceVersion"] = "999"
    later["metadata"]["managedFields"] = [{"manager": "kubelet"}]
    later["metadata"]["annotations"] = {"volumes": "x"}
    later["status"]["images"] = [{"names": ["x"]}]
    for condition in later["status"]["conditions"]:
        condition["lastHeartbeatTime"] = "2030-01-01T00:00:00Z"
    after = NodeRecord.from_json(later)
    assert after == before
    assert after.resource_version == "999"


def test_progress_is_no_change_of_a_host_memory_node() -> None:
    cluster = documents()
    before = HostMemoryNodeRecord.from_json(cluster.hmns["n1"])
    progress = {"progressPercent": 40, "message": "40 % populated", "steps": [{"name": "populate"}]}
    cluster.agent_reports("n1", {"kv": "Preparing"}, **progress)
    assert HostMemoryNodeRecord.from_json(cluster.hmns["n1"]) == before
    cluster.agent_reports("n1")
    assert HostMemoryNodeRecord.from_json(cluster.hmns["n1"]) != before


@pytest.mark.parametrize(
    ("record", "kind"),
    [(NodeRecord, "nodes"), (PoolRecord, "pools"), (HostMemoryNodeRecord, "hmns")],
)
def test_an_object_with_nothing_but_a_name_can_be_read(record: Any, kind: str) -> None:
    assert record.from_json({"metadata": {"name": "n1"}}).name == "n1"


def test_an_agents_pod_tells_node_and_readiness() -> None:
    cluster = documents()
    agent = AgentRecord.from_json(cluster.pods["n1"])
    assert (agent.node_name, agent.ready, agent.ready_since_s) == ("n1", True, cluster.now_s)
    bare = AgentRecord.from_json({"metadata": {"name": "agent"}, "spec": {}})
    assert (bare.node_name, bare.ready) == ("", False)


def test_equal_policies_are_one_object() -> None:
    cluster = documents()
    entry = HostMemoryNodeRecord.from_json(copy.deepcopy(cluster.hmns["n1"])).entries[0]
    pool = PoolRecord.from_json(copy.deepcopy(cluster.pools["kv"]))
    assert entry.policy is pool.policy


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("0", 0),
        ("8Gi", 8 << 30),
        ("65786596Ki", 65786596 << 10),
        ("1k", 1000),
        ("1M", 10**6),
        ("1500m", 1),
        ("1e3", 1000),
        ("1E", 10**18),
        ("1.5Gi", 1536 << 20),
        (12, 12),
        (None, 0),
        ("", 0),
        ("Gi", 0),
        ("-1Gi", 0),
        ("NaN", 0),
        ("1e999999999", 0),
        ("1e99999999999999999999", 0),
    ],
)
def test_quantities_of_nodes_are_read_tolerantly(text: object, size: int) -> None:
    assert parse_capacity(text) == size


@given(st.text())
def test_no_quantity_is_too_odd_to_read(text: str) -> None:
    assert parse_capacity(text) >= 0


TIMES = st.none() | st.integers(0, 4_000_000_000).map(float)


@given(
    st.builds(
        Marks,
        labels=st.sets(st.from_regex(r"[a-z0-9-]{1,63}", fullmatch=True)).map(
            lambda names: tuple(sorted(f"ready.hostprep.dev/{name}" for name in names))
        ),
        taint=st.text(),
        closed_s=TIMES,
        closed_boot=st.text(),
        opened_s=TIMES,
        opened_boot=st.text(),
        hmn=st.text(),
        deadline=st.booleans(),
    )
)
def test_marks_come_back_as_they_were_written(marks: Marks) -> None:
    assert Marks.parse(marks.to_text()) == marks


@given(st.text() | st.sampled_from(["[]", "{}", '{"v":1,"labels":{}}', '{"closedAt":5}', "1e999"]))
def test_spoilt_marks_count_as_none(text: str) -> None:
    Marks.parse(text)
