"""What may begin, on how many nodes at once; and what never waits, or holds nothing up."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hostprep.api.node_resource import Phase, PoolEntry, PoolStatus
from hostprep_operator.reconcile import rollout
from hostprep_operator.reconcile.assign import JOINING_S
from hostprep_operator.reconcile.changes import Grants
from hostprep_operator.reconcile.rollout import Member, beginning, max_unavailable, turns
from hostprep_operator.records import NodeRecord, PoolRecord
from tests.unit.hostprep_operator.reconcile.cluster_model import Cluster
from tests.unit.hostprep_operator.reconcile.write_checks import LABEL, check_write, labels

pytestmark = pytest.mark.unit


def serving_fleet(count: int, **spec: Any) -> Cluster:
    """Nodes that were there long before their pool, and serve by now."""
    cluster = Cluster(check=check_write)
    for number in range(count):
        cluster.add_node(f"n{number}", labels={"for": "kv"})
        cluster.add_agent(f"n{number}")
    cluster.now_s += 10 * JOINING_S
    at_once = {"rollout": {"maxUnavailable": "100%"}}
    cluster.add_pool("kv", **(spec | at_once))
    cluster.settle()
    answer(cluster)
    cluster.change_pool("kv", **(at_once | spec))
    cluster.settle()
    return cluster


def answer(cluster: Cluster, *names: str, **report: Any) -> None:
    """Let agents report of all their pools, and the operator act upon it."""
    for name in names or cluster.nodes:
        cluster.agent_reports(name, **report)
    cluster.settle()


def entry(cluster: Cluster, name: str, pool: str = "kv") -> dict[str, Any]:
    pools = cluster.hmns[name]["spec"]["pools"] if name in cluster.hmns else ()
    return next((found for found in pools if found["name"] == pool), {})


def with_size(cluster: Cluster, size: str) -> set[str]:
    return {n for n in cluster.nodes if entry(cluster, n).get("policy", {}).get("size") == size}


def ready(cluster: Cluster) -> set[str]:
    return {n for n in cluster.nodes if (cluster.condition(n) or {}).get("status") == "True"}


def progress(cluster: Cluster) -> str:
    conditions = cluster.pools["kv"]["status"]["conditions"]
    return str(next(c["reason"] for c in conditions if c["type"] == "Progressing"))


# --- first preparation


def test_a_new_pool_reaches_a_serving_fleet_in_turns_and_closes_no_node_that_waits() -> None:
    cluster = serving_fleet(10)
    cluster.add_pool("tier", rollout={"maxUnavailable": "20%"})
    cluster.settle()
    begun = {name for name in cluster.nodes if entry(cluster, name, "tier")}
    assert begun == {"n0", "n1"}
    assert ready(cluster) == set(cluster.nodes) - begun
    answer(cluster)
    assert len({name for name in cluster.nodes if entry(cluster, name, "tier")}) == 4


def test_a_node_that_joins_is_prepared_at_once_however_many_do() -> None:
    cluster = serving_fleet(2, rollout={"maxUnavailable": 1})
    for number in range(20):
        cluster.add_node(f"new{number}")
        cluster.add_agent(f"new{number}")
        cluster.reconcile(f"new{number}")
    assert all(entry(cluster, f"new{number}") for number in range(20))
    cluster.change_pool("kv", size="9Gi")
    cluster.reconcile_pool("kv")
    serving = cluster.grants["kv"].nodes & {"n0", "n1"}
    assert len(serving) == 1, "nodes that join are no part of the budget"


def test_a_node_that_waits_says_so_and_its_deadline_does_not_run() -> None:
    cluster = serving_fleet(0)
    cluster.add_node("old")
    cluster.add_agent("old")
    cluster.now_s += 10 * JOINING_S
    cluster.change_pool("kv", rollout={"paused": True})
    cluster.settle()
    assert (cluster.condition("old") or {})["reason"] == "Paused"
    cluster.now_s += 10_000
    facts = cluster.reconcile("old").facts
    assert (facts.state, facts.closed_since_s) == ("waiting", None), "nothing closed it"
    assert not facts.deadline_exceeded
    cluster.change_pool("kv", rollout={})
    cluster.settle()
    assert entry(cluster, "old")
    assert not cluster.reconcile("old").facts.deadline_exceeded


def test_first_preparations_that_fail_hold_up_nobody() -> None:
    cluster = serving_fleet(0)
    for number in range(6):
        cluster.add_node(f"n{number}")
        cluster.add_agent(f"n{number}")
    cluster.now_s += 10 * JOINING_S
    cluster.change_pool("kv", rollout={"maxUnavailable": 2})
    for _ in range(3):
        cluster.settle()
        for name in cluster.hmns:
            cluster.agent_reports(name, {"kv": "Failed"})
    assert len(cluster.hmns) == 6


def test_a_second_pools_failed_first_preparation_holds_up_nobody() -> None:
    """Each node serves another pool: what it lacks of this one, it never had."""
    cluster = serving_fleet(3)
    cluster.add_pool("tier", rollout={"maxUnavailable": 1})
    for _ in range(4):
        cluster.settle()
        for name in cluster.nodes:
            if entry(cluster, name, "tier"):
                cluster.agent_reports(name, {"tier": "Failed"})
    assert all(entry(cluster, name, "tier") for name in cluster.nodes)


@pytest.mark.parametrize("required", [True, False])
def test_first_preparations_without_a_living_agent_hold_up_nobody(required: bool) -> None:
    cluster = serving_fleet(0, readiness={"required": required})
    for number in range(6):
        cluster.add_node(f"n{number}")
    cluster.add_agent("n5")
    cluster.now_s += 10 * JOINING_S
    cluster.change_pool("kv", rollout={"maxUnavailable": 1})
    cluster.settle()
    assert cluster.hmns.keys() == {"n5"}
    condition = cluster.condition("n0")
    assert (condition["reason"] if condition else None) == ("NoAgent" if required else None)
    assert cluster.reconcile("n0").facts.state == ("unknown" if required else None)
    cluster.add_agent("n0")
    cluster.agent_reports("n5")
    cluster.settle()
    assert cluster.hmns.keys() == {"n0", "n5"}, "they wait for an agent, not for the others"


def test_a_preparation_whose_agent_dies_gives_its_turn_back_in_time() -> None:
    cluster = serving_fleet(0, readiness={"required": False})
    for name in ("n0", "n1"):
        cluster.add_node(name)
        cluster.add_agent(name)
    cluster.now_s += 10 * JOINING_S
    cluster.change_pool("kv", rollout={"maxUnavailable": 1})
    cluster.settle()
    assert cluster.hmns.keys() == {"n0"}
    cluster.add_agent("n0", ready=False)
    assert cluster.reconcile_pool("kv").recheck_at_s == cluster.now_s + 30
    cluster.now_s += 60
    cluster.settle()
    assert cluster.hmns.keys() == {"n0", "n1"}


def test_the_age_of_a_change_that_waits_for_leases_is_the_agents() -> None:
    cluster = serving_fleet(1)
    answer(cluster, regionsLeased=1)
    cluster.change_pool("kv", size="9Gi")
    cluster.settle()
    cluster.agent_reports("n0", {"kv": "Blocked"}, regionsLeased=1)
    began_s = cluster.now_s
    cluster.now_s += 600
    since_s = cluster.reconcile_pool("kv").since_s
    assert since_s == {"blocked": began_s}


# --- changes


def test_a_change_that_fails_on_a_node_that_served_holds_up_the_others() -> None:
    cluster = serving_fleet(3, rollout={"maxUnavailable": 1})
    cluster.change_pool("kv", size="9Gi")
    cluster.settle()
    cluster.agent_reports("n0", {"kv": "Failed"})
    cluster.settle()
    assert with_size(cluster, "9Gi") == {"n0"}
    cluster.grants.clear()
    cluster.settle()
    assert with_size(cluster, "9Gi") == {"n0"}, "after a restart of the operator too"


def test_what_does_not_serve_is_mended_at_once_within_a_rollout_that_is_full() -> None:
    cluster = serving_fleet(4, rollout={"maxUnavailable": 1})
    cluster.agent_reports("n3", {"kv": "Failed"})
    cluster.settle()
    cluster.change_pool("kv", size="7Gi")
    cluster.settle()
    assert with_size(cluster, "7Gi") == {"n3"}


def test_leased_nodes_are_blocked_outside_the_budget_and_stay_open() -> None:
    cluster = serving_fleet(20, rollout={"maxUnavailable": 2})
    leased = {f"n{number}" for number in range(12)}
    answer(cluster, *leased, regionsLeased=1)
    cluster.change_pool("kv", size="9Gi")
    for _ in range(10):
        cluster.settle()
        for name in with_size(cluster, "9Gi"):
            blocked = {"kv": "Blocked"} if name in leased else {}
            cluster.agent_reports(name, blocked, regionsLeased=int(name in leased))
            assert ready(cluster) >= leased, "no leased node is closed, not for a moment"
    cluster.settle()
    assert with_size(cluster, "9Gi") == set(cluster.nodes), "leases stall nothing"
    assert ready(cluster) == set(cluster.nodes)
    status = cluster.pools["kv"]["status"]
    assert (status["ready"], status["blocked"], status["unavailable"]) == (8, 12, 0)
    assert progress(cluster) == "Blocked"
    answer(cluster)
    assert progress(cluster) == "Settled"


def test_leased_nodes_of_a_pool_that_is_not_required_keep_its_label_through_a_change() -> None:
    cluster = serving_fleet(2, readiness={"required": False}, rollout={"maxUnavailable": "100%"})
    answer(cluster, "n0", regionsLeased=1)
    cluster.change_pool("kv", size="9Gi")
    cluster.settle()
    assert with_size(cluster, "9Gi") == {"n0", "n1"}
    assert (labels(cluster, "n0"), labels(cluster, "n1")) == ({LABEL}, set())
    cluster.agent_reports("n0", {"kv": "Blocked"}, regionsLeased=1)
    cluster.settle()
    assert labels(cluster, "n0") == {LABEL}
    cluster.agent_reports("n0", {"kv": "Resizing"})
    cluster.settle()
    assert labels(cluster, "n0") == set()


def test_nodes_without_leases_come_first() -> None:
    cluster = serving_fleet(4, rollout={"maxUnavailable": 1})
    answer(cluster, "n0", "n1", regionsLeased=1)
    cluster.change_pool("kv", size="9Gi")
    cluster.settle()
    assert with_size(cluster, "9Gi") == {"n2"}


def test_paused_begins_nothing_even_with_a_turn_granted_before() -> None:
    cluster = serving_fleet(4)
    cluster.change_pool("kv", size="9Gi")
    cluster.reconcile_pool("kv")
    assert len(cluster.grants["kv"].nodes) == 4
    cluster.change_pool("kv", rollout={"paused": True, "maxUnavailable": "100%"})
    for name in cluster.nodes:  # before the pool is looked at again
        cluster.reconcile(name)
    assert with_size(cluster, "9Gi") == set()
    cluster.settle()
    assert progress(cluster) == "Paused"
    assert ready(cluster) == set(cluster.nodes)
    cluster.change_pool("kv", rollout={"maxUnavailable": "100%"})
    cluster.settle()
    assert with_size(cluster, "9Gi") == set(cluster.nodes)


@pytest.mark.parametrize(
    ("partition", "canaries"),
    [
        ({"nodes": 2}, {"n0", "n1"}),
        ({"nodes": "30%"}, {"n0", "n1"}),
        ({"nodeSelector": {"canary": "true"}}, {"n4"}),
    ],
)
def test_a_partition_keeps_a_change_to_its_canaries(
    partition: dict[str, Any], canaries: set[str]
) -> None:
    cluster = serving_fleet(5)
    cluster.nodes["n4"]["metadata"]["labels"]["canary"] = "true"
    rollout = {"maxUnavailable": "100%", "partition": partition}
    cluster.change_pool("kv", size="9Gi", rollout=rollout)
    cluster.settle()
    answer(cluster)
    assert with_size(cluster, "9Gi") == canaries
    assert progress(cluster) == "Partitioned"
    cluster.change_pool("kv", rollout={"maxUnavailable": "100%"})
    cluster.settle()
    assert with_size(cluster, "9Gi") == set(cluster.nodes)


@pytest.mark.parametrize("partition", [{"nodes": 2}, {"nodeSelector": {"canary": "true"}}])
@pytest.mark.parametrize("size", ["7Gi", "8Gi"])
def test_canaries_that_failed_get_what_mends_them_and_nobody_else_does(
    partition: dict[str, Any], size: str
) -> None:
    cluster = serving_fleet(5)
    for name in ("n0", "n1"):
        cluster.nodes[name]["metadata"]["labels"]["canary"] = "true"
    canaries = {"maxUnavailable": 1, "partition": partition}
    cluster.change_pool("kv", size="9Gi", rollout=canaries)
    cluster.settle()
    cluster.agent_reports("n0", {"kv": "Failed"})
    cluster.settle()
    assert with_size(cluster, "9Gi") == {"n0"}, "it holds the budget"
    cluster.change_pool("kv", size="6Gi", rollout=canaries | {"paused": True})
    cluster.settle()
    assert with_size(cluster, "9Gi") == {"n0"}, "a pause holds this too"
    cluster.change_pool("kv", size=size, rollout=canaries)
    cluster.settle()
    assert entry(cluster, "n0")["policy"]["size"] == size
    assert with_size(cluster, "8Gi") >= {"n1", "n2", "n3", "n4"}, "the one turn is taken"
    for _ in range(3):
        answer(cluster)
    assert with_size(cluster, size) >= {"n0", "n1"}
    assert with_size(cluster, "8Gi") >= {"n2", "n3", "n4"}


def test_release_rules_reach_entries_without_a_turn_and_change_no_memory() -> None:
    cluster = serving_fleet(3, rollout={"maxUnavailable": 1, "paused": True})
    cluster.change_pool("kv", release={"gracePeriodSeconds": 77})
    cluster.settle()
    for name in cluster.nodes:
        assert entry(cluster, name)["policy"]["release"] == {"gracePeriodSeconds": 77}
        assert entry(cluster, name)["generation"] == 1
    assert ready(cluster) == set(cluster.nodes)


# --- a HostMemoryNode that is lost


def test_lost_objects_are_made_again_at_once_while_nothing_was_changed() -> None:
    cluster = serving_fleet(6, rollout={"maxUnavailable": 1})
    cluster.change_pool("kv", rollout={"paused": True})
    before = {name: entry(cluster, name) for name in cluster.nodes}
    cluster.hmns.clear()
    cluster.settle()
    assert {name: entry(cluster, name)["policy"] for name in cluster.nodes} == {
        name: found["policy"] for name, found in before.items()
    }


def test_a_lost_object_carries_no_change_past_the_budget() -> None:
    cluster = serving_fleet(6, rollout={"maxUnavailable": 1})
    cluster.change_pool("kv", size="9Gi")
    cluster.hmns.clear()
    cluster.settle()
    assert len(with_size(cluster, "9Gi")) == 1
    assert len(cluster.hmns) == 1, "the others keep all by having no instruction"


# --- the budget itself


PHASES = st.one_of(st.none(), st.sampled_from(list(Phase)))


@st.composite
def members(draw: st.DrawFn) -> Member:
    name = f"n{draw(st.integers(0, 10_000))}"
    entry = None
    if draw(st.integers(0, 4)):
        absent, due_s = draw(st.booleans()), draw(st.sampled_from([None, 5.0, 50.0]))
        entry = PoolEntry(name="kv", absent=absent, release_after_s=None if absent else due_s)
    phase = draw(PHASES)
    report = None
    if phase is not None:
        leased = draw(st.integers(0, 1))
        report = PoolStatus(name="kv", phase=phase, regions_leased=leased)
    serves = entry is not None and not entry.absent and phase in (Phase.READY, Phase.BLOCKED)
    return Member(
        node=NodeRecord(name=name, uid=name),
        selected=entry is None or draw(st.booleans()),
        entry=entry,
        current=draw(st.booleans()),
        ready=serves and draw(st.booleans()),
        joining=draw(st.booleans()),
        restored=entry is None and draw(st.booleans()),
        report=report,
        reachable=draw(st.booleans()),
    )


@given(
    fleet=st.lists(members(), max_size=30, unique_by=lambda member: member.name),
    limit=st.one_of(st.integers(1, 8), st.sampled_from(["1%", "10%", "50%", "100%"])),
    data=st.data(),
)
def test_no_more_nodes_at_once_than_the_budget_whatever_the_fleet(
    fleet: list[Member], limit: int | str, data: st.DataObject
) -> None:
    pool = PoolRecord.from_json(
        {"metadata": {"name": "kv"}, "spec": {"rollout": {"maxUnavailable": limit}}}
    )
    names = [member.name for member in fleet]
    former = data.draw(st.sets(st.sampled_from(names)) if names else st.just(set()))
    granted = turns(pool, fleet, Grants(nodes=frozenset(former)), now_s=10.0).grants.nodes
    by_name = {member.name: member for member in fleet}
    begun = {
        member.name
        for member in fleet
        if member.entry is not None
        and not member.ready
        and not (member.entry.absent and member.leased)
    }
    for name in granted:
        assert beginning(by_name[name], 10.0) is not None
    counted = {m.name for m in fleet if m.name in begun and _counts(m)}
    assert all(by_name[name].reachable for name in counted), "nothing opened these nodes"
    new = {
        name
        for name in granted - former - begun
        if not (by_name[name].entry is None and (by_name[name].joining or by_name[name].restored))
    }
    if new:
        assert all(by_name[name].reachable for name in new)
        taken = {name for name in granted & former if name not in begun}
        taken = {n for n in taken if not (by_name[n].joining or by_name[n].restored)}
        assert len(new) + len(counted) + len(taken) <= max_unavailable(pool, len(fleet))
    paused = PoolRecord.from_json(
        {"metadata": {"name": "kv"}, "spec": {"rollout": {"paused": True}}}
    )
    assert not turns(paused, fleet, Grants(nodes=frozenset(former)), now_s=10.0).grants.nodes


def _counts(member: Member) -> bool:
    """Whether what has begun there may keep memory from engines: nothing opened these nodes."""
    assert member.entry is not None
    if member.entry.absent:
        return member.reachable
    if not member.selected:
        return False  # it leaves: nothing asks for what it lacks
    if member.report is not None and member.report.phase in (Phase.FAILED, Phase.DEGRADED):
        return False
    return member.reachable and not member.joining


# --- without its safety steps, each of these is noticed


def test_without_the_check_of_the_generation_a_pause_comes_too_late(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Grants, "hold", lambda grants, pool: True)
    with pytest.raises(AssertionError):
        test_paused_begins_nothing_even_with_a_turn_granted_before()


@pytest.mark.parametrize("step", ["_is_under_way", "max_unavailable", "is_joining"])
def test_without_its_steps_the_budget_is_missed(step: str, monkeypatch: pytest.MonkeyPatch) -> None:
    broken: dict[str, Any] = {
        "_is_under_way": lambda member: False,
        "max_unavailable": lambda pool, members: members,
        "is_joining": lambda pool, node, now_s: True,
    }
    monkeypatch.setattr(rollout, step, broken[step])
    with pytest.raises(AssertionError):
        test_a_new_pool_reaches_a_serving_fleet_in_turns_and_closes_no_node_that_waits()
