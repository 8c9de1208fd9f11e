"""Opening, closing, deadlines, profiles and removal, as people and autoscalers see them."""

from __future__ import annotations

from typing import Any

import pytest

from hostprep_operator.reconcile.changes import (
    CreateHostMemoryNode,
    PatchNode,
    PatchNodeStatus,
)
from tests.unit.hostprep_operator.reconcile.cluster_model import TAINT, Cluster
from tests.unit.hostprep_operator.reconcile.write_checks import (
    LABEL,
    check_write,
    joining,
    labels,
    opened,
)

pytestmark = pytest.mark.unit


def test_a_node_that_joins_with_the_taint_takes_four_writes_to_open() -> None:
    cluster = joining()
    cluster.reconcile("n1")
    for phases in ("Pending", "Preparing", "Preparing", "Ready"):
        cluster.now_s += 5
        cluster.agent_reports("n1", {"kv": phases})
        cluster.reconcile("n1")
    kinds = [type(write) for _, write in cluster.writes]
    assert kinds == [PatchNodeStatus, CreateHostMemoryNode, PatchNodeStatus, PatchNode]
    assert not cluster.has_taint("n1")
    assert labels(cluster) == {LABEL}
    assert cluster.reconcile("n1").writes == ()


@pytest.mark.parametrize(
    ("spec", "tainted"),
    [({"readiness": {"taintKey": "example.com/host-memory"}}, True), ({}, False)],
)
def test_a_node_whose_closing_must_be_recorded_takes_five(spec: Any, tainted: bool) -> None:
    cluster = opened(tainted=tainted, **spec)
    assert len(cluster.writes) == 5
    assert labels(cluster) == {LABEL}


def test_several_pools_that_become_ready_one_by_one_cost_no_write_more() -> None:
    cluster = joining()
    cluster.add_pool("tier")
    cluster.add_pool("x", readiness={"required": False})
    cluster.reconcile("n1")
    for ready in (["kv"], ["kv", "tier"], ["kv", "tier", "x"]):
        phases = {pool: "Preparing" for pool in cluster.pools if pool not in ready}
        cluster.agent_reports("n1", phases)
        cluster.reconcile("n1")
    assert len(cluster.writes) <= 6


def test_the_first_closing_taints_a_node_that_joined_after_the_pool() -> None:
    cluster = joining(tainted=False)
    cluster.reconcile("n1")
    assert cluster.has_taint("n1")


def test_the_first_closing_does_not_taint_a_node_that_serves_already() -> None:
    cluster = Cluster(check=check_write)
    cluster.add_node("n1")
    cluster.add_agent("n1")
    cluster.now_s += 10
    cluster.add_pool("kv")
    cluster.reconcile("n1")
    assert not cluster.has_taint("n1")
    assert (cluster.condition("n1") or {})["status"] == "False"


def test_the_first_closing_does_not_taint_a_node_of_karpenters() -> None:
    cluster = joining(tainted=False)
    cluster.nodes["n1"]["metadata"]["labels"]["karpenter.sh/nodepool"] = "default"
    cluster.touch(cluster.nodes["n1"])
    cluster.reconcile("n1")
    assert not cluster.has_taint("n1")
    assert (cluster.condition("n1") or {})["status"] == "False"


@pytest.mark.parametrize(("tainted", "reason"), [(True, "MemoryClosed"), (False, "MemoryNotReady")])
def test_only_a_node_with_the_taint_is_called_closed(tainted: bool, reason: str) -> None:
    readiness = {} if tainted else {"profile": "None"}
    cluster = joining(tainted=tainted, readiness=readiness)
    assert [event.reason for event in cluster.reconcile("n1").events] == [reason]


@pytest.mark.parametrize(
    ("profile", "words"),
    [
        ("None", "Not closed to pods, but without its host memory"),
        ("NodeReadinessController", "closed to pods where a NodeReadinessRule asks for it"),
    ],
)
def test_an_event_says_of_pods_no_more_than_the_profile_lets_it_know(
    profile: str, words: str
) -> None:
    cluster = joining(tainted=False, readiness={"profile": profile})
    (join,) = cluster.reconcile("n1").events
    cluster.agent_reports("n1")
    cluster.reconcile("n1")
    cluster.reboot("n1")
    cluster.kubelet("n1")
    (reboot,) = cluster.reconcile("n1").events
    assert {join.reason, reboot.reason} == {"MemoryNotReady"}
    for message in (join.message, reboot.message):
        assert words in message
        assert ("Not closed" in message) == (profile == "None")


@pytest.mark.parametrize("profile", ["None", "NodeReadinessController"])
def test_profiles_without_a_taint_touch_none(profile: str) -> None:
    cluster = joining(tainted=False, readiness={"profile": profile})
    cluster.reconcile("n1")
    taints = cluster.nodes["n1"]["spec"]["taints"]
    cluster.agent_reports("n1")
    cluster.reconcile("n1")
    cluster.reboot("n1")
    cluster.kubelet("n1")
    cluster.reconcile("n1")
    assert cluster.nodes["n1"]["spec"]["taints"] == taints


def test_a_taint_that_comes_back_on_an_open_node_goes_again() -> None:
    cluster = opened()
    cluster.nodes["n1"]["spec"]["taints"].append({"key": TAINT, "effect": "NoExecute"})
    cluster.touch(cluster.nodes["n1"])
    assert len(cluster.reconcile("n1").writes) == 1
    assert not cluster.has_taint("n1")


@pytest.mark.parametrize(
    ("cause", "wish"),
    [(cause, wish) for cause in ("reboot", "repair", "resize") for wish in ("Taint", "LabelOnly")],
)
def test_a_closing_taints_by_its_cause(cause: str, wish: str) -> None:
    cluster = opened(readiness={"reclose": {cause: wish}})
    if cause == "reboot":
        cluster.reboot("n1")
        cluster.kubelet("n1")
    else:
        cluster.agent_reports("n1", {"kv": {"repair": "Degraded", "resize": "Resizing"}[cause]})
    changes = cluster.reconcile("n1")
    assert changes.facts.closed_cause == cause
    assert cluster.has_taint("n1") == (wish == "Taint")
    assert labels(cluster) == set()
    assert [type(write) for write in changes.writes] == [PatchNode, PatchNodeStatus]


def test_a_reboot_that_kubelet_and_agent_tell_one_after_the_other_closes_once() -> None:
    cluster = opened()
    cluster.reboot("n1")
    cluster.agent_reports("n1", {"kv": "Preparing"})
    first = cluster.reconcile("n1")
    cluster.kubelet("n1")
    second = cluster.reconcile("n1")
    assert (first.facts.closed_cause, second.facts.closed_cause) == ("reboot", None)
    cluster.agent_reports("n1")
    assert cluster.reconcile("n1").facts.opened
    assert not cluster.has_taint("n1")


def test_a_reboot_of_a_node_that_is_closed_by_label_only_brings_the_taint() -> None:
    cluster = opened()
    cluster.agent_reports("n1", {"kv": "Degraded"})
    cluster.reconcile("n1")
    assert not cluster.has_taint("n1")
    cluster.reboot("n1")
    cluster.kubelet("n1")
    assert cluster.reconcile("n1").facts.closed_cause == "reboot"
    assert cluster.has_taint("n1")


def test_a_reboot_between_two_looks_is_an_opening_of_its_own() -> None:
    cluster = opened()
    before = cluster.marks("n1")
    cluster.reboot("n1")
    cluster.kubelet("n1")
    cluster.agent_reports("n1")
    changes = cluster.reconcile("n1")
    assert changes.facts.opened
    assert changes.facts.reboot_detected
    assert cluster.marks("n1")["openedBoot"] != before["openedBoot"]


def test_while_nobody_speaks_taint_and_labels_stay() -> None:
    cluster = opened()
    del cluster.pods["n1"]
    cluster.agent_reports("n1", {"kv": "Failed"})
    cluster.now_s += 61
    changes = cluster.reconcile("n1")
    assert [type(write) for write in changes.writes] == [PatchNodeStatus]
    assert labels(cluster) == {LABEL}


@pytest.mark.parametrize("wish", ["StayClosed", "OpenWithout"])
def test_the_deadline_is_said_once_and_does_what_was_asked_for(wish: str) -> None:
    cluster = joining(readiness={"onDeadline": wish, "deadlineSeconds": 100})
    changes = cluster.reconcile("n1")
    assert changes.recheck_at_s == cluster.now_s + 100
    cluster.now_s += 99
    assert cluster.reconcile("n1").writes == ()
    cluster.now_s += 1
    said = cluster.reconcile("n1")
    assert [event.reason for event in said.events] == ["DeadlineExceeded"]
    assert said.facts.deadline_exceeded
    assert cluster.has_taint("n1") == (wish == "StayClosed")
    condition = cluster.condition("n1") or {}
    assert condition["status"] == "False"
    assert (condition["reason"] == "DeadlineExceeded") == (wish == "OpenWithout")
    assert labels(cluster) == set()
    cluster.now_s += 1000
    assert cluster.reconcile("n1").events == ()
    assert cluster.reconcile("n1").writes == ()
    cluster.agent_reports("n1")
    assert cluster.reconcile("n1").facts.opened
    assert "deadline" not in cluster.marks("n1")


def test_a_pool_of_higher_rank_rules_and_its_taint_takes_the_others_place() -> None:
    cluster = joining()
    cluster.reconcile("n1")
    cluster.add_pool("tier", priority=5, readiness={"taintKey": "example.com/host-memory"})
    cluster.reconcile("n1")
    assert not cluster.has_taint("n1")
    assert cluster.has_taint("n1", "example.com/host-memory")
    cluster.agent_reports("n1")
    cluster.reconcile("n1")
    assert not cluster.has_taint("n1", "example.com/host-memory")
    assert cluster.settle() == 0


def test_a_node_without_required_pools_gets_labels_and_nothing_else() -> None:
    cluster = opened(tainted=False, readiness={"required": False})
    assert labels(cluster) == {LABEL}
    assert cluster.condition("n1") is None
    assert [type(write) for _, write in cluster.writes] == [CreateHostMemoryNode, PatchNode]


def test_marks_that_somebody_spoilt_are_made_anew() -> None:
    cluster = opened()
    cluster.nodes["n1"]["metadata"]["annotations"]["hostprep.dev/marks"] = "{spoilt"
    cluster.touch(cluster.nodes["n1"])
    cluster.settle()
    assert cluster.marks("n1")["openedAt"]
    assert labels(cluster) == {LABEL}


def test_a_node_that_goes_or_is_gone_is_left_alone() -> None:
    cluster = opened()
    cluster.nodes["n1"]["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    del cluster.pools["kv"]
    assert cluster.reconcile("n1").writes == ()
    del cluster.nodes["n1"]
    assert cluster.reconcile("n1").writes == ()


def test_seconds_to_ready_count_from_the_closing() -> None:
    cluster = joining()
    cluster.reconcile("n1")
    cluster.now_s += 33
    cluster.agent_reports("n1")
    assert cluster.reconcile("n1").facts.seconds_to_ready == 33
    cluster.now_s += 100
    cluster.reboot("n1")
    cluster.kubelet("n1")
    cluster.reconcile("n1")
    cluster.now_s += 7
    cluster.agent_reports("n1")
    assert cluster.reconcile("n1").facts.seconds_to_ready == 7
