"""Where the time goes between the start of an agent and the opening of its node.

    python -m benchmarks.node_start          # in a virtual machine: a real kubelet, emulated
    python -m benchmarks.node_start --here   # agent and operator on this machine, natively

Under emulation only the shares mean anything; without it there is no kubelet. Both need root.
"""

from __future__ import annotations

import argparse
import datetime as dt
import json
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hostprep.console import print_table
from testbed.agent_process import AgentProcess
from testbed.chart import NAMESPACE, apply_crds, install_chart, scale_operator
from testbed.control_plane import ControlPlane
from testbed.machine import clean_node, machine_lock
from testbed.node import NODE, NodeSettings, build_node_parts
from testbed.node_scene import KV, POOL_LABEL, apply, condition, is_tainted
from testbed.nodes import create_node, this_machine
from testbed.operator_process import HMNS, OperatorProcess
from testbed.processes import wait_for

JsonObject = dict[str, Any]
_PATIENCE_S = 600.0


@dataclass(frozen=True, slots=True)
class Instants:
    """Seconds of the wall clock at which each part was over, and what the agent says of its own."""

    asked_s: float
    """The agent's Pod was created; without kubelet, its process."""
    started_s: float
    """Its container runs."""
    running_s: float
    """The agent has read its modules and logged `started`."""
    ready_s: float
    """The HostMemoryNode says Ready."""
    opened_s: float
    """Taint gone, condition True."""
    steps: tuple[tuple[str, float], ...]
    """The agent's own account of the preparation: name and seconds."""

    def parts(self) -> list[tuple[str, float]]:
        """Every part's name and seconds, in order of time."""
        working_s = sum(seconds for _, seconds in self.steps)
        return [
            ("kubelet and containerd", self.started_s - self.asked_s),
            ("Python and modules", self.running_s - self.started_s),
            *((f"preparing: {name}", seconds) for name, seconds in self.steps),
            ("the agent's rest: API, plan, report", self.ready_s - self.running_s - working_s),
            ("operator: open the node", self.opened_s - self.ready_s),
        ]

    def ours_s(self) -> float:
        """Everything from the container's start on but populating."""
        return self.opened_s - self.started_s - dict(self.steps).get("Populate", 0.0)


def main() -> int:
    """Measure once and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--here", action="store_true", help="natively, without a kubelet")
    parser.add_argument("--size", default="4Gi", help="of the pool, with --here")
    parser.add_argument("-o", "--output", choices=("table", "json"), default="table")
    options = parser.parse_args()
    instants = _here(options.size) if options.here else _in_a_virtual_machine()
    parts = instants.parts()
    total_s = instants.opened_s - instants.asked_s
    if options.output == "json":
        document = {"total_s": total_s, "ours_s": instants.ours_s(), "parts_s": dict(parts)}
        print(json.dumps(document, indent=2))
    else:
        rows = [(name, f"{seconds:.2f} s", f"{seconds / total_s:.0%}") for name, seconds in parts]
        rows.append(("all", f"{total_s:.2f} s", ""))
        rows.append(("of it ours, without populating", f"{instants.ours_s():.2f} s", ""))
        print_table("", ("PART", "TIME", "SHARE"), rows)
    return 0


def _in_a_virtual_machine() -> Instants:
    parts = build_node_parts(lambda line: print(line, file=sys.stderr))
    with ControlPlane(controllers=True, scheduler=True) as cluster:
        settings = NodeSettings(labels={POOL_LABEL: "true"})
        with parts.node(cluster, settings=settings) as node:
            node.wait_ready()
            install_chart(cluster)
            scale_operator(cluster, 0)
            with _operator(cluster, f"--namespace={NAMESPACE}"):
                apply(cluster, KV)
                ready_s, opened_s = _watch(cluster)
            pod = _agent_pod(cluster)
            log = cluster.kubectl("-n", NAMESPACE, "logs", pod["metadata"]["name"])
            state = pod["status"]["containerStatuses"][0]["state"]["running"]
            return Instants(
                _seconds(pod["metadata"]["creationTimestamp"]),
                _seconds(state["startedAt"]),
                _running(log.splitlines()),
                ready_s,
                opened_s,
                _steps(cluster),
            )


def _here(size: str) -> Instants:
    with machine_lock(), clean_node() as node, ControlPlane(controllers=True) as cluster:
        apply_crds(cluster.api)
        create_node(cluster.api, this_machine(NODE, labels={POOL_LABEL: "true"}))
        spec = {**KV["spec"], "size": size}
        with _operator(cluster, "--agent-liveness=off"), tempfile.TemporaryDirectory() as folder:
            apply(cluster, {**KV, "spec": spec})
            wait_for(lambda: cluster.api.exists(f"{HMNS}/{NODE}"), 30)
            asked_s = time.time()
            agent = AgentProcess(
                NODE, node.root, Path(folder, "state"), cluster.kubeconfig, interval_s=5
            )
            try:
                ready_s, opened_s = _watch(cluster)
                running_s = _running([json.dumps(line) for line in agent.log()])
                steps = _steps(cluster)
                return Instants(asked_s, asked_s, running_s, ready_s, opened_s, steps)
            finally:
                agent.close()


@contextmanager
def _operator(cluster: ControlPlane, *options: str) -> Iterator[None]:
    running = OperatorProcess(cluster, *options)
    try:
        if "--agent-liveness=off" in options:
            running.wait_ready(60)
        yield
    finally:
        running.child.stop()


def _watch(cluster: ControlPlane) -> tuple[float, float]:
    """Return when the memory was ready and when the node was open, to some 20 ms."""

    def is_ready() -> bool:
        status = cluster.api.get(f"{HMNS}/{NODE}").get("status", {})
        found = {c["type"]: c["status"] for c in status.get("conditions", ())}
        return found.get("Ready") == "True"

    wait_for(is_ready, _PATIENCE_S, every_s=0.01)
    ready_s = time.time()
    wait_for(
        lambda: condition(cluster).get("status") == "True" and not is_tainted(cluster),
        _PATIENCE_S,
        every_s=0.01,
    )
    return ready_s, time.time()


def _steps(cluster: ControlPlane) -> tuple[tuple[str, float], ...]:
    (pool,) = cluster.api.get(f"{HMNS}/{NODE}")["status"]["pools"]
    return tuple((step["name"], float(step["seconds"])) for step in pool.get("steps", ()))


def _agent_pod(cluster: ControlPlane) -> JsonObject:
    pods = cluster.api.get(f"/api/v1/namespaces/{NAMESPACE}/pods")["items"]
    found: JsonObject = next(pod for pod in pods if "-agent-" in pod["metadata"]["name"])
    return found


def _running(lines: list[str]) -> float:
    said = next(line for line in map(json.loads, lines) if line["event"] == "started")
    return _seconds(said["timestamp"])


def _seconds(text: str) -> float:
    return dt.datetime.fromisoformat(text).timestamp()


if __name__ == "__main__":
    raise SystemExit(main())
