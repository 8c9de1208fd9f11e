"""What an agent costs while there is nothing to do: memory without shared pages, and CPU.

    python -m benchmarks.agent_idle [--seconds 60] [--interval 5] [--pools 1]

A real API server, a real agent with small real pools; root, for their huge pages.
"""

from __future__ import annotations

import argparse
import os
import re
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from testbed.agent_process import AgentProcess
from testbed.chart import apply_crds
from testbed.control_plane import ControlPlane
from testbed.machine import clean_node, machine_lock
from testbed.processes import wait_for

_LIMIT_MIB = 130.0
_LIMIT_CORE = 0.01
_HMNS = "/apis/hostprep.dev/v1alpha1/hostmemorynodes"
_NODE = "idle"


@dataclass(frozen=True, slots=True)
class Cost:
    """Of one process. Bytes: its part of what it shares, shared memory left out."""

    own_bytes: int
    rss_bytes: int
    cpu_s: float


def cost_of(pid: int) -> Cost:
    """Return what a process takes, from /proc/PID/smaps_rollup and /proc/PID/stat (proc(5))."""
    text = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii")
    kib = {name: int(size) for name, size in re.findall(r"^(\w+): +(\d+) kB", text, re.MULTILINE)}
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    ticks = int(fields[11]) + int(fields[12])
    return Cost(
        own_bytes=(kib["Pss"] - kib.get("Pss_Shmem", 0)) * 1024,
        rss_bytes=kib["Rss"] * 1024,
        cpu_s=ticks / os.sysconf("SC_CLK_TCK"),
    )


def main() -> int:
    """Measure and print. Returns 1 where a limit is passed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--interval", type=float, default=5.0)
    parser.add_argument("--pools", type=int, default=1)
    options = parser.parse_args()
    with machine_lock(), clean_node() as node, ControlPlane() as cluster:
        apply_crds(cluster.api)
        names = [f"pool-{number}" for number in range(options.pools)]
        cluster.api.create(_HMNS, _object(names))
        with tempfile.TemporaryDirectory() as folder:
            state = Path(folder, "state")
            agent = AgentProcess(
                _NODE, node.root, state, cluster.kubeconfig, interval_s=options.interval
            )
            try:
                wait_for(lambda: _is_ready(cluster), 60)
                return _measure(agent, options.seconds)
            finally:
                agent.close()


def _measure(agent: AgentProcess, seconds: float) -> int:
    time.sleep(10)  # start-up is over, and garbage with it
    pids = {"agent": agent.pid, "worker": agent.worker_pid}
    before = {name: cost_of(pid) for name, pid in pids.items()}
    writes = agent.metric("hostprep_status_writes_total", result="written")
    time.sleep(seconds)
    after = {name: cost_of(pid) for name, pid in pids.items()}
    cores = 0.0
    for name in pids:
        core = (after[name].cpu_s - before[name].cpu_s) / seconds
        cores += core
        own, rss = after[name].own_bytes / (1 << 20), after[name].rss_bytes / (1 << 20)
        print(f"{name:8} {own:6.1f} MiB own  {rss:6.1f} MiB RSS  {100 * core:5.2f} % of a core")
    own = sum(cost.own_bytes for cost in after.values()) / (1 << 20)
    rss = sum(cost.rss_bytes for cost in after.values()) / (1 << 20)
    print(f"{'together':8} {own:6.1f} MiB own  {rss:6.1f} MiB RSS  {100 * cores:5.2f} % of a core")
    written = agent.metric("hostprep_status_writes_total", result="written") - writes
    print(f"status writes meanwhile: {written:.0f}")
    return 0 if rss <= _LIMIT_MIB and cores < _LIMIT_CORE and not written else 1


def _object(names: list[str]) -> dict[str, object]:
    policy = {"size": "32Mi", "backings": ["HugeTLB2Mi"], "regions": 2}
    pools = [{"name": name, "state": "Present", "policy": policy} for name in names]
    return {
        "apiVersion": "hostprep.dev/v1alpha1",
        "kind": "HostMemoryNode",
        "metadata": {"name": _NODE},
        "spec": {"pools": pools},
    }


def _is_ready(cluster: ControlPlane) -> bool:
    status = cluster.api.get(f"{_HMNS}/{_NODE}").get("status", {})
    conditions = {c["type"]: c["status"] for c in status.get("conditions", [])}
    return conditions.get("Ready") == "True"


if __name__ == "__main__":
    raise SystemExit(main())
