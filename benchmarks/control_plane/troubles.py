"""What happens to a cluster while its operator is killed, and what it must look like afterwards."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

from hostprep.api.names import (
    CLUSTER_AUTOSCALER_TAINT,
    HOST_MEMORY_READY,
    MARKS_ANNOTATION,
    READY_LABEL_PREFIX,
)
from testbed.api import Api, ApiError
from testbed.fault_proxy import FaultProxy
from testbed.nodes import create_node, node_object, reboot_node
from testbed.opening_audit import OpeningAudit
from testbed.operator_process import HMNS, NODES, POOLS, pool_object
from testbed.simulated_agents import SimulatedAgents

JsonObject = dict[str, Any]
_POOLS = 3
_GOING = 1
"""The pool that is deleted at the end."""
_STARTUP = {"key": CLUSTER_AUTOSCALER_TAINT, "effect": "NoSchedule"}


class Troubles:
    """Everything that people, kubelets and machines do, at random."""

    def __init__(
        self,
        api: Api,
        proxy: FaultProxy,
        agents: SimulatedAgents,
        audit: OpeningAudit,
        chance: random.Random,
    ) -> None:
        self.done: Counter[str] = Counter()
        self._api, self._proxy, self._agents = api, proxy, agents
        self._audit, self._chance = audit, chance
        self._names: list[str] = []
        self._late: list[str] = []
        """Nodes that were booted again and whose agents have not said anything yet."""

    def make_cluster(self, count: int) -> None:
        """Nine nodes of ten are in two pools, the tenth in one."""
        self._names = [f"node-{number:04}" for number in range(count)]
        for name in self._names:
            self._make_node(name)
        for number in range(_POOLS):
            self._make_pool(number)

    def strike(self) -> None:
        """Do one thing, often while watches break; nothing where the API server does not answer."""
        of_nodes = (self._reboot, self._reboot, self._make_anew, self._taint, self._forget)
        try:
            self._chance.choice((*of_nodes, self._change_pool, self._delete_pool))()
            if self._chance.random() < 0.5:
                self._chance.choice((self._cut, self._expire))()
        except (ApiError, OSError):
            self.done["refused"] += 1

    def let_agents_speak(self, share: float) -> None:
        """Have that share of the nodes that were booted again report their new boot."""
        for name in list(self._late):
            if self._chance.random() < share:
                self._late.remove(name)
                self._agents.report(name)

    def settle(self) -> bool:
        """Ask for an end: all nodes, two of the pools, the third deleted; True once it is asked.

        Raises ApiError or OSError where the API server does not answer: then ask again.
        """
        there = {node["metadata"]["name"] for node in self._api.get(NODES)["items"]}
        for name in set(self._names) - there:
            self._make_node(name)
        for number in range(_POOLS):
            exists = self._api.exists(f"{POOLS}/pool-{number}")
            if number == _GOING and exists:
                self._remove_pool(number)
            elif number != _GOING and not exists:
                self._make_pool(number)
        return True

    def _make_node(self, name: str) -> None:
        number = int(name.rpartition("-")[2])
        mine = {number % _POOLS, (number + bool(number % 10)) % _POOLS}
        labels = {f"pool.hostprep.dev/pool-{n}": "true" for n in mine}
        create_node(self._api, node_object(name, labels=labels, taints=[_STARTUP]))

    def _make_pool(self, number: int) -> None:
        selector = {f"pool.hostprep.dev/pool-{number}": "true"}
        rollout = {"maxUnavailable": "50%"}
        pool = pool_object(
            f"pool-{number}",
            nodeSelector=selector,
            rollout=rollout,
            release={"when": "Immediately"},
            priority=number,
        )
        self._api.create(POOLS, pool)

    def _remove_pool(self, number: int) -> None:
        path = f"{POOLS}/pool-{number}"
        self._audit.may_release.add(self._api.get(path)["metadata"]["uid"])
        self._api.delete(path)
        self.done["pools deleted"] += 1

    def _some(self) -> list[str]:
        most = max(len(self._names) // 50, 2)
        return self._chance.sample(self._names, self._chance.randint(1, most))

    def _reboot(self) -> None:
        for name in self._some():
            reboot_node(self._api, name)
            self._late.append(name)
            self.done["nodes rebooted"] += 1

    def _make_anew(self) -> None:
        for name in self._some():
            self._api.delete(f"{NODES}/{name}")
            self._make_node(name)
            self._late.append(name)
            self.done["nodes made anew"] += 1

    def _taint(self) -> None:
        for name in self._some():
            self._api.patch(f"{NODES}/{name}", {"spec": {"taints": [_STARTUP]}})

    def _forget(self) -> None:
        name = self._chance.choice(self._names)
        self.done["HostMemoryNodes deleted by hand"] += self._api.delete(f"{HMNS}/{name}")

    def _change_pool(self) -> None:
        size = f"{self._chance.randint(64, 256)}Mi"
        path = f"{POOLS}/pool-{self._chance.randrange(_POOLS)}"
        if self._api.exists(path):
            self._api.patch(path, {"spec": {"size": size}})
            self.done["pools changed"] += 1

    def _delete_pool(self) -> None:
        """Delete a pool, and have it made again under its name, at once or a while later."""
        number = self._chance.randrange(_POOLS)
        if self._api.exists(f"{POOLS}/pool-{number}"):
            self._remove_pool(number)
            if self._chance.random() < 0.5:
                return
        self._make_pool(number)
        self.done["pools made again"] += 1

    def _cut(self) -> None:
        self.done["watches cut"] += self._proxy.cut_watches()

    def _expire(self) -> None:
        self.done["watches ended with 410"] += self._proxy.expire_watches()


def left_undone(api: Api) -> list[str]:
    """Compare what there is with what the pools ask for; return a sentence for each difference."""
    pools = {pool["metadata"]["name"]: pool for pool in api.get(POOLS)["items"]}
    hmns = {hmn["metadata"]["name"]: hmn for hmn in api.get(HMNS)["items"]}
    nodes = api.get(NODES)["items"]
    found = [f"{name} has no node" for name in hmns.keys() - {n["metadata"]["name"] for n in nodes}]
    for node in nodes:
        name, labels = node["metadata"]["name"], node["metadata"]["labels"]
        wanted = [p for p in pools.values() if p["spec"]["nodeSelector"].items() <= labels.items()]
        problems = (_unmarked(node, wanted), _misinformed(node, hmns.get(name), wanted))
        found += [f"{name}: {problem}" for problem in problems if problem]
    for name, pool in pools.items():
        status = pool.get("status") or {}
        if not 0 < status.get("selected", 0) == status.get("ready") == status.get("updated"):
            found.append(f"{name}: {status}")
    return found


def _unmarked(node: JsonObject, wanted: list[JsonObject]) -> str:
    """Say how the node is not open for exactly these pools, or not free of us without any."""
    labels = {key for key in node["metadata"]["labels"] if key.startswith(READY_LABEL_PREFIX)}
    marks = node["metadata"].get("annotations", {}).get(MARKS_ANNOTATION)
    conditions = {c["type"]: c["status"] for c in node["status"]["conditions"]}
    if labels != {READY_LABEL_PREFIX + pool["metadata"]["name"] for pool in wanted}:
        return f"labels {sorted(labels)}"
    if not wanted:
        left = [name for name in conditions if name.startswith("hostprep.dev/")]
        return f"traces are left: {left} {marks}" if left or marks else ""
    if any(t["key"] == CLUSTER_AUTOSCALER_TAINT for t in node["spec"].get("taints") or ()):
        return "tainted"
    boot_id = node["status"]["nodeInfo"]["bootID"]
    is_open = f'"openedBoot":"{boot_id}"' in (marks or "") and "closedAt" not in (marks or "")
    return "" if is_open and conditions.get(HOST_MEMORY_READY) == "True" else f"not open: {marks}"


def _misinformed(node: JsonObject, hmn: JsonObject | None, wanted: list[JsonObject]) -> str:
    """Say how the HostMemoryNode does not ask for exactly these pools."""
    if hmn is None:
        return "no HostMemoryNode" if wanted else ""
    if hmn["metadata"]["ownerReferences"][0]["uid"] != node["metadata"]["uid"]:
        return "its HostMemoryNode is another node's"
    there = {
        (entry["name"], entry["state"], entry["uid"], (entry.get("policy") or {}).get("size"))
        for entry in hmn["spec"].get("pools") or ()
    }
    asked = {
        (p["metadata"]["name"], "Present", p["metadata"]["uid"], p["spec"]["size"]) for p in wanted
    }
    return "" if there == asked else f"entries {sorted(there, key=str)}"
