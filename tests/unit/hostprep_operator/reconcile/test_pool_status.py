"""What a pool says of its nodes, and how many of them may change at once."""

from __future__ import annotations

from typing import Any

import pytest

from tests.unit.hostprep_operator.reconcile.cluster_model import Cluster
from tests.unit.hostprep_operator.reconcile.write_checks import check_write

pytestmark = pytest.mark.unit


def cluster_of(count: int, **spec: Any) -> Cluster:
    cluster = Cluster(check=check_write)
    cluster.add_pool("kv", **spec)
    for number in range(count):
        name = f"n{number}"
        cluster.add_node(name)
        cluster.add_agent(name)
        cluster.reconcile(name)
        cluster.agent_reports(name)
    cluster.settle()
    return cluster


def status(cluster: Cluster) -> dict[str, Any]:
    document: dict[str, Any] = cluster.pools["kv"]["status"]
    return document


def said(cluster: Cluster) -> dict[str, tuple[str, str]]:
    return {c["type"]: (c["status"], c["reason"]) for c in status(cluster)["conditions"]}


def test_a_pool_that_is_ready_everywhere_says_so_and_is_quiet() -> None:
    cluster = cluster_of(3)
    assert said(cluster) == {
        "Ready": ("True", "AllReady"),
        "Progressing": ("False", "Settled"),
        "Degraded": ("False", "Sound"),
        "Conflicted": ("False", "NoConflict"),
    }
    assert status(cluster)["readySize"] == "24Gi"
    assert status(cluster)["observedGeneration"] == 1
    cluster.now_s += 1000
    assert cluster.reconcile_pool("kv").status_patch is None


def test_counts_tell_where_each_node_stands() -> None:
    cluster = cluster_of(6)
    for number, phase in enumerate(["Preparing", "Degraded", "Failed", "Resizing"]):
        cluster.agent_reports(f"n{number}", {"kv": phase})
    cluster.nodes["n4"]["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    counts = cluster.reconcile_pool("kv").counts
    assert counts == {
        "selected": 5,
        "ready": 1,
        "updated": 5,
        "preparing": 2,
        "blocked": 0,
        "degraded": 1,
        "failed": 1,
        "leaving": 0,
        "releasing": 0,
        "unavailable": 4,
        "leased": 0,
    }
    assert said(cluster)["Ready"] == ("False", "SomeFailed")
    assert said(cluster)["Degraded"] == ("True", "SomeFailed")


def test_nodes_that_give_memory_back_are_counted() -> None:
    cluster = cluster_of(2)
    cluster.change_pool("kv", nodeSelector={"for": "memory"})
    cluster.nodes["n0"]["metadata"]["labels"]["for"] = "memory"
    cluster.touch(cluster.nodes["n0"])
    cluster.reconcile("n1")
    counts = cluster.reconcile_pool("kv").counts
    assert (counts["selected"], counts["leaving"], counts["releasing"]) == (1, 1, 0)
    cluster.now_s += 600
    cluster.reconcile_pool("kv")
    cluster.reconcile("n1")
    counts = cluster.reconcile_pool("kv").counts
    assert (counts["selected"], counts["leaving"], counts["releasing"]) == (1, 0, 1)


def test_a_node_whose_agent_is_away_is_unavailable() -> None:
    cluster = cluster_of(2)
    del cluster.pods["n0"]
    cluster.now_s += 61
    cluster.reconcile("n0")
    counts = cluster.reconcile_pool("kv").counts
    assert (counts["ready"], counts["unavailable"], counts["preparing"]) == (1, 1, 0)


def test_a_pool_that_was_changed_is_not_ready_before_its_nodes_know() -> None:
    cluster = cluster_of(2)
    assert said(cluster)["Ready"] == ("True", "AllReady")
    cluster.change_pool("kv", size="2Gi")
    cluster.reconcile_pool("kv")
    assert said(cluster)["Ready"] == ("False", "RollingOut")


def test_a_selector_that_matches_nothing_is_said_once() -> None:
    cluster = Cluster()
    cluster.add_pool("kv", nodeSelector={"no": "such"})
    assert [event.reason for event in cluster.reconcile_pool("kv").events] == ["NothingSelected"]
    assert said(cluster)["Ready"] == ("False", "NothingSelected")
    assert cluster.reconcile_pool("kv").events == ()


def test_failures_are_told_once_and_together() -> None:
    cluster = cluster_of(3)
    for name in ("n0", "n1"):
        cluster.agent_reports(name, {"kv": "Failed"}, reason="TooLarge")
    events = cluster.reconcile_pool("kv").events
    assert [(event.type, event.reason) for event in events] == [("Warning", "NodeFailed")]
    assert "TooLarge (2 nodes)" in events[0].message
    assert cluster.reconcile_pool("kv").events == ()


@pytest.mark.parametrize(
    ("limit", "at_once"), [(1, 1), (3, 3), ("30%", 3), ("31%", 4), ("1%", 1), ("100%", 10)]
)
def test_as_many_nodes_change_at_once_as_max_unavailable_says(
    limit: int | str, at_once: int
) -> None:
    cluster = cluster_of(10, rollout={"maxUnavailable": limit})
    cluster.change_pool("kv", size="9Gi")
    rounds = 0
    while rounds < 20:
        granted = cluster.reconcile_pool("kv").grants.nodes
        assert len(granted) <= at_once
        if not granted:
            break
        for name in cluster.nodes:
            cluster.reconcile(name)
        closed = [n for n in cluster.nodes if (cluster.condition(n) or {})["status"] != "True"]
        assert set(closed) == granted
        for name in closed:
            cluster.agent_reports(name)
            cluster.reconcile(name)
        rounds += 1
    assert rounds == -(-10 // at_once)
    assert status(cluster)["updated"] == 10


def test_a_rollout_says_when_it_starts_and_ends() -> None:
    cluster = cluster_of(1)
    cluster.change_pool("kv", size="9Gi")
    assert [event.reason for event in cluster.reconcile_pool("kv").events] == ["RolloutStarted"]
    cluster.reconcile("n0")
    assert cluster.reconcile_pool("kv").events == ()
    cluster.agent_reports("n0")
    assert [event.reason for event in cluster.reconcile_pool("kv").events] == ["RolloutFinished"]


def test_a_pool_that_another_one_overrules_says_so() -> None:
    cluster = cluster_of(2)
    cluster.add_pool("tier", priority=1, readiness={"profile": "None"})
    cluster.reconcile_pool("kv")
    assert said(cluster)["Conflicted"] == ("True", "OtherPoolRules")
    assert cluster.reconcile_pool("tier").status_patch is not None
    conditions = {c["type"]: c["status"] for c in cluster.pools["tier"]["status"]["conditions"]}
    assert conditions["Conflicted"] == "False"


@pytest.mark.parametrize(
    "other",
    [
        {"priority": 1},
        {"priority": 1, "readiness": {"required": False, "profile": "None"}},
        {"priority": -1, "readiness": {"profile": "None"}},
        {"priority": 1, "readiness": {"profile": "None"}, "nodeSelector": {"no": "such"}},
        {"priority": 1, "readiness": {"profile": "Karpenter", "deadlineSeconds": 600}},
    ],
)
def test_pools_that_agree_or_never_meet_are_in_no_conflict(other: dict[str, Any]) -> None:
    cluster = cluster_of(1)
    cluster.add_pool("tier", **other)
    cluster.reconcile_pool("kv")
    expected = "Karpenter" in str(other)
    assert (said(cluster)["Conflicted"][0] == "True") == expected
