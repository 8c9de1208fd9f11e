"""Alerts about one node each, from its agent's view."""

from __future__ import annotations

from observability.model import AGENT_JOB, Alert, Group, Record

__all__ = ["AGENTS", "MEMORY"]

_NODE = "{{ or $labels.node $labels.instance }}"
_LOGS = (
    "`kubectl logs -n NAMESPACE AGENT_POD` (the pod: `kubectl get pods -A -o wide "
    f"--field-selector spec.nodeName={_NODE} -l app.kubernetes.io/component=agent`)"
)

_RECORDED = (
    Record(
        name="cluster_pool:hostprep_wanted_bytes:sum",
        expr="sum by (cluster, pool) (hostprep_pool_wanted_bytes)",
    ),
    Record(
        name="cluster_pool:hostprep_ready_bytes:sum",
        expr="sum by (cluster, pool) (hostprep_pool_ready_bytes)",
    ),
    Record(
        name="cluster_pool_state:hostprep_region_bytes:sum",
        expr="sum by (cluster, pool, state) (hostprep_region_bytes)",
    ),
)

_REASON = (
    '{{ with printf "topk(1, last_over_time(hostprep_prepare_failures_total'
    "{instance='%s',pool='%s'}[1h]))\" $labels.instance $labels.pool | query }}"
    ' (most often: {{ . | first | label "reason" }}){{ end }}'
)

MEMORY = Group(
    "hostprep.memory",
    (
        *_RECORDED,
        Alert(
            name="HostprepPoolFailed",
            # A failed pool is tried again: between two failures it is Preparing for a while.
            expr='max_over_time(hostprep_pool_phase{phase="Failed"}[5m]) == 1',
            hold="10m",
            severity="warning",
            summary=f"Pool {{{{ $labels.pool }}}} cannot be had on {_NODE}.",
            description=f"Pool {{{{ $labels.pool }}}} has been Failed on node {_NODE} for 10 "
            f"minutes{_REASON}. The message says what to change: `kubectl describe hmn {_NODE}`; "
            "what stands in the way on the node: `hostprep doctor`.",
        ),
        Alert(
            name="HostprepPoolStuckOnNode",
            expr="max without (phase) "
            '(hostprep_pool_phase{phase=~"Pending|Preparing|Degraded"}) == 1',
            hold="30m",
            severity="warning",
            summary=f"Pool {{{{ $labels.pool }}}} makes no headway on {_NODE}.",
            description=f"Pool {{{{ $labels.pool }}}} has been Pending, Preparing or Degraded on "
            f"node {_NODE} for 30 minutes. A degraded pool may wait for an engine to give a "
            f"damaged region back: `kubectl describe hmn {_NODE}` says which; else see {_LOGS}.",
        ),
        Alert(
            name="HostprepRegionDamaged",
            expr='sum without (backing, state) (hostprep_region_bytes{state="Damaged"}) > 0',
            hold="1m",
            severity="warning",
            summary=f"Damaged memory in pool {{{{ $labels.pool }}}} on {_NODE}.",
            description="{{ $value | humanize1024 }}B of pool {{ $labels.pool }} on node "
            f"{_NODE} are damaged and still held by an engine; they are rebuilt once it lets go. "
            "Restart that engine when it suits, and look for memory errors (EDAC, mcelog): "
            "several are a reason to replace the machine.",
        ),
        Alert(
            name="HostprepEngineDegraded",
            expr='hostprep_gates{state="Degraded"} > 0',
            hold="5m",
            severity="warning",
            summary=f"Engines on {_NODE} serve without the host tier.",
            description="The gates of {{ $value }} engines in pool {{ $labels.pool }} on node "
            f"{_NODE} have been Degraded for 5 minutes: they serve from GPU memory alone until "
            "they are restarted. Which, and why: `hostprep status` in the agent's pod there.",
        ),
        Alert(
            name="HostprepVerifyProblemsRepeat",
            expr="sum without (reason) (increase(hostprep_verify_problems_total[1h])) >= 3",
            hold="5m",
            severity="warning",
            summary=f"Regions of pool {{{{ $labels.pool }}}} keep changing on {_NODE}.",
            description='Verification found {{ $value | printf "%.0f" }} problems in pool '
            f"{{{{ $labels.pool }}}} on node {_NODE} within an hour. They are repaired, but "
            "something else removes or shrinks region files, or the machine's memory is failing: "
            f"reasons are in the label `reason` of hostprep_verify_problems_total and in {_LOGS}.",
        ),
    ),
)

_STALE = """\
time() - (hostprep_verify_last_timestamp_seconds > 0) > 120
unless on (job, instance)
  hostprep_pool_phase{phase=~"Preparing|Resizing|Releasing"} == 1"""

_MISSING = f"""\
max by (cluster) (hostprep_operator_pool_nodes{{state="selected"}}) > 0
unless on (cluster)
  up{{job="{AGENT_JOB}"}}"""

AGENTS = Group(
    "hostprep.agents",
    (
        Alert(
            name="HostprepAgentDown",
            expr=f'up{{job="{AGENT_JOB}"}} == 0',
            hold="15m",
            severity="warning",
            summary=f"The agent of {_NODE} does not answer.",
            description=f"Prometheus has not reached the agent of node {_NODE} for 15 minutes. "
            "Prepared memory stays, engines can attach; nothing is verified or repaired there. "
            "See whether the pod runs: `kubectl get pods -A -o wide "
            f"--field-selector spec.nodeName={_NODE} -l app.kubernetes.io/component=agent`.",
        ),
        Alert(
            name="HostprepAgentsMissing",
            expr=_MISSING,
            hold="15m",
            severity="critical",
            summary="No agent is scraped at all.",
            description="Pools select {{ $value }} nodes, and Prometheus has had no target of job "
            f"{AGENT_JOB} for 15 minutes: the DaemonSet is gone, or its PodMonitor is not "
            "selected. See `kubectl get daemonset,podmonitor -A "
            "-l app.kubernetes.io/name=hostprep`.",
        ),
        Alert(
            name="HostprepVerificationStale",
            expr=_STALE,
            hold="5m",
            severity="warning",
            summary=f"Host memory of {_NODE} is no longer verified.",
            description=f"The last verification round on node {_NODE} was "
            "{{ $value | humanizeDuration }} ago, instead of seconds. A region that is gone or "
            f"damaged would not be noticed. The worker may hang in the kernel: {_LOGS}.",
        ),
        Alert(
            name="HostprepAgentDisconnected",
            expr="hostprep_api_connected == 0",
            hold="10m",
            severity="warning",
            summary=f"The agent of {_NODE} has lost the API server.",
            description=f"The agent of node {_NODE} has not reached the API server for 10 "
            "minutes. It keeps what it was last told; changes and status do not pass. Check the "
            f"node's network, network policies and the agent's token: {_LOGS}.",
        ),
        Alert(
            name="HostprepStatusWritesFailing",
            expr='increase(hostprep_status_writes_total{result="failed"}[5m]) > 0',
            hold="10m",
            severity="warning",
            summary=f"The agent of {_NODE} cannot write its status.",
            description=f"Writes of HostMemoryNode {_NODE} have failed for 10 minutes "
            '({{ $value | printf "%.0f" }} in the last 5), so the node may stay closed with its '
            "memory ready. Refusals name the rule (role or ValidatingAdmissionPolicy) in the "
            f"agent's log: {_LOGS}.",
        ),
        Alert(
            name="HostprepWorkerRestarting",
            expr="increase(hostprep_worker_restarts_total[1h]) >= 3",
            hold="0m",
            severity="warning",
            summary=f"The agent's worker on {_NODE} keeps dying.",
            description='The worker process ended {{ $value | printf "%.0f" }} times within an '
            f"hour on node {_NODE}. Each new one adopts what is there, so no memory is lost, but "
            "preparing may never end. Look for the kernel's OOM killer and bus errors in `dmesg`, "
            f"and at {_LOGS}.",
        ),
    ),
)
