"""Nothing is lost by a slip: what nothing asks for is kept for a while, and then goes in turns."""

from __future__ import annotations

from typing import Any

import pytest

from hostprep.api.conditions import format_time
from hostprep_operator.reconcile.assign import JOINING_S
from tests.unit.hostprep_operator.reconcile.cluster_model import Cluster
from tests.unit.hostprep_operator.reconcile.test_rollout import (
    answer,
    entry,
    progress,
    ready,
    serving_fleet,
    with_size,
)

pytestmark = pytest.mark.unit


def unlabel(cluster: Cluster, *names: str, label: str = "other") -> None:
    for name in names or cluster.nodes:
        cluster.nodes[name]["metadata"]["labels"]["for"] = label
        cluster.touch(cluster.nodes[name])


def absent(cluster: Cluster) -> set[str]:
    return {name for name in cluster.nodes if entry(cluster, name).get("state") == "Absent"}


def releasing(cluster: Cluster, name: str) -> str:
    condition = cluster.condition(name, "hostprep.dev/HostMemoryReleasing")
    return condition["reason"] if condition else ""


def test_a_label_that_flaps_costs_nothing_and_finds_the_node_as_it_was() -> None:
    cluster = serving_fleet(20, nodeSelector={"for": "kv"})
    before = {name: cluster.nodes[name]["metadata"]["labels"].copy() for name in cluster.nodes}
    unlabel(cluster)
    cluster.settle()
    assert ready(cluster) == set(cluster.nodes), "open, and labelled, while memory is kept"
    assert {releasing(cluster, name) for name in cluster.nodes} == {"GracePeriod"}
    cluster.now_s += 599
    unlabel(cluster, label="kv")
    cluster.settle()
    cluster.now_s += 10_000
    cluster.settle()
    assert absent(cluster) == set()
    assert {n: cluster.nodes[n]["metadata"]["labels"] for n in cluster.nodes} == before
    assert {releasing(cluster, name) for name in cluster.nodes} == {""}


@pytest.mark.parametrize("slip", ["selector", "labels", "deleted"])
def test_after_the_grace_period_memory_goes_within_the_budget(slip: str) -> None:
    cluster = serving_fleet(20, nodeSelector={"for": "kv"}, rollout={"maxUnavailable": "10%"})
    if slip == "selector":
        cluster.change_pool("kv", nodeSelector={"for": "typo"})
    elif slip == "labels":
        unlabel(cluster)
    else:
        del cluster.pools["kv"]
    cluster.settle()
    cluster.now_s += 599
    cluster.settle()
    assert absent(cluster) == set()
    cluster.now_s += 1
    cluster.settle()
    if slip == "deleted":
        cluster.reconcile_pools()
        cluster.settle()
    most, rounds = 0, 0
    while cluster.hmns and rounds < 60:
        most, rounds = max(most, len(absent(cluster))), rounds + 1
        answer(cluster)
        cluster.reconcile_pools()
    assert most == 2
    assert not cluster.hmns


def test_zero_grace_takes_the_explicit_word() -> None:
    cluster = serving_fleet(1, nodeSelector={"for": "kv"}, release={"when": "Immediately"})
    unlabel(cluster)
    cluster.settle()
    assert absent(cluster) == {"n0"}


def test_a_grace_period_that_is_shortened_holds_for_those_who_are_leaving() -> None:
    cluster = serving_fleet(1, nodeSelector={"for": "kv"})
    unlabel(cluster)
    cluster.settle()
    cluster.change_pool("kv", release={"gracePeriodSeconds": 30})
    cluster.settle()
    cluster.now_s += 31
    cluster.settle()
    assert absent(cluster) == {"n0"}


def test_a_clock_that_jumps_back_for_a_while_brings_no_end_nearer() -> None:
    cluster = serving_fleet(1, nodeSelector={"for": "kv"})
    unlabel(cluster)
    cluster.reconcile("n0")  # kept for 600 s
    cluster.now_s -= 3600
    cluster.settle()
    cluster.now_s += 3600 + 590
    cluster.settle()
    assert absent(cluster) == set()
    cluster.now_s += 20
    cluster.settle()
    assert absent(cluster) == {"n0"}


def test_while_a_turn_is_waited_for_the_pool_is_looked_at_again() -> None:
    cluster = serving_fleet(3, rollout={"maxUnavailable": 1})
    cluster.change_pool("kv", size="9Gi")
    changes = cluster.reconcile_pool("kv")
    assert len(changes.grants.nodes) == 1
    assert changes.recheck_at_s == cluster.now_s + 30


def test_a_restarted_operator_keeps_the_grace_of_a_pool_that_was_deleted() -> None:
    cluster = serving_fleet(3, release={"gracePeriodSeconds": 5000})
    del cluster.pools["kv"]
    cluster.former.clear()
    cluster.grants.clear()
    cluster.settle()
    cluster.now_s += 4000
    cluster.confirmed_gone.clear()
    cluster.settle()
    cluster.reconcile_pools()
    assert absent(cluster) == set()
    cluster.now_s += 1001
    cluster.reconcile_pools()
    cluster.settle()
    assert absent(cluster)


def test_a_paused_pool_releases_nothing_and_a_deleted_one_cannot_be_paused() -> None:
    cluster = serving_fleet(3, nodeSelector={"for": "kv"}, rollout={"paused": False})
    cluster.change_pool("kv", rollout={"paused": True})
    unlabel(cluster)
    cluster.settle()
    cluster.now_s += 10_000
    cluster.settle()
    assert absent(cluster) == set()
    assert progress(cluster) == "Paused"
    del cluster.pools["kv"]
    cluster.settle()
    cluster.reconcile_pools()
    cluster.settle()
    assert absent(cluster)


def test_leases_hold_up_their_own_node_and_no_other() -> None:
    cluster = serving_fleet(6, nodeSelector={"for": "kv"}, rollout={"maxUnavailable": 1})
    answer(cluster, "n0", "n1", regionsLeased=1)
    unlabel(cluster)
    cluster.settle()
    cluster.now_s += 600
    for _ in range(8):
        cluster.settle()
        for name in list(cluster.hmns):
            leased = name in ("n0", "n1")
            cluster.agent_reports(name, {"kv": "Releasing"} if leased else {}, regionsLeased=1)
    cluster.settle()
    assert set(cluster.hmns) == {"n0", "n1"}
    assert releasing(cluster, "n0") == "Leased"


@pytest.mark.parametrize("slip", ["labels", "deleted"])
@pytest.mark.parametrize("dead", ["no agent", "agent not ready", "node not ready"])
def test_dead_nodes_take_no_turn_of_a_release(slip: str, dead: str) -> None:
    cluster = serving_fleet(6, nodeSelector={"for": "kv"}, rollout={"maxUnavailable": 1})
    if slip == "labels":
        unlabel(cluster)
    else:
        del cluster.pools["kv"]
    cluster.settle()
    cluster.now_s += 600
    cluster.reconcile_pools()
    cluster.settle()
    assert absent(cluster) == {"n0"}
    for name in ("n0", "n1", "n2"):  # one that was told to, and two that were not so far
        kill(cluster, name, dead)
    cluster.now_s += 61
    for _ in range(8):
        cluster.reconcile_pools()
        cluster.settle()
        for name in absent(cluster) - {"n0"}:
            cluster.agent_reports(name)
    assert set(cluster.hmns) == {"n0", "n1", "n2"}
    assert absent(cluster) == {"n0"}
    for name in ("n0", "n1", "n2"):
        cluster.add_agent(name)
        say_kubelet_is_ready(cluster, name, "True")
    for _ in range(4):
        cluster.reconcile_pools()
        cluster.settle()
        answer(cluster)
    assert not cluster.hmns, "they release once they live again"


def kill(cluster: Cluster, name: str, how: str) -> None:
    if how == "no agent":
        del cluster.pods[name]
    elif how == "agent not ready":
        cluster.add_agent(name, ready=False)
    else:
        say_kubelet_is_ready(cluster, name, "Unknown")


def say_kubelet_is_ready(cluster: Cluster, name: str, status: str) -> None:
    node = cluster.nodes[name]
    others = [c for c in node["status"]["conditions"] if c["type"] != "Ready"]
    since = format_time(cluster.now_s)
    ready = {"type": "Ready", "status": status, "lastTransitionTime": since}
    node["status"]["conditions"] = [*others, ready]
    cluster.touch(node)


def test_the_pool_and_the_node_say_what_leaves_and_until_when() -> None:
    cluster = serving_fleet(4, nodeSelector={"for": "kv"})
    unlabel(cluster, "n0", "n1")
    events = [event.reason for name in ("n0", "n1") for event in cluster.reconcile(name).events]
    assert events == ["ReleaseScheduled", "ReleaseScheduled"]
    changes = cluster.reconcile_pool("kv")
    assert [event.reason for event in changes.events] == ["ReleaseScheduled"]
    assert changes.counts["leaving"] == 2
    assert changes.recheck_at_s == cluster.now_s + 600
    assert cluster.reconcile("n0").facts.state == "ready"
    cluster.now_s += 600
    cluster.reconcile_pool("kv")
    assert cluster.reconcile("n0").facts.state == "releasing"
    cluster.agent_reports("n0", {"kv": "Releasing"})
    assert cluster.reconcile_pool("kv").since_s["releasing"] == cluster.now_s


def test_a_pool_made_again_within_the_grace_period_finds_its_memory() -> None:
    cluster = serving_fleet(2)
    spec: dict[str, Any] = cluster.pools.pop("kv")["spec"]
    cluster.settle()
    assert {releasing(cluster, name) for name in cluster.nodes} == {"GracePeriod"}
    cluster.now_s += 300
    cluster.add_pool("kv", **spec)
    cluster.settle()
    answer(cluster)
    cluster.now_s += JOINING_S
    cluster.settle()
    assert absent(cluster) == set()
    assert ready(cluster) == set(cluster.nodes)


@pytest.mark.parametrize("restarted", [False, True])
def test_a_deleted_pools_nodes_keep_its_label_while_they_serve_its_memory(restarted: bool) -> None:
    cluster = serving_fleet(3)
    spec: dict[str, Any] = cluster.pools.pop("kv")["spec"]
    if restarted:
        cluster.grants.clear()
        cluster.former.clear()
    cluster.settle()
    label = "ready.hostprep.dev/kv"
    assert all(label in cluster.nodes[name]["metadata"]["labels"] for name in cluster.nodes)
    assert all(cluster.marks(name).keys() == {"v", "labels"} for name in cluster.nodes)
    cluster.add_pool("kv", **spec | {"rollout": {"maxUnavailable": 1}})
    cluster.settle()
    labelled = [
        name for name in cluster.nodes if label in cluster.nodes[name]["metadata"]["labels"]
    ]
    assert len(labelled) == 2, "one node takes it over at a time"


def test_a_deleted_pools_label_goes_with_its_memory() -> None:
    cluster = serving_fleet(2)
    cluster.pools.pop("kv")
    cluster.settle()
    cluster.now_s += 600
    cluster.reconcile_pools()
    cluster.settle()
    assert absent(cluster)
    for name in absent(cluster):
        assert "ready.hostprep.dev/kv" not in cluster.nodes[name]["metadata"]["labels"]


def test_a_pool_of_all_nodes_means_no_virtual_ones() -> None:
    cluster = serving_fleet(1)
    cluster.add_node("fargate", labels={"eks.amazonaws.com/compute-type": "fargate"})
    cluster.settle()
    assert "fargate" not in cluster.hmns


def test_the_word_said_just_before_a_deletion_holds() -> None:
    cluster = serving_fleet(1)
    cluster.change_pool("kv", release={"when": "Immediately"})
    cluster.reconcile_pool("kv")  # seen; no entry was rewritten yet
    del cluster.pools["kv"]
    cluster.settle()
    cluster.reconcile_pools()
    cluster.settle()
    assert absent(cluster) == {"n0"}


def test_the_age_of_a_release_begins_when_the_agent_does_and_not_with_the_slip() -> None:
    """A long wave, in which all is well, must not look like a release that hangs."""
    cluster = serving_fleet(2, nodeSelector={"for": "kv"}, rollout={"maxUnavailable": 1})
    unlabel(cluster)
    cluster.settle()
    cluster.now_s += 86_400
    cluster.settle()
    (told,) = [name for name in cluster.nodes if entry(cluster, name)["state"] == "Absent"]
    assert "releasing" not in cluster.reconcile_pool("kv").since_s
    cluster.agent_reports(told, {"kv": "Releasing"})
    began_s = cluster.now_s
    cluster.now_s += 60
    assert cluster.reconcile_pool("kv").since_s["releasing"] == began_s
    assert cluster.reconcile_pool("kv").since_s["leaving"] < began_s - 86_000


@pytest.mark.parametrize(
    ("slip", "required"), [("labels", True), ("labels", False), ("deleted", True)]
)
def test_after_the_grace_period_the_node_says_that_it_waits_for_its_turn(
    slip: str, required: bool
) -> None:
    cluster = serving_fleet(
        2,
        nodeSelector={"for": "kv"},
        rollout={"maxUnavailable": 1},
        readiness={"required": required},
    )
    if slip == "labels":
        unlabel(cluster)
    else:
        del cluster.pools["kv"]
    cluster.settle()
    (again_s,) = {cluster.reconcile(name).recheck_at_s for name in cluster.nodes}
    assert again_s is not None
    assert again_s > cluster.now_s
    cluster.now_s = again_s
    cluster.reconcile_pools()
    cluster.settle()
    assert {releasing(cluster, n) for n in cluster.nodes} == {"Releasing", "WaitingForTurn"}


@pytest.mark.parametrize("told", [True, False])
@pytest.mark.parametrize("dead", ["no agent", "agent not ready", "node not ready"])
def test_a_release_that_no_agent_can_carry_out_is_seen_and_grows_old(dead: str, told: bool) -> None:
    cluster = serving_fleet(3, nodeSelector={"for": "kv"}, rollout={"maxUnavailable": 1})
    unlabel(cluster, "n0")
    cluster.settle()
    cluster.now_s += 600
    if told:
        cluster.settle()
        assert absent(cluster) == {"n0"}
    died_s = cluster.now_s
    cluster.nodes["n0"]["metadata"]["creationTimestamp"] = format_time(died_s)  # no agent ever came
    kill(cluster, "n0", dead)
    cluster.now_s += 61
    cluster.settle()
    assert (absent(cluster) == {"n0"}) == told
    condition = cluster.condition("n0", "hostprep.dev/HostMemoryReleasing") or {}
    assert condition["reason"] in ("NoAgent", "AgentNotReady", "NodeNotReady")
    assert "agent lives" in condition["message"]
    cluster.now_s += 3600
    changes = cluster.reconcile_pool("kv")
    assert (changes.counts["leaving"], changes.counts["releasing"]) == (0, 1)
    assert changes.since_s["releasing"] == died_s


def test_a_paused_pools_dead_nodes_do_not_count_as_a_release_that_stalls() -> None:
    cluster = serving_fleet(2, nodeSelector={"for": "kv"}, rollout={"paused": True})
    unlabel(cluster)
    cluster.settle()
    del cluster.pods["n0"]
    cluster.now_s += 3600
    cluster.settle()
    changes = cluster.reconcile_pool("kv")
    assert (changes.counts["leaving"], changes.counts["releasing"]) == (2, 0)


def test_what_leaves_and_does_not_serve_holds_up_nobody() -> None:
    cluster = serving_fleet(3, nodeSelector={"for": "kv"}, rollout={"maxUnavailable": 1})
    cluster.agent_reports("n0", {"kv": "Degraded"})
    unlabel(cluster, "n0")
    cluster.settle()
    cluster.change_pool("kv", size="9Gi")
    cluster.settle()
    assert with_size(cluster, "9Gi") == {"n1"}
