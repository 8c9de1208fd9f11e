"""The contract's table, row by row, and the order of the rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from hostprep_operator.reconcile.changes import Settings
from hostprep_operator.reconcile.node import reconcile_node
from tests.unit.hostprep_operator.reconcile.cluster_model import Cluster

pytestmark = pytest.mark.unit

Story = Callable[[Cluster], None]


def cluster_with(**spec: object) -> Cluster:
    """A pool, and a node that joined later and is open."""
    cluster = Cluster()
    cluster.add_pool("kv", **spec)
    cluster.now_s += 10
    cluster.add_node("n1", tainted=True)
    cluster.add_agent("n1")
    cluster.reconcile("n1")
    cluster.now_s += 20
    cluster.agent_reports("n1")
    cluster.reconcile("n1")
    return cluster


def nothing(cluster: Cluster) -> None:
    """All is well."""


def node_not_ready(cluster: Cluster) -> None:
    conditions = cluster.nodes["n1"]["status"]["conditions"]
    conditions[:] = [c for c in conditions if c["type"] != "Ready"]
    conditions.append(cluster._condition("Ready", "Unknown"))


def agent_gone(cluster: Cluster) -> None:
    del cluster.pods["n1"]


def agent_not_ready(cluster: Cluster) -> None:
    cluster.add_agent("n1", ready=False)


def status_missing(cluster: Cluster) -> None:
    cluster.hmns["n1"].pop("status")


def rebooted(cluster: Cluster) -> None:
    cluster.reboot("n1")
    cluster.kubelet("n1")


def rebooted_and_the_agent_was_first(cluster: Cluster) -> None:
    cluster.reboot("n1")
    cluster.agent_reports("n1")


def rebooted_and_prepared(cluster: Cluster) -> None:
    rebooted(cluster)
    cluster.agent_reports("n1")


def rebooted_and_preparing(cluster: Cluster) -> None:
    rebooted(cluster)
    cluster.agent_reports("n1", {"kv": "Preparing"})


def no_boot_id(cluster: Cluster) -> None:
    cluster.nodes["n1"]["status"]["nodeInfo"] = {}
    cluster.hmns["n1"]["status"]["bootID"] = ""


def phase(name: str, **more: object) -> Story:
    def story(cluster: Cluster) -> None:
        cluster.agent_reports("n1", {"kv": name}, **more)

    story.__name__ = f"phase {name} {more or ''}"
    return story


def generation_of_a_former_entry(cluster: Cluster) -> None:
    cluster.hmns["n1"]["status"]["pools"][0]["generation"] = 0


def another_pool_of_that_name(cluster: Cluster) -> None:
    cluster.hmns["n1"]["status"]["pools"][0]["uid"] = "another"


def pool_never_heard_of(cluster: Cluster) -> None:
    cluster.hmns["n1"]["status"]["pools"] = []


def second_pool_that_waits_for_its_turn(cluster: Cluster) -> None:
    cluster.add_pool("tier")


def second_pool_in_its_turn(cluster: Cluster) -> None:
    cluster.add_pool("tier")
    cluster.reconcile_pool("tier")


def second_pool_that_is_not_required(cluster: Cluster) -> None:
    cluster.add_pool("tier", readiness={"required": False})


def other_owner(cluster: Cluster) -> None:
    cluster.hmns["n1"]["metadata"]["ownerReferences"][0]["uid"] = "former"


def hmn_gone(cluster: Cluster) -> None:
    del cluster.hmns["n1"]


TABLE: list[tuple[Story, float, str, str]] = [
    (nothing, 600, "True", "Ready"),
    (node_not_ready, 59, "True", "Ready"),
    (node_not_ready, 60, "Unknown", "NodeNotReady"),
    (agent_gone, 60, "Unknown", "NoAgent"),
    (agent_not_ready, 59, "True", "Ready"),
    (agent_not_ready, 60, "Unknown", "AgentNotReady"),
    (rebooted, 0, "False", "Rebooted"),
    (rebooted_and_the_agent_was_first, 0, "False", "Rebooted"),
    (rebooted_and_preparing, 0, "False", "Preparing"),
    (rebooted_and_prepared, 0, "True", "Ready"),
    (no_boot_id, 0, "False", "Preparing"),
    (status_missing, 0, "False", "Preparing"),
    (phase("Pending"), 0, "False", "Preparing"),
    (phase("Preparing"), 0, "False", "Preparing"),
    (phase("Releasing2"), 0, "False", "Preparing"),
    (phase("Resizing"), 0, "False", "Resizing"),
    (phase("Degraded"), 0, "False", "Degraded"),
    (phase("Failed"), 0, "False", "Failed"),
    (phase("Failed", reason="TooLarge"), 0, "False", "TooLarge"),
    (generation_of_a_former_entry, 0, "False", "Preparing"),
    (another_pool_of_that_name, 0, "False", "Preparing"),
    (pool_never_heard_of, 0, "False", "Preparing"),
    (second_pool_that_waits_for_its_turn, 0, "True", "Ready"),
    (second_pool_in_its_turn, 0, "False", "Preparing"),
    (second_pool_that_is_not_required, 0, "True", "Ready"),
    (other_owner, 0, "False", "Preparing"),
    (hmn_gone, 0, "False", "Preparing"),
]


@pytest.mark.parametrize(("story", "seconds", "status", "reason"), TABLE)
def test_the_condition_says_what_the_table_says(
    story: Story, seconds: float, status: str, reason: str
) -> None:
    cluster = cluster_with()
    story(cluster)
    cluster.now_s += seconds
    cluster.reconcile("n1")
    condition = cluster.condition("n1")
    assert condition is not None
    assert (condition["status"], condition["reason"]) == (status, reason)


@pytest.mark.parametrize(
    ("stories", "reason"),
    [
        ([agent_gone, node_not_ready], "NodeNotReady"),
        ([agent_gone, rebooted], "NoAgent"),
        ([agent_not_ready, phase("Failed")], "AgentNotReady"),
        ([rebooted, phase("Failed")], "Failed"),
        ([phase("Failed"), rebooted], "Rebooted"),
    ],
)
def test_the_first_row_that_holds_wins(stories: list[Story], reason: str) -> None:
    cluster = cluster_with()
    for story in stories:
        story(cluster)
    cluster.now_s += 61
    cluster.reconcile("n1")
    condition = cluster.condition("n1")
    assert condition is not None
    assert condition["reason"] == reason


def test_a_reboot_takes_labels_and_brings_the_taint_even_where_nobody_can_speak() -> None:
    cluster = cluster_with()
    agent_gone(cluster)
    rebooted(cluster)
    cluster.now_s += 61
    cluster.reconcile("n1")
    assert cluster.has_taint("n1")
    assert "ready.hostprep.dev/kv" not in cluster.nodes["n1"]["metadata"]["labels"]
    assert cluster.marks("n1")["closedAt"]


def test_without_liveness_nobody_asks_for_a_pod() -> None:
    cluster = cluster_with()
    cluster.settings = Settings(liveness="off")
    agent_gone(cluster)
    cluster.now_s += 600
    assert cluster.reconcile("n1").writes == ()


def test_an_agent_that_is_away_for_a_moment_changes_nothing_and_is_looked_at_again() -> None:
    cluster = cluster_with()
    agent_gone(cluster)
    view = replace(cluster.view("n1"), agent_missing_since_s=cluster.now_s)
    cluster.agent_reports("n1")
    changes = reconcile_node(view)
    assert changes.writes == ()
    assert changes.recheck_at_s == cluster.now_s + 60


def test_a_restarted_operator_does_not_doubt_that_the_agent_is_away() -> None:
    cluster = cluster_with()
    agent_gone(cluster)
    cluster.now_s += 60
    cluster.reconcile("n1")
    view = replace(cluster.view("n1"), agent_missing_since_s=cluster.now_s)
    assert reconcile_node(view).writes == ()


@pytest.mark.parametrize(
    ("allocatable", "capacity", "require", "status", "reason", "memory", "pages"),
    [
        ({"memory": "44Gi"}, {}, True, "True", "Ready", "True", "True"),
        ({"memory": "48Gi"}, {}, True, "True", "Ready", "True", "True"),
        (
            {"memory": "62Gi"},
            {"hugepages-2Mi": "0"},
            True,
            "False",
            "NotAccounted",
            "False",
            "True",
        ),
        ({"memory": "62Gi"}, {"hugepages-2Mi": "0"}, False, "True", "Ready", "False", "True"),
        ({"memory": "44Gi"}, {"hugepages-2Mi": "0"}, True, "True", "Ready", "True", "True"),
        ({"hugepages-2Mi": "16Gi"}, {}, True, "False", "NotAccounted", "True", "False"),
        ({"hugepages-2Mi": "16Gi"}, {}, False, "True", "Ready", "True", "False"),
    ],
)
def test_accounting_is_shown_and_counts_where_it_is_asked_for(
    *,
    allocatable: dict[str, str],
    capacity: dict[str, str],
    require: bool,
    status: str,
    reason: str,
    memory: str,
    pages: str,
) -> None:
    cluster = cluster_with(accounting={"require": require})
    cluster.nodes["n1"]["status"]["allocatable"] |= allocatable
    cluster.nodes["n1"]["status"]["capacity"] |= capacity
    cluster.reconcile("n1")
    said = {
        kind: cluster.condition("n1", f"hostprep.dev/{kind}") or {}
        for kind in ("HostMemoryReady", "MemoryAccounted", "HugePagesAccounted")
    }
    assert (said["HostMemoryReady"]["status"], said["HostMemoryReady"]["reason"]) == (
        status,
        reason,
    )
    assert said["MemoryAccounted"]["status"] == memory
    assert said["HugePagesAccounted"]["status"] == pages


def test_accounting_is_unknown_until_there_is_a_status_of_this_boot() -> None:
    cluster = cluster_with()
    assert (cluster.condition("n1", "hostprep.dev/MemoryAccounted") or {})["status"] == "True"
    rebooted(cluster)
    cluster.reconcile("n1")
    assert (cluster.condition("n1", "hostprep.dev/MemoryAccounted") or {})["status"] == "Unknown"


def test_a_complaint_with_another_number_is_no_news() -> None:
    cluster = cluster_with()
    cluster.agent_reports("n1", {"kv": "Failed"}, message="needs 8 GiB, 7.5 GiB are free")
    cluster.reconcile("n1")
    cluster.agent_reports("n1", {"kv": "Failed"}, message="needs 8 GiB, 7.4 GiB are free")
    assert cluster.reconcile("n1").writes == ()


def test_a_condition_keeps_the_time_since_when_it_says_so() -> None:
    cluster = cluster_with()
    cluster.agent_reports("n1", {"kv": "Preparing"})
    cluster.reconcile("n1")
    since = (cluster.condition("n1") or {})["lastTransitionTime"]
    cluster.now_s += 100
    cluster.agent_reports("n1", {"kv": "Failed"})
    cluster.reconcile("n1")
    assert (cluster.condition("n1") or {})["reason"] == "Failed"
    assert (cluster.condition("n1") or {})["lastTransitionTime"] == since


@pytest.mark.parametrize(
    ("asked", "accounted"),
    [({}, "False"), ({"hugepages-2Mi": "8Gi"}, "False"), ({"hugepages-2Mi": "16Gi"}, "True")],
)
def test_pages_that_the_agent_asks_for_are_offered_to_nobody_else(
    asked: dict[str, str], accounted: str
) -> None:
    cluster = cluster_with(accounting={"require": True})
    cluster.nodes["n1"]["status"]["allocatable"] |= {"hugepages-2Mi": "16Gi"}
    containers = [{"resources": {"requests": {**asked, "cpu": "50m"}}}]
    cluster.pods["n1"]["spec"]["containers"] = containers
    cluster.reconcile("n1")
    pages = cluster.condition("n1", "hostprep.dev/HugePagesAccounted") or {}
    assert pages["status"] == accounted, pages["message"]


def test_nothing_flaps_while_the_pod_with_the_placeholder_is_replaced() -> None:
    cluster = cluster_with(accounting={"require": True})
    cluster.nodes["n1"]["status"]["allocatable"] |= {"hugepages-2Mi": "16Gi"}
    asked = [{"resources": {"requests": {"hugepages-2Mi": "16Gi"}}}]
    cluster.pods["n1"]["spec"]["containers"] = asked
    cluster.reconcile("n1")
    pod = cluster.pods.pop("n1")
    cluster.reconcile("n1")
    for kind in ("HostMemoryReady", "HugePagesAccounted"):
        assert (cluster.condition("n1", f"hostprep.dev/{kind}") or {})["status"] == "True"
    pod["spec"]["containers"] = []
    cluster.pods["n1"] = pod
    cluster.reconcile("n1")
    assert (cluster.condition("n1", "hostprep.dev/HostMemoryReady") or {})[
        "reason"
    ] == "NotAccounted"
