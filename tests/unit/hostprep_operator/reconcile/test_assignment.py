"""Which entries a node gets, keeps and loses; and which memory is never released."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hostprep_operator.reconcile.changes import (
    CreateHostMemoryNode,
    DeleteHostMemoryNode,
    PatchHostMemoryNodeSpec,
)
from hostprep_operator.reconcile.node import reconcile_node
from tests.unit.hostprep_operator.reconcile.cluster_model import Cluster, Document
from tests.unit.hostprep_operator.reconcile.write_checks import check_write

pytestmark = pytest.mark.unit


def cluster_with(*pools: str, ready: bool = True) -> Cluster:
    cluster = Cluster(check=check_write)
    for pool in pools:
        cluster.add_pool(pool, nodeSelector={"for": "memory"})
    cluster.add_node("n1", labels={"for": "memory"})
    cluster.add_agent("n1")
    cluster.reconcile("n1")
    if ready:
        cluster.agent_reports("n1")
        cluster.reconcile("n1")
    return cluster


def entries(cluster: Cluster) -> dict[str, Document]:
    return {entry["name"]: entry for entry in cluster.hmns["n1"]["spec"]["pools"]}


def test_the_object_is_named_after_the_node_and_owned_by_it_whatever_its_name() -> None:
    cluster = Cluster()
    name = ".".join(["n" * 63] * 3 + ["n" * 61])
    assert len(name) == 253
    cluster.add_pool("kv")
    cluster.add_node(name)
    cluster.add_agent(name)
    cluster.reconcile(name)
    metadata = cluster.hmns[name]["metadata"]
    owner = metadata["ownerReferences"][0]
    assert owner["uid"] == cluster.nodes[name]["metadata"]["uid"]
    assert "controller" not in owner
    assert "blockOwnerDeletion" not in owner
    cluster.agent_reports(name)
    assert cluster.reconcile(name).facts.opened


def test_an_empty_selector_selects_every_node() -> None:
    cluster = Cluster()
    cluster.add_pool("kv", nodeSelector={})
    cluster.add_node("n1")
    cluster.reconcile("n1")
    assert set(entries(cluster)) == {"kv"}


def test_many_pools_all_become_entries_and_open_together() -> None:
    cluster = cluster_with(*[f"pool-{number}" for number in range(60)])
    assert len(entries(cluster)) == 60
    assert (cluster.condition("n1") or {})["status"] == "True"
    assert len(cluster.writes) == 4
    assert cluster.settle() == 0


def test_a_pool_the_cache_lacks_is_asked_for_and_nothing_is_written() -> None:
    cluster = cluster_with("kv", "tier")
    view = cluster.view("n1")
    changes = reconcile_node(replace(view, pools=()))
    assert changes.unknown_pools == {"kv", "tier"}
    assert changes.writes == ()


def test_a_pool_whose_label_alone_is_left_is_asked_for_too() -> None:
    cluster = cluster_with("kv")
    changes = reconcile_node(replace(cluster.view("n1"), pools=(), hmn=None))
    assert changes.unknown_pools == {"kv"}
    assert changes.writes == ()


def give_up(cluster: Cluster, pool: str = "kv") -> None:
    """Let the grace period pass, and the pool give the node its turn."""
    cluster.reconcile("n1")
    cluster.now_s += 600
    cluster.reconcile_pool(pool)
    cluster.reconcile("n1")


def test_a_confirmed_deletion_becomes_an_absent_entry_without_policy() -> None:
    cluster = cluster_with("kv", "tier")
    uid = cluster.pools.pop("kv")["metadata"]["uid"]
    give_up(cluster)
    assert entries(cluster)["kv"] == {
        "name": "kv",
        "uid": uid,
        "generation": 1,
        "state": "Absent",
    }
    assert entries(cluster)["tier"]["state"] == "Present"
    cluster.agent_reports("n1")
    cluster.reconcile("n1")
    assert set(entries(cluster)) == {"tier"}


def test_with_the_agent_away_an_absent_entry_stays_for_as_long_as_it_takes() -> None:
    cluster = cluster_with("kv", ready=False)
    del cluster.pools["kv"]
    give_up(cluster)
    cluster.now_s += 1e6
    assert cluster.reconcile("n1").writes == ()
    assert entries(cluster)["kv"]["state"] == "Absent"


def test_retained_memory_is_forgotten_and_not_released() -> None:
    cluster = Cluster(check=check_write)
    cluster.add_pool("kv", deletionPolicy="Retain")
    cluster.add_node("n1")
    cluster.reconcile("n1")
    del cluster.pools["kv"]
    writes = cluster.reconcile("n1").writes
    assert isinstance(writes[-1], DeleteHostMemoryNode)
    assert cluster.hmns == {}


def relabel(cluster: Cluster, label: str) -> None:
    cluster.nodes["n1"]["metadata"]["labels"]["for"] = label
    cluster.touch(cluster.nodes["n1"])
    cluster.reconcile("n1")


def test_labels_that_no_longer_match_release() -> None:
    cluster = cluster_with("kv")
    relabel(cluster, "other")
    give_up(cluster)
    assert entries(cluster)["kv"]["state"] == "Absent"


def test_a_pool_selected_again_while_it_is_being_released_is_wanted_again() -> None:
    cluster = cluster_with("kv")
    relabel(cluster, "other")
    give_up(cluster)
    relabel(cluster, "memory")
    assert entries(cluster)["kv"]["state"] == "Present"


def test_a_deleted_object_is_made_anew_with_the_same_entries() -> None:
    cluster = cluster_with("kv", "tier")
    before = entries(cluster)
    del cluster.hmns["n1"]
    writes = cluster.reconcile("n1").writes
    assert isinstance(writes[-1], CreateHostMemoryNode)
    assert entries(cluster) == before


def test_a_node_made_anew_gets_an_object_of_its_own() -> None:
    cluster = cluster_with("kv")
    cluster.delete_node("n1")
    cluster.add_node("n1", labels={"for": "memory"})
    cluster.add_agent("n1")
    assert isinstance(cluster.reconcile("n1").writes[-1], DeleteHostMemoryNode)
    assert isinstance(cluster.reconcile("n1").writes[-1], CreateHostMemoryNode)
    assert (cluster.condition("n1") or {})["status"] == "False"


def test_a_change_where_the_pool_is_not_ready_is_written_at_once() -> None:
    cluster = cluster_with("kv", ready=False)
    cluster.change_pool("kv", size="9Gi")
    cluster.reconcile("n1")
    assert entries(cluster)["kv"]["generation"] == 2


def test_a_change_where_the_pool_serves_waits_for_its_turn_and_closes_first() -> None:
    cluster = cluster_with("kv")
    cluster.change_pool("kv", size="9Gi")
    assert cluster.reconcile("n1").writes == ()
    cluster.reconcile_pool("kv")
    changes = cluster.reconcile("n1")
    assert changes.facts.closed_cause == "resize"
    assert isinstance(changes.writes[-1], PatchHostMemoryNodeSpec)
    assert entries(cluster)["kv"]["policy"]["size"] == "9Gi"


def test_a_pool_deleted_and_made_again_is_a_change() -> None:
    cluster = cluster_with("kv")
    spec = cluster.pools.pop("kv")["spec"]
    uid = cluster.add_pool("kv", **spec)["metadata"]["uid"]
    assert cluster.reconcile("n1").writes == ()
    cluster.reconcile_pool("kv")
    cluster.reconcile("n1")
    assert entries(cluster)["kv"]["uid"] == uid
    assert (cluster.condition("n1") or {})["status"] == "False"


@pytest.mark.parametrize(
    "change",
    [
        {"readiness": {"deadlineSeconds": 5}},
        {"rollout": {"maxUnavailable": "50%"}},
        {"accounting": {"require": True}},
        {"nodeSelector": {}},
    ],
)
def test_what_is_the_operators_own_rewrites_no_object(change: Document) -> None:
    cluster = cluster_with("kv")
    cluster.change_pool("kv", **change)
    cluster.reconcile_pool("kv")
    assert cluster.reconcile("n1").writes == ()


def test_nothing_opens_before_the_agent_has_read_the_newest_spec() -> None:
    cluster = cluster_with("kv", "tier", ready=False)
    cluster.agent_reports("n1", {"tier": "Preparing"})
    cluster.reconcile("n1")
    cluster.agent_reports("n1")
    del cluster.pools["tier"]
    assert not cluster.reconcile("n1").facts.opened
    assert not cluster.reconcile("n1").facts.opened
    cluster.agent_reports("n1", {"tier": "Releasing"})
    assert cluster.reconcile("n1").facts.opened


def test_a_pool_given_up_and_wanted_again_is_not_believed_before_the_agent_has_read_it() -> None:
    cluster = cluster_with("kv")
    cluster.add_pool("tier")
    cluster.settle()
    cluster.agent_reports("n1")
    cluster.reconcile("n1")
    relabel(cluster, "other")
    give_up(cluster)
    relabel(cluster, "memory")
    cluster.reconcile("n1")
    assert "ready.hostprep.dev/kv" not in cluster.nodes["n1"]["metadata"]["labels"]
    assert (cluster.condition("n1") or {})["status"] == "False"
    cluster.agent_reports("n1")
    assert cluster.reconcile("n1").facts.opened
