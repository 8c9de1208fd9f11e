"""Do to a fleet what people do to it by a slip; see what is lost, and who is told of it, and when.

`python -m benchmarks.control_plane.slips [--nodes 500] [--grace 60] [-o json]`: a pool on a real
API server with the operator as it is shipped, and agents that are simulated. A label flaps, a
selector gets a typo (and the operator dies meanwhile), a pool is deleted, a change rolls out over
engines that hold leases, somebody uninstalls. Each slip is put right before the grace period is
over. Exit code 1 where memory was lost, or more nodes were without theirs than the budget allows.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from hostprep.api.conditions import parse_time
from hostprep.api.names import CLUSTER_AUTOSCALER_TAINT, HOST_MEMORY_RELEASING
from hostprep.api.node_resource import Phase, PoolEntry
from hostprep.console import print_table
from hostprep.errors import HostprepError
from testbed.api import MERGE_PATCH, Api, ApiError
from testbed.chart import IMAGE, apply_crds, wait_for_deletion_protection
from testbed.control_plane import ControlPlane
from testbed.nodes import create_node, node_object
from testbed.operator_process import HMNS, NODES, POOLS, OperatorProcess, pool_object, run_command
from testbed.processes import wait_for
from testbed.simulated_agents import SimulatedAgents, watch

JsonObject = dict[str, Any]
POOL = "kv"
LABEL = "feature.example.org/host-memory"
_READY = f"ready.hostprep.dev/{POOL}"
_EVENTS = "/api/v1/namespaces/default/events"
_NAMESPACE = "hostprep-system"
_CHART = Path(__file__).parents[2] / "charts" / "hostprep"
_LONGEST_S = 600.0
_BUDGET_PERCENT = 10
"""The default of `rollout.maxUnavailable`."""
_TOLD_CHARS = 100
_RESIZE_S = 2.0
"""How long a simulated agent takes for a change."""


@dataclass(slots=True, kw_only=True)
class Slip:
    """One slip, and what came of it. Seconds are from the slip on."""

    what: str
    put_right_s: float = 0.0
    touched: int = 0
    """Nodes that it concerned."""
    lost: int = 0
    """Nodes that were told to release memory, or lost their HostMemoryNode."""
    without_memory: int = 0
    """Nodes that were closed, or without the pool's label, at the same time; the most."""
    budget: int = 0
    seen_s: dict[str, float] = field(default_factory=dict)
    """What showed it to people, and when first."""
    settled_s: float = 0.0
    """When everything was as before, or as asked for."""
    answer: str = ""
    """What the person was told."""

    @property
    def is_harmless(self) -> bool:
        """Whether nothing was lost, and no more was unavailable than is allowed."""
        return self.lost == 0 and self.without_memory <= self.budget


class Fleet:
    """The nodes and HostMemoryNodes as a watch of our own shows them, version by version."""

    def __init__(self, api: Api) -> None:
        self._api = api
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._specs: dict[str, JsonObject] = {}
        self.without_memory: set[str] = set()
        self.most_without_memory = 0
        self.lost: set[str] = set()
        self.releasing: set[str] = set()
        """Nodes whose condition says that memory leaves them, or is about to."""
        self._threads = [
            threading.Thread(target=self._watch, args=(path, take), daemon=True)
            for path, take in ((NODES, self._node), (HMNS, self._holder))
        ]
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """Stop watching."""
        self._stop.set()
        for thread in self._threads:
            thread.join(10)

    def begin(self) -> None:
        """Forget what was lost, and the most that was unavailable."""
        with self._lock:
            self.lost.clear()
            self.most_without_memory = len(self.without_memory)

    def entries(self) -> list[JsonObject]:
        """Return the pool's entry of every node that has one."""
        with self._lock:
            return list(self._specs.values())

    def _watch(self, path: str, take: Callable[[str, JsonObject], None]) -> None:
        for kind, document in watch(self._api, path, self._stop):
            with self._lock:
                take(kind, document)

    def _node(self, kind: str, node: JsonObject) -> None:
        if kind == "DELETED":
            return
        name = node["metadata"]["name"]
        taints = {taint["key"] for taint in node["spec"].get("taints") or ()}
        is_open = _READY in node["metadata"]["labels"] and CLUSTER_AUTOSCALER_TAINT not in taints
        (self.without_memory.discard if is_open else self.without_memory.add)(name)
        self.most_without_memory = max(self.most_without_memory, len(self.without_memory))
        is_releasing = any(
            c["type"] == HOST_MEMORY_RELEASING and c["status"] == "True"
            for c in node["status"]["conditions"]
        )
        (self.releasing.add if is_releasing else self.releasing.discard)(name)

    def _holder(self, kind: str, hmn: JsonObject) -> None:
        name = hmn["metadata"]["name"]
        entry = next((e for e in hmn["spec"]["pools"] if e["name"] == POOL), None)
        if kind == "DELETED" or entry is None:
            if self._specs.pop(name, None) is not None:
                self.lost.add(name)
            return
        if entry["state"] == "Absent":
            self.lost.add(name)
        self._specs[name] = entry


class Slips:
    """A fleet with one pool that is ready everywhere, and the slips, each from there."""

    def __init__(self, cluster: ControlPlane, nodes: int, grace_s: int) -> None:
        self._cluster = cluster
        self._api = cluster.api
        self._nodes = [f"node-{index:04d}" for index in range(nodes)]
        self._grace_s = grace_s
        self._wait_s = grace_s / 3
        """How long each slip goes unnoticed."""
        self._resizing: dict[str, float] = {}
        self._operator = OperatorProcess(cluster, "--agent-liveness=off")
        self._agents = SimulatedAgents(self._api)
        self._agents.phase = self._phase
        self._fleet = Fleet(self._api)

    def close(self) -> None:
        """Stop what this began."""
        self._fleet.close()
        self._agents.close()

    def prepare(self) -> None:
        """Make the pool and the nodes, and wait until all are open."""
        self._operator.wait_ready(120)
        self._api.create(POOLS, self._pool())
        for name in self._nodes:
            taint = {"key": CLUSTER_AUTOSCALER_TAINT, "effect": "NoSchedule"}
            create_node(self._api, node_object(name, labels={LABEL: "true"}, taints=[taint]))
        self._wait(self._is_as_before, "the fleet did not open")

    def run(self) -> Iterator[Slip]:
        """Yield one slip after the other."""
        yield self.label_flaps()
        yield self.selector_has_a_typo()
        yield self.selector_has_a_typo_and_the_pool_is_paused()
        yield self.pool_is_deleted_while_leased()
        yield self.pool_is_deleted()
        yield self.change_meets_leases()
        yield self.uninstalled_while_leased()

    def label_flaps(self) -> Slip:
        """Node feature discovery takes its label off a fifth of the nodes, and sets it again."""
        few = self._nodes[: max(len(self._nodes) // 5, 1)]
        with self._slip(f"a label flaps on {len(few)} nodes", len(few)) as slip:
            for name in few:
                self._label(name, None)
            self._watch_until(slip, self._wait_s)
            for name in few:
                self._label(name, "true")
            self._settle(slip)
        return slip

    def selector_has_a_typo(self) -> Slip:
        """Have the pool select no node any more, and kill the operator on top."""
        with self._slip("a typo in nodeSelector; the operator is killed", len(self._nodes)) as slip:
            self._patch_pool({"nodeSelector": {LABEL: None, f"{LABEL}s": "true"}})
            self._watch_until(slip, self._wait_s / 2)
            self._operator.restart()
            self._operator.wait_ready(120)
            self._watch_until(slip, self._wait_s)
            self._patch_pool({"nodeSelector": {LABEL: "true", f"{LABEL}s": None}})
            self._settle(slip)
        return slip

    def selector_has_a_typo_and_the_pool_is_paused(self) -> Slip:
        """Somebody sees that memory is about to go, and stops it without knowing why it would."""
        what = "the same; paused in time, put right after the grace period"
        with self._slip(what, len(self._nodes)) as slip:
            self._patch_pool({"nodeSelector": {LABEL: None, f"{LABEL}s": "true"}})
            self._watch_until(slip, self._wait_s)
            self._patch_pool({"rollout": {"paused": True}})
            self._watch_until(slip, self._grace_s * 1.25)
            good = {LABEL: "true", f"{LABEL}s": None}
            self._patch_pool({"nodeSelector": good, "rollout": {"paused": False}})
            self._settle(slip)
        return slip

    def pool_is_deleted_while_leased(self) -> Slip:
        """`kubectl delete hmp` while engines run: the API server refuses."""
        leased = self._lease_two_fifths()
        with self._slip(f"kubectl delete hmp, {len(leased)} nodes leased", 0) as slip:
            try:
                self._api.delete(f"{POOLS}/{POOL}")
            except ApiError as error:
                slip.answer = f"{error.status}: {error.message}"
            else:
                slip.answer = "deleted"
            self._settle(slip)
        self._lease(set())
        return slip

    def pool_is_deleted(self) -> Slip:
        """Do the same while no engine runs, and apply the pool again."""
        with self._slip("kubectl delete hmp, applied again", len(self._nodes)) as slip:
            self._api.delete(f"{POOLS}/{POOL}")
            self._watch_until(slip, self._wait_s)
            self._api.create(POOLS, self._pool())
            self._settle(slip)
        return slip

    def change_meets_leases(self) -> Slip:
        """Roll out a new size: free nodes go first, leased ones serve on; then the engines end."""
        leased = self._lease_two_fifths()
        what = f"a new size while {len(leased)} nodes are leased"
        with self._slip(what, len(self._nodes)) as slip:
            self._patch_pool({"size": "128Mi"})
            self._wait(
                lambda: (
                    self._counts()["updated"] == len(self._nodes)
                    and self._counts()["blocked"] == len(leased)
                    and not self._fleet.without_memory
                ),
                "the roll-out stalled",
            )
            after_s = time.monotonic() - self._began_s
            most = self._fleet.most_without_memory
            slip.answer = (
                f"{len(self._nodes) - len(leased)} changed and {len(leased)} Blocked, open and"
                f" labelled, after {after_s:.0f} s"
            )
            slip.put_right_s = after_s
            self._lease(set())
            self._wait(
                lambda: self._counts()["blocked"] == 0 and self._is_as_before(), "it did not end"
            )
            slip.settled_s = time.monotonic() - self._began_s
        slip.without_memory = most  # engines that end all at once are no step of the roll-out
        return slip

    def uninstalled_while_leased(self) -> Slip:
        """`helm uninstall` begins with this command, and stops where it fails."""
        leased = self._lease_two_fifths()
        versions = self._pool_versions()
        with self._slip(f"uninstall, {len(leased)} nodes leased", 0) as slip:
            code, printed = run_command(
                self._cluster, "cleanup", "--yes", "--agent-liveness=off", timeout_s=_LONGEST_S
            )
            slip.answer = f"exit {code}: {_first_refusal(printed)}"
            if code != 2 or self._pool_versions() != versions:
                slip.lost = len(self._nodes)
            self._settle(slip)
        self._lease(set())
        return slip

    @contextmanager
    def _slip(self, what: str, touched: int) -> Iterator[Slip]:
        budget = -(-len(self._nodes) * _BUDGET_PERCENT // 100)
        slip = Slip(what=what, touched=touched, budget=budget)
        self._fleet.begin()
        self._began_s = time.monotonic()
        self._began_at_s = time.time()
        print(f"  {what}", file=sys.stderr)
        yield slip
        slip.lost = max(slip.lost, len(self._fleet.lost))
        slip.without_memory = self._fleet.most_without_memory

    def _watch_until(self, slip: Slip, after_s: float) -> None:
        """Look at what people look at until so long after the slip, and note when it showed."""
        shows: dict[str, Callable[[], bool]] = {
            "node condition": lambda: bool(self._fleet.releasing),
            "hmp status.leaving": self._pool_shows,
            "event": self._event_shows,
            "metric": lambda: self._metric("leaving") > 0,
        }
        while time.monotonic() - self._began_s < after_s:
            for name, is_shown in shows.items():
                if name not in slip.seen_s and is_shown():
                    slip.seen_s[name] = time.monotonic() - self._began_s
            time.sleep(0.05)

    def _settle(self, slip: Slip) -> None:
        slip.put_right_s = time.monotonic() - self._began_s
        self._wait(self._is_as_before, f"not as before: {slip.what}")
        slip.settled_s = time.monotonic() - self._began_s

    def _wait(self, is_so: Callable[[], bool], why: str) -> None:
        def look() -> bool:
            self._resize()
            return is_so()

        wait_for(look, _LONGEST_S, every_s=0.25, why=why)

    def _is_as_before(self) -> bool:
        entries = self._fleet.entries()
        pool = self._api.get(f"{POOLS}/{POOL}")
        wanted = (pool["metadata"]["uid"], pool["spec"]["size"])
        return (
            len(entries) == len(self._nodes)
            and not self._fleet.without_memory
            and not self._fleet.releasing
            and all((e["uid"], e["policy"]["size"]) == wanted for e in entries)
            and all(e["state"] == "Present" and "releaseAfter" not in e for e in entries)
            and self._counts()["ready"] + self._counts()["blocked"] == len(self._nodes)
        )

    def _pool(self) -> JsonObject:
        return pool_object(
            POOL, nodeSelector={LABEL: "true"}, release={"gracePeriodSeconds": self._grace_s}
        )

    def _patch_pool(self, spec: JsonObject) -> None:
        self._api.patch(f"{POOLS}/{POOL}", {"spec": spec}, content_type=MERGE_PATCH)

    def _label(self, name: str, value: str | None) -> None:
        patch = {"metadata": {"labels": {LABEL: value}}}
        self._api.patch(f"{NODES}/{name}", patch, content_type=MERGE_PATCH)

    def _lease(self, nodes: set[str]) -> None:
        """Have engines hold regions on exactly these nodes."""
        changed = self._agents.held ^ nodes
        self._agents.held = nodes
        self._agents.report(*sorted(changed))
        self._wait(lambda: self._counts()["leased"] == len(nodes), "leases did not show")

    def _lease_two_fifths(self) -> set[str]:
        leased = set(self._nodes[: max(len(self._nodes) * 2 // 5, 1)])
        self._lease(leased)
        return leased

    def _phase(self, node: str, entry: PoolEntry) -> Phase:
        """Say what an agent reports: a change takes a while, and waits for leases."""
        if entry.policy["size"] == "64Mi":
            return Phase.READY
        if node in self._agents.held:
            return Phase.BLOCKED
        since_s = self._resizing.setdefault(node, time.monotonic())
        return Phase.READY if time.monotonic() - since_s >= _RESIZE_S else Phase.RESIZING

    def _resize(self) -> None:
        """Have the agents report whose change is over."""
        now_s = time.monotonic()
        due = [
            name for name, since_s in list(self._resizing.items()) if now_s > since_s + _RESIZE_S
        ]
        waiting = [name for name in due if name in self._fleet.without_memory]
        if waiting:
            self._agents.report(*waiting)

    def _counts(self) -> JsonObject:
        status = self._api.get(f"{POOLS}/{POOL}").get("status") or {}
        return {name: status.get(name, 0) for name in ("ready", "updated", "blocked", "leased")}

    def _pool_shows(self) -> bool:
        reply = self._api.request("GET", f"{POOLS}/{POOL}")
        return reply.status == 200 and (reply.body.get("status") or {}).get("leaving", 0) > 0

    def _event_shows(self) -> bool:
        events = self._api.get(_EVENTS, fieldSelector="reason=ReleaseScheduled")["items"]
        return any(_time_of(event) >= self._began_at_s - 1.0 for event in events)

    def _metric(self, state: str) -> float:
        return self._operator.metric("hostprep_operator_pool_nodes", pool=POOL, state=state)

    def _pool_versions(self) -> list[str]:
        items = self._api.get(POOLS)["items"]
        return [f"{item['metadata']['uid']} {item['metadata']['generation']}" for item in items]


def _time_of(event: JsonObject) -> float:
    return parse_time(event.get("lastTimestamp") or event.get("eventTime")) or 0.0


def _first_refusal(printed: str) -> str:
    lines = [line.strip() for line in printed.splitlines() if "leased" in line or "lease" in line]
    return lines[0] if lines else printed.strip().splitlines()[-1]


def protect_pools(cluster: ControlPlane) -> None:
    """Apply the chart's policy against deleting pools that are in use, and wait until it acts."""
    rendered = cluster.helm(
        *("template", "hostprep", str(_CHART), "--namespace", _NAMESPACE, *IMAGE),
        *("--show-only", "templates/operator/deletionpolicy.yaml"),
    )
    cluster.kubectl("apply", "-f", "-", stdin=rendered)
    wait_for_deletion_protection(cluster.api, timeout_s=60)


def run_slips(cluster: ControlPlane, *, nodes: int, grace_s: int) -> Iterator[Slip]:
    """Yield what came of each slip, on a control plane that has nothing of ours yet."""
    apply_crds(cluster.api)
    cluster.api.create("/api/v1/namespaces", {"metadata": {"name": _NAMESPACE}})
    protect_pools(cluster)
    slips = Slips(cluster, nodes, grace_s)
    try:
        slips.prepare()
        yield from slips.run()
    finally:
        slips.close()


def _row(slip: Slip) -> tuple[str, ...]:
    seen = ", ".join(f"{name} {at_s:.1f} s" for name, at_s in slip.seen_s.items())
    return (
        slip.what,
        str(slip.touched),
        str(slip.lost),
        f"{slip.without_memory} of {slip.budget}",
        f"{slip.put_right_s:.0f} s",
        f"{slip.settled_s - slip.put_right_s:.1f} s",
        _cut(slip.answer) or seen,
    )


def _cut(text: str) -> str:
    """One line of a table, without the name of the policy; `-o json` has all of it."""
    text = re.sub(r": .* denied request: ", ": ", text, count=1)
    return text if len(text) <= _TOLD_CHARS else f"{text[: _TOLD_CHARS - 1].rstrip()}…"


_COLUMNS = (
    "SLIP",
    "NODES",
    "LOST",
    "UNAVAILABLE",
    "PUT RIGHT AFTER",
    "THEN AS BEFORE IN",
    "SEEN BY, OR TOLD",
)


def main() -> int:
    """Return 0 where nothing was lost."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.control_plane.slips", description=__doc__
    )
    parser.add_argument(
        "--nodes", type=int, default=500, help="at least 5; %(default)s, which takes some minutes"
    )
    parser.add_argument(
        "--grace",
        type=int,
        default=60,
        help="gracePeriodSeconds, at least 6; %(default)s, where pools have 600 by default",
    )
    parser.add_argument("-o", "--output", choices=("table", "json"), default="table")
    options = parser.parse_args()
    if options.nodes < 5 or options.grace < 6:
        parser.error("at least 5 nodes, and 6 seconds of grace")
    try:
        with ControlPlane() as cluster:
            slips = list(run_slips(cluster, nodes=options.nodes, grace_s=options.grace))
    except HostprepError as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return error.exit_code
    if options.output == "json":
        print(json.dumps([asdict(slip) for slip in slips], indent=2))
    else:
        title = f"{options.nodes} nodes, gracePeriodSeconds {options.grace}"
        print_table(title, _COLUMNS, [_row(slip) for slip in slips])
    return 0 if all(slip.is_harmless for slip in slips) else 1


if __name__ == "__main__":
    sys.exit(main())
