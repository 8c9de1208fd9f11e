"""A life at random for two nodes, two pools and an operator; its writes are checked one by one."""

from __future__ import annotations

import copy
import json
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from tests.unit.hostprep_operator.reconcile.cluster_model import TAINT, Cluster
from tests.unit.hostprep_operator.reconcile.write_checks import (
    check_write,
    entries_of,
    is_kept,
    may_wait,
    required_pools,
    selects,
    why_not_ready,
)

NODES = st.sampled_from(["n1", "n2"])
POOLS = st.sampled_from(["kv", "tier"])
PHASES = st.sampled_from(
    [
        *("Ready", "Ready", "Ready", "Preparing", "Degraded", "Failed", "Resizing", "Releasing"),
        "Blocked",
    ]
)
SELECTORS = st.sampled_from([{}, {}, {"gpu": "a"}, {"gpu": "b"}])
LABELS = st.sampled_from([{}, {"gpu": "a"}, {"gpu": "b"}])
THEN = st.sampled_from(["look", "look", "look", "kill", "pools", "nothing"])
"""What the operator does after each thing that happens."""
READINESS = st.fixed_dictionaries(
    {},
    optional={
        "required": st.booleans(),
        "profile": st.sampled_from(["Karpenter", "None", "NodeReadinessController"]),
        "taintKey": st.just("example.com/host-memory"),
        "reclose": st.sampled_from(
            [{"reboot": "LabelOnly"}, {"repair": "Taint"}, {"resize": "Taint"}]
        ),
        "onDeadline": st.just("OpenWithout"),
    },
)
SPECS = st.fixed_dictionaries(
    {"nodeSelector": SELECTORS},
    optional={
        "size": st.sampled_from(["8Gi", "9Gi"]),
        "deletionPolicy": st.sampled_from(["Retain", "Release"]),
        "readiness": READINESS,
        "accounting": st.fixed_dictionaries({"require": st.booleans()}),
        "priority": st.integers(0, 2),
        "rollout": st.sampled_from(
            [
                {"paused": True},
                {"paused": False},
                {"partition": {"nodes": 1}},
                {"partition": {"nodeSelector": {"gpu": "a"}}},
            ]
        ),
        "release": st.sampled_from([{"when": "Immediately"}, {"gracePeriodSeconds": 40}]),
    },
)


class Life(RuleBasedStateMachine):
    """Nodes, pools, agents and people at random, and an operator that is killed now and then."""

    def __init__(self) -> None:
        super().__init__()
        self.cluster = Cluster(check=check_write)

    @initialize(spec=SPECS, other=SPECS, labels=LABELS, tainted=st.booleans(), ready=st.booleans())
    def start(
        self,
        spec: dict[str, Any],
        other: dict[str, Any],
        labels: dict[str, str],
        tainted: bool,
        ready: bool,
    ) -> None:
        self.cluster.add_pool("kv", **spec)
        self.cluster.add_pool("tier", **other)
        self.cluster.now_s += 5
        for name in ("n1", "n2"):
            self.cluster.add_node(name, labels=labels, tainted=tainted)
            self.cluster.add_agent(name)
            self.cluster.reconcile(name)
            if ready:
                self.cluster.agent_reports(name)
                self.cluster.reconcile(name)

    def operator(self, then: str, only: int = 1) -> None:
        """Let the operator look, as far as it comes."""
        if then == "nothing":
            return
        if then == "pools":
            self.cluster.reconcile_pools()
        for name in self.cluster.nodes:
            if not (self.cluster.hmns.get(name) or {}).get("spec", {}).get("pools"):
                # Nothing tells of a pool that the cache lacks: see NodeView.
                self.cluster.unseen_pools = set()
            self.cluster.reconcile(name, only=only if then == "kill" else None)
        if then == "kill":
            self.cluster.grants.clear()
            self.cluster.confirmed_gone.clear()
            self.cluster.former.clear()

    @rule(name=NODES, labels=LABELS, tainted=st.booleans(), collected=st.booleans(), then=THEN)
    def node_is_made_anew(
        self, name: str, labels: dict[str, str], tainted: bool, collected: bool, then: str
    ) -> None:
        self.cluster.delete_node(name)
        if collected:
            self.cluster.collect_garbage()
        self.cluster.add_node(name, labels=labels, tainted=tainted)
        self.cluster.add_agent(name)
        self.operator(then)

    @rule(name=NODES, labels=LABELS, then=THEN)
    def labels_change(self, name: str, labels: dict[str, str], then: str) -> None:
        document = self.cluster.nodes[name]
        document["metadata"]["labels"].pop("gpu", None)
        document["metadata"]["labels"] |= labels
        self.cluster.touch(document)
        self.operator(then)

    @rule(name=NODES, then=THEN)
    def taint_comes_back(self, name: str, then: str) -> None:
        document = self.cluster.nodes[name]
        if not self.cluster.has_taint(name):
            taints = document["spec"].get("taints") or []
            taint = {"key": TAINT, "effect": "NoExecute", "value": "again"}
            document["spec"]["taints"] = [*taints, taint]
            self.cluster.touch(document)
        self.operator(then)

    @rule(name=NODES, told=st.booleans(), prepared=st.booleans(), then=THEN)
    def machine_reboots(self, name: str, told: bool, prepared: bool, then: str) -> None:
        self.cluster.reboot(name)
        if told:
            self.cluster.kubelet(name)
        if prepared:
            self.cluster.agent_reports(name)
        self.operator(then)

    @rule(name=NODES, then=THEN)
    def kubelet_tells(self, name: str, then: str) -> None:
        self.cluster.kubelet(name)
        self.operator(then)

    @rule(name=POOLS, spec=SPECS, then=THEN)
    def pool_is_applied(self, name: str, spec: dict[str, Any], then: str) -> None:
        if name in self.cluster.pools:
            self.cluster.change_pool(name, **spec)
        else:
            self.cluster.add_pool(name, **spec)
        self.operator(then)

    @rule(name=POOLS, again=st.booleans(), then=THEN)
    def pool_is_deleted(self, name: str, again: bool, then: str) -> None:
        pool = self.cluster.pools.pop(name, None)
        if pool is not None and again:
            self.cluster.add_pool(name, **pool["spec"])
        self.operator(then)

    @rule(
        name=NODES, phases=st.dictionaries(POOLS, PHASES), leased=st.sampled_from([0, 1]), then=THEN
    )
    def agent_reports(self, name: str, phases: dict[str, str], leased: int, then: str) -> None:
        self.cluster.agent_reports(name, phases, regionsLeased=leased)
        self.operator(then)

    @rule(then=THEN)
    def all_is_prepared(self, then: str) -> None:
        for name in self.cluster.nodes:
            self.cluster.agent_reports(name)
        self.operator(then)

    @rule(name=NODES, there=st.booleans(), ready=st.booleans(), then=THEN)
    def agent_pod_changes(self, name: str, there: bool, ready: bool, then: str) -> None:
        self.cluster.pods.pop(name, None)
        if there:
            self.cluster.add_agent(name, ready=ready)
        self.operator(then)

    @rule(name=NODES, then=THEN)
    def somebody_deletes_the_host_memory_node(self, name: str, then: str) -> None:
        self.cluster.hmns.pop(name, None)
        self.operator(then)

    @rule(seconds=st.sampled_from([1, 30, 61, 700]), then=THEN)
    def time_passes(self, seconds: int, then: str) -> None:
        self.cluster.now_s += seconds
        self.operator(then)

    @rule(names=st.sets(POOLS, min_size=1), then=THEN)
    def cache_lacks_pools(self, names: set[str], then: str) -> None:
        self.cluster.unseen_pools = names
        self.operator(then)

    @rule(only=st.integers(0, 2))
    def operator_is_killed(self, only: int) -> None:
        self.operator("kill", only)

    @rule()
    def killed_anywhere_it_ends_the_same(self) -> None:
        self.cluster.unseen_pools = set()
        for name in self.cluster.nodes:
            whole = copy.deepcopy(self.cluster)
            count = len(whole.reconcile(name).writes)
            wanted = end_of(whole, name)
            for only in range(1, count):
                killed = copy.deepcopy(self.cluster)
                killed.reconcile(name, only=only)
                assert end_of(killed, name) == wanted

    @rule()
    def it_comes_to_rest(self) -> None:
        self.cluster.unseen_pools = set()
        self.cluster.settle()
        for name in self.cluster.nodes:
            check_rest(self.cluster, name)


def end_of(cluster: Cluster, name: str) -> str:
    """What is there once the node is at rest, less what counts writes."""
    for _ in range(10):
        before = len(cluster.writes)
        cluster.reconcile(name)
        if len(cluster.writes) == before:
            break
    node, hmn = copy.deepcopy(cluster.nodes[name]), copy.deepcopy(cluster.hmns.get(name))
    node["marks"] = cluster.marks(name) | {"hmn": ""}
    node["metadata"].pop("annotations", None)
    for document in (node, hmn or {"metadata": {}}):
        for key in ("resourceVersion", "uid", "generation"):
            document["metadata"].pop(key, None)
    node["status"]["conditions"].sort(key=lambda condition: condition["type"])
    return json.dumps([node, hmn], sort_keys=True)


def check_rest(cluster: Cluster, name: str) -> None:
    """What a node at rest must look like."""
    node, condition = cluster.nodes[name], cluster.condition(name)
    entries, required = entries_of(cluster, name), required_pools(cluster, name)
    chosen = [key for key, pool in cluster.pools.items() if selects(pool, node)]
    kept = [key for key, entry in entries.items() if is_kept(cluster.pools.get(key), entry)]
    labels = {k for k in node["metadata"]["labels"] if k.startswith("ready.hostprep.dev/")}
    assert labels == set(cluster.marks(name).get("labels", []))
    for key in chosen:
        assert key in entries or may_wait(cluster, name, cluster.pools[key])
    assert (condition is not None) == bool(required)
    deleted = {
        f"ready.hostprep.dev/{key}"
        for key, entry in entries.items()
        if key not in cluster.pools and entry["state"] == "Present" and "releaseAfter" in entry
        if not why_not_ready(cluster, name, {key: None}, was_open=True)
    }
    if not chosen and not kept:
        assert labels <= deleted
        assert cluster.marks(name).keys() <= {"v", "labels"}
        assert labels or cluster.marks(name) == {}
    going = [e for e in entries.values() if e["state"] == "Absent" or "releaseAfter" in e]
    assert (cluster.condition(name, "hostprep.dev/HostMemoryReleasing") is not None) == bool(going)
    if condition is not None and condition["status"] == "True":
        assert not why_not_ready(cluster, name, required, was_open=True)
        assert not cluster.has_taint(name, "example.com/host-memory")
        marked = {*chosen, *kept} & entries.keys()
        ready = {
            f"ready.hostprep.dev/{key}"
            for key in marked
            if not why_not_ready(cluster, name, {key: None}, was_open=True)
        }
        assert labels - deleted <= ready
        # A pool that was not found ready before gets its label once the agent read the newest spec.
        assert labels - deleted == ready or unobserved(cluster, name)
    if condition is not None and condition["status"] == "False":
        asks = any(p["spec"].get("accounting", {}).get("require") for p in required.values())
        assert asks or why_not_ready(cluster, name, required) or unobserved(cluster, name)


def unobserved(cluster: Cluster, name: str) -> bool:
    hmn = cluster.hmns[name]
    return bool(hmn["status"]["observedGeneration"] < hmn["metadata"]["generation"])
