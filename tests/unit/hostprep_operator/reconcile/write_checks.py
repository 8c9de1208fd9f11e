"""What may never be written, judged from the raw documents, without the code under test."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from hostprep.api.conditions import parse_time
from hostprep_operator.reconcile.changes import (
    CreateHostMemoryNode,
    DeleteHostMemoryNode,
    PatchHostMemoryNodeSpec,
    PatchNode,
    PatchNodeStatus,
    Write,
)
from hostprep_operator.records import PoolRecord
from tests.unit.hostprep_operator.reconcile.cluster_model import Cluster, Document

READY = "hostprep.dev/HostMemoryReady"
SERVING = ("Ready", "Blocked")
OPERATORS_FIELDS = ("release", "deletionPolicy")
JOINING_S = 900
KEYS = (
    "startup-taint.cluster-autoscaler.kubernetes.io/hostprep",
    "example.com/host-memory",
)


def check_write(cluster: Cluster, name: str, write: Write) -> None:
    """Raise AssertionError for a write that must not be."""
    match write:
        case PatchNode(patch):
            _check_node_patch(cluster, name, patch)
        case PatchNodeStatus(patch):
            _check_conditions(cluster, name, patch)
        case PatchHostMemoryNodeSpec(patch):
            _check_entries(cluster, name, patch["spec"]["pools"])
        case DeleteHostMemoryNode():
            hmn, node = cluster.hmns[name], cluster.nodes[name]
            if hmn["metadata"]["ownerReferences"][0]["uid"] == node["metadata"]["uid"]:
                _check_entries(cluster, name, [])
        case CreateHostMemoryNode(body):
            assert all(entry["state"] == "Present" for entry in body["spec"]["pools"])
            assert body["metadata"]["name"] == name
            for entry in body["spec"]["pools"]:
                _check_first_entry(cluster, name, entry)


def selects(pool: Document, node: Document) -> bool:
    pairs = pool["spec"].get("nodeSelector") or {}
    return all(node["metadata"]["labels"].get(k) == v for k, v in pairs.items())


def required_pools(cluster: Cluster, name: str) -> dict[str, Document]:
    """Pools that the node is marked by, of those that the operator can know of.

    It knows what is in its cache, or in an entry. One that waits for its turn has no entry and
    marks no node that others mark; one that the node left marks it while its memory is kept.
    """
    node, entries = cluster.nodes[name], entries_of(cluster, name)
    granted = cluster.granted(name)
    wanted = {
        key: pool
        for key, pool in cluster.pools.items()
        if (pool["spec"].get("readiness") or {}).get("required", True)
        and (key not in cluster.unseen_pools or key in entries)
        and (selects(pool, node) or _stays(cluster, name, pool, entries.get(key)))
    }
    begun = {
        key: pool
        for key, pool in wanted.items()
        if key in entries or key in granted or not may_wait(cluster, name, pool)
    }
    return begun or wanted


def entries_of(cluster: Cluster, name: str) -> dict[str, Document]:
    node, hmn = cluster.nodes[name], cluster.hmns.get(name)
    if hmn is None or hmn["metadata"]["ownerReferences"][0]["uid"] != node["metadata"]["uid"]:
        return {}
    return {entry["name"]: entry for entry in hmn["spec"]["pools"]}


def is_kept(pool: Document | None, entry: Document | None) -> bool:
    """Whether the node left the pool, and keeps its memory for now."""
    if pool is None or entry is None or entry["uid"] != pool["metadata"]["uid"]:
        return False
    return entry["state"] == "Present" and "releaseAfter" in entry


def _stays(cluster: Cluster, name: str, pool: Document, entry: Document | None) -> bool:
    """Whether the node left the pool, and nothing lets its memory go in this very moment."""
    if entry is None or not is_kept(pool, entry):
        return False
    if pool["spec"].get("deletionPolicy") == "Retain":
        return False  # the entry goes in this look: the memory stays for good, and marks nothing
    is_due = (parse_time(entry["releaseAfter"]) or 0) <= cluster.now_s
    return not (is_due and entry["name"] in cluster.granted(name))


def _leaving_now(cluster: Cluster, name: str) -> dict[str, Document]:
    """Pools that the node leaves in this very look: its entries say so by a later write."""
    entries, node = entries_of(cluster, name), cluster.nodes[name]
    return {
        key: pool
        for key, pool in cluster.pools.items()
        if key in entries and entries[key]["uid"] == pool["metadata"]["uid"]
        if entries[key]["state"] == "Present" and not selects(pool, node)
    }


def may_wait(cluster: Cluster, name: str, pool: Document) -> bool:
    """Whether a rollout may keep the pool's first preparation from the node."""
    rollout = pool["spec"].get("rollout") or {}
    partition = rollout.get("partition") or {}
    chosen = partition.get("nodeSelector") or {}
    labels = cluster.nodes[name]["metadata"]["labels"]
    outside = any(labels.get(key) != value for key, value in chosen.items())
    if rollout.get("paused") or "nodes" in partition or outside:
        return True
    created_s = parse_time(cluster.nodes[name]["metadata"]["creationTimestamp"]) or 0
    is_new = created_s >= (parse_time(pool["metadata"]["creationTimestamp"]) or 0)
    return not (is_new and cluster.now_s - created_s < JOINING_S)


def why_not_ready(
    cluster: Cluster, name: str, pools: Mapping[str, Any], *, was_open: bool = False
) -> str:
    """Say why the memory of these pools is not verified for this boot; nothing where it is.

    `was_open`: a node that is open stays so where engines hold what a change is about, until its
    agent has read it.
    """
    node, hmn = cluster.nodes[name], cluster.hmns.get(name)
    if hmn is None or hmn["metadata"]["ownerReferences"][0]["uid"] != node["metadata"]["uid"]:
        return "it has no HostMemoryNode"
    status = hmn.get("status") or {}
    if status.get("bootID") != node["status"]["nodeInfo"]["bootID"]:
        return "the status is of another boot"
    entries = {entry["name"]: entry for entry in hmn["spec"]["pools"]}
    reports = {report["name"]: report for report in status["pools"]}
    for pool in pools:
        entry, report = entries.get(pool), reports.get(pool)
        if entry is None or entry["state"] != "Present":
            return f"{pool} has no entry"
        if report is None or report["phase"] not in SERVING:
            return f"{pool} is not Ready"
        if was_open and report.get("regionsLeased") and report["uid"] == entry["uid"]:
            continue
        if any(report[key] != entry[key] for key in ("uid", "generation")):
            return f"{pool}'s report answers another entry"
    return ""


def _check_node_patch(cluster: Cluster, name: str, patch: Mapping[str, Any]) -> None:
    node = cluster.nodes[name]
    before = node["spec"].get("taints") or []
    after = patch["spec"]["taints"] or [] if "spec" in patch else before
    assert [t for t in before if t["key"] not in KEYS] == [
        t for t in after if t["key"] not in KEYS
    ], "others' taints are not ours"
    labels = patch["metadata"].get("labels") or {}
    assert all(key.startswith("ready.hostprep.dev/") for key in labels)
    for key, value in labels.items():
        if value is not None:
            pool = key.removeprefix("ready.hostprep.dev/")
            why = why_not_ready(cluster, name, {pool: None})
            assert not why, f"label of {pool}: {why}"
    marks_before, marks = cluster.marks(name), _marks(patch, cluster.marks(name))
    if marks.get("openedAt") and marks.get("openedBoot") != marks_before.get("openedBoot"):
        _check_opening(cluster, name, marks)
    gone = {t["key"] for t in before} - {t["key"] for t in after}
    # One key in the place of another, as the ruling pool changes, keeps pods away as before.
    stays = any(key in KEYS for key in {t["key"] for t in after})
    if gone and not stays and not _may_lose_taint(cluster, name, marks, gone):
        raise AssertionError(f"{gone} removed: {why_not_ready(cluster, name, cluster.pools)}")


def _marks(patch: Mapping[str, Any], before: Document) -> Document:
    if "annotations" not in patch["metadata"]:
        return before
    return dict(json.loads(patch["metadata"]["annotations"]["hostprep.dev/marks"] or "{}"))


def _check_opening(cluster: Cluster, name: str, marks: Document) -> None:
    node, hmn = cluster.nodes[name], cluster.hmns[name]
    why = why_not_ready(cluster, name, required_pools(cluster, name))
    assert not why, f"opened, but {why}"
    assert hmn["status"]["observedGeneration"] == hmn["metadata"]["generation"]
    assert marks["openedBoot"] == node["status"]["nodeInfo"]["bootID"]
    assert marks["hmn"] == f"{hmn['metadata']['uid']}/{hmn['metadata']['resourceVersion']}"
    condition = cluster.condition(name)
    assert condition is not None
    assert condition["status"] == "True", "an opening says so before the taint goes"


def _may_lose_taint(cluster: Cluster, name: str, marks: Document, gone: set[str]) -> bool:
    # A pool that nothing on the node names, and that the operator has not heard of yet, does not
    # select the node as far as it can know.
    seen = required_pools(cluster, name).items()
    required = {key: pool for key, pool in seen if key not in cluster.unseen_pools}
    if not required:
        return True
    if marks.get("openedAt") and not marks.get("closedAt"):
        return True  # open, and checked when it was opened
    # One that the node leaves in this very look still rules it, by what it says now.
    ruling = [*required.values(), *_leaving_now(cluster, name).values()]
    if any(_key_of(pool) not in gone for pool in ruling):
        return True  # a key that gives way to another pool's, or to none
    policies = [pool["spec"].get("readiness") or {} for pool in ruling]
    return bool(marks.get("deadline")) and any(
        policy.get("onDeadline") == "OpenWithout" for policy in policies
    )


def _key_of(pool: Document) -> str | None:
    readiness = pool["spec"].get("readiness") or {}
    if readiness.get("profile") in ("None", "NodeReadinessController"):
        return None
    return str(readiness.get("taintKey") or KEYS[0])


def _check_conditions(cluster: Cluster, name: str, patch: Mapping[str, Any]) -> None:
    for condition in patch["status"]["conditions"]:
        assert condition["type"].startswith("hostprep.dev/")
        if condition["type"] != READY or "$patch" in condition:
            continue
        if condition["status"] == "True":
            required = required_pools(cluster, name) or _leaving_now(cluster, name)
            marks = cluster.marks(name)
            was_open = bool(marks.get("openedAt") and not marks.get("closedAt"))
            why = why_not_ready(cluster, name, required, was_open=was_open)
            assert required
            assert not why, f"True, but {why}"
        elif condition["status"] == "False":
            marks = cluster.marks(name)
            is_open = marks.get("openedAt") and not marks.get("closedAt")
            assert not is_open, "a closing takes labels and brings the taint before it says so"


def _check_entries(cluster: Cluster, name: str, after: list[Document]) -> None:
    """Memory is released only of what nothing asks for, after its grace period, in its turn."""
    hmn, node = cluster.hmns[name], cluster.nodes[name]
    kept = {entry["name"]: entry for entry in after}
    before = {entry["name"]: entry for entry in hmn["spec"]["pools"]}
    status = hmn.get("status") or {}
    for key, entry in before.items():
        now, pool = kept.get(key), cluster.pools.get(key)
        wanted = pool is not None and selects(pool, node)
        if entry["state"] == "Absent" and key in cluster.unseen_pools:
            wanted = False  # being released already, and the operator cannot know of its return
        if wanted:
            assert now is not None, f"{key} is wanted"
            assert now["state"] == "Present", f"{key} is wanted"
            assert "releaseAfter" not in now, f"{key} is wanted"
            _check_change(cluster, name, entry, now)
        elif now is None and entry["state"] == "Absent":
            assert key not in {report["name"] for report in status["pools"]}, "not released yet"
            assert status["observedGeneration"] == hmn["metadata"]["generation"]
        elif now is None:
            retained = (entry.get("policy") or {}).get("deletionPolicy") == "Retain"
            last = PoolRecord.from_json(pool) if pool else cluster.former.get(key)
            assert retained or (last is not None and last.deletion_policy == "Retain")
        elif entry["state"] == "Present" and now["state"] == "Absent":
            _check_release(cluster, name, entry)
    for key in kept.keys() - before.keys():
        _check_first_entry(cluster, name, kept[key])


def _check_release(cluster: Cluster, name: str, entry: Document) -> None:
    key = entry["name"]
    assert "releaseAfter" in entry, f"{key} released without a grace period"
    assert (parse_time(entry["releaseAfter"]) or 0) <= cluster.now_s, f"{key} released too early"
    assert key in cluster.granted(name), f"{key} released out of turn"
    assert not _is_paused(cluster, key), "released while paused"


def _check_change(cluster: Cluster, name: str, entry: Document, now: Document) -> None:
    """What serves changes only in its turn; while a pool is paused nothing does."""
    if entry["state"] == "Absent" or _memory(entry) == _memory(now):
        return
    assert not _is_paused(cluster, entry["name"]), "begun while paused"
    if not why_not_ready(cluster, name, {entry["name"]: None}):
        assert entry["name"] in cluster.granted(name), "changed without a grant"


def _check_first_entry(cluster: Cluster, name: str, entry: Document) -> None:
    """A node gets its first entry when it joins, in its turn, or when it had it and lost it."""
    key, pool = entry["name"], cluster.pools[entry["name"]]
    marks = cluster.marks(name)
    boot_id = cluster.nodes[name]["status"]["nodeInfo"]["bootID"]
    if key in marks.get("policies", {}) and marks.get("openedBoot") == boot_id:
        return
    assert not _is_paused(cluster, key), "begun while paused"
    waits = may_wait(cluster, name, pool)
    assert not waits or key in cluster.granted(name), "prepared out of turn"


def _memory(entry: Document) -> Document:
    policy = entry.get("policy") or {}
    asked = {key: value for key, value in policy.items() if key not in OPERATORS_FIELDS}
    return {"uid": entry["uid"], "generation": entry["generation"], "policy": asked}


def _is_paused(cluster: Cluster, pool: str) -> bool:
    document = cluster.pools.get(pool)
    return bool(document and (document["spec"].get("rollout") or {}).get("paused"))


LABEL = "ready.hostprep.dev/kv"


def joining(*, name: str = "n1", tainted: bool = True, **spec: Any) -> Cluster:
    """A pool, and a node that joins later."""
    cluster = Cluster(check=check_write)
    cluster.add_pool("kv", **spec)
    cluster.now_s += 10
    cluster.add_node(name, tainted=tainted)
    cluster.add_agent(name)
    return cluster


def opened(*, name: str = "n1", tainted: bool = True, **spec: Any) -> Cluster:
    cluster = joining(name=name, tainted=tainted, **spec)
    cluster.reconcile(name)
    cluster.now_s += 20
    cluster.agent_reports(name)
    cluster.reconcile(name)
    return cluster


def labels(cluster: Cluster, name: str = "n1") -> set[str]:
    keys = cluster.nodes[name]["metadata"]["labels"]
    return {key for key in keys if key.startswith("ready.")}
