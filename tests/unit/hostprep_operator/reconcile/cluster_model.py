"""A cluster in memory: documents as the API server keeps them, and writes as it takes them.

Every write is judged by `write_checks` before it is carried out.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from hostprep.api.conditions import format_time
from hostprep_operator.reconcile.changes import (
    CreateHostMemoryNode,
    DeleteHostMemoryNode,
    Grants,
    NodeChanges,
    NodeView,
    PatchHostMemoryNodeSpec,
    PatchNode,
    PatchNodeStatus,
    PoolChanges,
    Settings,
    Write,
)
from hostprep_operator.reconcile.node import reconcile_node
from hostprep_operator.reconcile.pool import reconcile_pool
from hostprep_operator.records import AgentRecord, HostMemoryNodeRecord, NodeRecord, PoolRecord


class ConflictError(Exception):
    """409."""


def merge(target: Any, patch: Any) -> Any:
    """RFC 7386."""
    if not isinstance(patch, Mapping):
        return copy.deepcopy(patch)
    merged = dict(target) if isinstance(target, Mapping) else {}
    for key, value in patch.items():
        if value is None:
            merged.pop(key, None)
        else:
            merged[key] = merge(merged.get(key), value)
    return merged


def guard(metadata: Mapping[str, Any], name: str, value: str) -> None:
    if metadata[name] != value:
        raise ConflictError(f"{name} is {metadata[name]}, not {value}")


def with_version(write: PatchNode | PatchNodeStatus, version: str) -> PatchNode | PatchNodeStatus:
    metadata = {**write.patch["metadata"], "resourceVersion": version}
    return replace(write, patch={**write.patch, "metadata": metadata})


Document = dict[str, Any]
START_S = 1_700_000_000.0
TAINT = "startup-taint.cluster-autoscaler.kubernetes.io/hostprep"


@dataclass
class Cluster:
    """All objects, the clock, and what one operator remembers."""

    now_s: float = START_S
    nodes: dict[str, Document] = field(default_factory=dict)
    pools: dict[str, Document] = field(default_factory=dict)
    hmns: dict[str, Document] = field(default_factory=dict)
    pods: dict[str, Document] = field(default_factory=dict)
    machine_boots: dict[str, str] = field(default_factory=dict)
    """What the machine knows; its Node may lag behind."""
    unseen_pools: set[str] = field(default_factory=set)
    """Pools that the operator's cache does not have (yet)."""
    confirmed_gone: set[str] = field(default_factory=set)
    grants: dict[str, Grants] = field(default_factory=dict)
    former: dict[str, PoolRecord] = field(default_factory=dict)
    """Pools as the operator saw them last."""
    settings: Settings = field(default_factory=Settings)
    version: int = 0
    writes: list[tuple[str, Write]] = field(default_factory=list)
    check: Callable[[Cluster, str, Write], None] | None = None

    # What people, cloud and kubelet do

    def _metadata(self, name: str, **more: Any) -> Document:
        self.version += 1
        return {
            "name": name,
            "uid": f"uid-{self.version}",
            "resourceVersion": str(self.version),
            "creationTimestamp": format_time(self.now_s),
            **more,
        }

    def add_node(
        self, name: str, *, labels: Mapping[str, str] | None = None, tainted: bool = False
    ) -> Document:
        metadata = self._metadata(name, labels={"kubernetes.io/os": "linux", **(labels or {})})
        boot = f"boot-{self.version}"
        self.machine_boots.setdefault(name, boot)
        taints = [{"key": "other.example/taint", "value": "x", "effect": "NoExecute"}]
        if tainted:
            taints.append({"key": TAINT, "value": "true", "effect": "NoSchedule"})
        self.nodes[name] = {
            "metadata": metadata,
            "spec": {"taints": taints},
            "status": {
                "nodeInfo": {"bootID": self.machine_boots[name]},
                "capacity": {"memory": "64Gi", "hugepages-2Mi": "16Gi"},
                "allocatable": {"memory": "44Gi", "hugepages-2Mi": "0"},
                "conditions": [self._condition("Ready", "True")],
            },
        }
        return self.nodes[name]

    def _condition(self, name: str, status: str) -> Document:
        since = format_time(self.now_s)
        return {"type": name, "status": status, "reason": "X", "lastTransitionTime": since}

    def add_pool(self, name: str, **spec: Any) -> Document:
        metadata = self._metadata(name, generation=1)
        self.pools[name] = {"metadata": metadata, "spec": {"size": "8Gi", **spec}}
        self.confirmed_gone.discard(name)
        return self.pools[name]

    def change_pool(self, name: str, **spec: Any) -> None:
        pool = self.pools[name]
        pool["spec"] = {**pool["spec"], **spec}
        pool["metadata"]["generation"] += 1
        self.touch(pool)

    def add_agent(self, node: str, *, ready: bool = True) -> None:
        self.pods[node] = {
            "metadata": self._metadata(f"agent-{node}"),
            "spec": {"nodeName": node},
            "status": {"conditions": [self._condition("Ready", str(ready))]},
        }

    def touch(self, document: Document) -> None:
        self.version += 1
        document["metadata"]["resourceVersion"] = str(self.version)

    def reboot(self, node: str) -> None:
        """The machine; kubelet tells later (see kubelet)."""
        self.version += 1
        self.machine_boots[node] = f"boot-{self.version}"

    def kubelet(self, node: str) -> None:
        document = self.nodes[node]
        document["status"]["nodeInfo"]["bootID"] = self.machine_boots[node]
        self.touch(document)

    def delete_node(self, name: str) -> None:
        del self.nodes[name]
        self.pods.pop(name, None)

    def collect_garbage(self) -> None:
        uids = {node["metadata"]["uid"] for node in self.nodes.values()}
        for name, hmn in list(self.hmns.items()):
            if hmn["metadata"]["ownerReferences"][0]["uid"] not in uids:
                del self.hmns[name]

    def agent_reports(
        self, node: str, phases: Mapping[str, str] | None = None, **more: Any
    ) -> None:
        """Answer every entry; Ready where `phases` does not say else; Absent ones are gone."""
        hmn = self.hmns.get(node)
        if hmn is None:
            return
        pools = []
        for entry in hmn["spec"]["pools"]:
            phase = (phases or {}).get(entry["name"], "Ready")
            if entry["state"] == "Absent":
                if phase != "Releasing":
                    continue
            elif phase == "Releasing":
                phase = "Ready"
            answer = {key: entry[key] for key in ("name", "uid", "generation")}
            pools.append({**answer, "phase": phase, "reason": phase, "readyBytes": 8 << 30, **more})
        said = {pool["phase"] for pool in pools}
        before = {c["type"]: c for c in hmn.get("status", {}).get("conditions", ())}
        conditions = [
            before.get(kind)
            or {"type": kind, "status": "True", "lastTransitionTime": format_time(self.now_s)}
            for phase, kind in (("Releasing", "Releasing"), ("Blocked", "ResizeBlocked"))
            if phase in said
        ]
        hmn["status"] = {
            "observedGeneration": hmn["metadata"]["generation"],
            "bootID": self.machine_boots[node],
            "pools": pools,
            "conditions": conditions,
            "hugePages": [{"pageBytes": 2 << 20, "total": 8192, "held": 8192}],
        }
        self.touch(hmn)

    # What the operator sees and does

    def view(self, name: str) -> NodeView:
        seen = [doc for key, doc in self.pools.items() if key not in self.unseen_pools]
        node, hmn, pod = self.nodes.get(name), self.hmns.get(name), self.pods.get(name)
        return NodeView(
            node=NodeRecord.from_json(node) if node else None,
            hmn=HostMemoryNodeRecord.from_json(hmn) if hmn else None,
            pools=tuple(PoolRecord.from_json(doc) for doc in seen),
            gone_pools=frozenset(self.confirmed_gone),
            former_pools={k: v.as_gone() for k, v in self.former.items() if k not in self.pools},
            agent=AgentRecord.from_json(pod) if pod else None,
            granted=self.granted(name),
            settings=self.settings,
            now_s=self.now_s,
        )

    def granted(self, name: str) -> frozenset[str]:
        """Pools that let something begin on the node, as the operator remembers it."""
        records = {key: PoolRecord.from_json(document) for key, document in self.pools.items()}
        return frozenset(
            pool
            for pool, grants in self.grants.items()
            if name in grants.nodes and grants.hold(records.get(pool))
        )

    def look(self, name: str) -> NodeChanges:
        """Reconcile, asking the API server for pools that nobody knows."""
        changes = reconcile_node(self.view(name))
        if changes.unknown_pools:
            assert changes.writes == ()
            self.unseen_pools -= changes.unknown_pools
            self.confirmed_gone |= changes.unknown_pools - set(self.pools)
            changes = reconcile_node(self.view(name))
            assert not changes.unknown_pools
        return changes

    def reconcile(self, name: str, *, only: int | None = None) -> NodeChanges:
        """Carry out the first writes (all of them by default), as the shell would."""
        changes = self.look(name)
        answered = ""
        for write in changes.writes[:only]:
            if isinstance(write, PatchNode | PatchNodeStatus):
                guarded = with_version(write, answered) if answered else write
                self.carry_out(name, guarded)
                answered = self.nodes[name]["metadata"]["resourceVersion"]
            else:
                self.carry_out(name, write)
        return changes

    def reconcile_pool(self, name: str) -> PoolChanges:
        """Reconcile a pool, or what is left of one that is gone, as the shell would."""
        if name in self.pools:
            pool = self.former[name] = PoolRecord.from_json(self.pools[name])
        else:
            pool = self.former.get(name, PoolRecord(name=name, uid="")).as_gone()
        former = self.grants.get(name, Grants())
        changes = reconcile_pool(
            pool,
            map(self.view, self.nodes),
            pools=[PoolRecord.from_json(document) for document in self.pools.values()],
            grants=former if former.hold(pool) else Grants(),
            settings=self.settings,
            now_s=self.now_s,
        )
        self.grants[name] = changes.grants
        if changes.status_patch is not None:
            self.pools[name] = merge(self.pools[name], changes.status_patch)
        return changes

    def reconcile_pools(self) -> int:
        """Reconcile all pools and those that are proven gone; returns the statuses written."""
        names = (*self.pools, *sorted(self.confirmed_gone))
        return sum(self.reconcile_pool(name).status_patch is not None for name in names)

    def carry_out(self, name: str, write: Write) -> None:
        if self.check is not None:
            self.check(self, name, write)
        match write:
            case CreateHostMemoryNode(body):
                self._create(name, body)
            case DeleteHostMemoryNode(uid, version):
                metadata = self.hmns[name]["metadata"]
                guard(metadata, "uid", uid)
                guard(metadata, "resourceVersion", version)
                del self.hmns[name]
            case PatchHostMemoryNodeSpec(patch):
                hmn = self.hmns[name]
                guard(hmn["metadata"], "resourceVersion", patch["metadata"]["resourceVersion"])
                self.hmns[name] = merge(hmn, patch)
                self.hmns[name]["metadata"]["generation"] += 1
                self.touch(self.hmns[name])
            case PatchNode(patch):
                assert set(patch) <= {"metadata", "spec"}
                node = self.nodes[name]
                guard(node["metadata"], "resourceVersion", patch["metadata"]["resourceVersion"])
                self.nodes[name] = merge(node, patch)
                self.touch(self.nodes[name])
            case PatchNodeStatus(patch):
                self._patch_conditions(name, patch)
        self.writes.append((name, write))

    def _create(self, name: str, body: Mapping[str, Any]) -> None:
        if name in self.hmns:
            raise ConflictError(name)
        document = merge({}, body)
        document["metadata"] |= self._metadata(name, generation=1)
        self.hmns[name] = document

    def _patch_conditions(self, name: str, patch: Mapping[str, Any]) -> None:
        node = self.nodes[name]
        guard(node["metadata"], "resourceVersion", patch["metadata"]["resourceVersion"])
        conditions = {c["type"]: c for c in node["status"]["conditions"]}
        for condition in patch["status"]["conditions"]:
            if condition.get("$patch") == "delete":
                conditions.pop(condition["type"], None)
            else:
                conditions[condition["type"]] = {**condition}
        node["status"]["conditions"] = list(conditions.values())
        self.touch(node)

    def settle(self, rounds: int = 25) -> int:
        """Reconcile everything until nothing is written; returns the number of writes."""
        before = len(self.writes)
        for _ in range(rounds):
            count = len(self.writes)
            statuses = self.reconcile_pools()
            for name in self.nodes:
                self.reconcile(name)
            if len(self.writes) == count and not statuses:
                return count - before
        raise AssertionError(f"never at rest: {self.writes[-4:]}")

    # What can be read off a Node

    def condition(self, name: str, kind: str = "hostprep.dev/HostMemoryReady") -> Document | None:
        conditions = self.nodes[name]["status"]["conditions"]
        return next((c for c in conditions if c["type"] == kind), None)

    def marks(self, name: str) -> Document:
        annotations = self.nodes[name]["metadata"].get("annotations") or {}
        text = annotations.get("hostprep.dev/marks", "{}")
        return dict(json.loads(text)) if text.endswith("}") else {}

    def has_taint(self, name: str, key: str = TAINT) -> bool:
        return any(t["key"] == key for t in self.nodes[name]["spec"].get("taints") or ())
