"""Cases of the rules: troubles of one node, of its agent, and of the operator."""

from __future__ import annotations

from observability.scenarios import (
    QUIET,
    Expected,
    Scenario,
    Words,
    agent,
    one_alert,
    operator,
)

__all__ = ["PROCESS_CASES"]


def _phase(phase: str) -> str:
    return agent("hostprep_pool_phase", pool="kv", phase=phase)


def _gates(state: str) -> str:
    return agent("hostprep_gates", pool="kv", state=state)


_MEMORY = (
    Scenario(
        name="A pool that is too large for a node, tried again now and then",
        changed={
            _phase("Ready"): "1x9 0x290",
            _phase("Failed"): "0x9 1 1 0 1 1 0 1 1 0 1 1 0 1x276",
            _phase("Preparing"): "0x9 0 0 1 0 0 1 0 0 1 0 0 1 0x276",
            agent("hostprep_prepare_failures_total", pool="kv", reason="TooLarge"): "0x9 1+1x290",
        },
        expected=(Expected(18), Expected(22, ("HostprepPoolFailed",))),
        words=(
            Words(
                alert="HostprepPoolFailed",
                minute=22,
                labels={
                    "job": "hostprep-agent",
                    "instance": "n1:9808",
                    "node": "n1",
                    "pool": "kv",
                    "phase": "Failed",
                    "severity": "warning",
                },
                summary="Pool kv cannot be had on n1.",
                description="Pool kv has been Failed on node n1 for 10 minutes (most often: "
                "TooLarge). The message says what to change: `kubectl describe hmn n1`; what "
                "stands in the way on the node: `hostprep doctor`.",
            ),
        ),
    ),
    Scenario(
        name="One failure that the next attempt mends is no trouble",
        changed={_phase("Ready"): "1x9 0 1x289", _phase("Failed"): "0x9 1 0x289"},
        expected=(Expected(12), Expected(18), *QUIET),
    ),
    one_alert(
        "A pool that goes from pending to preparing and stays there",
        {
            _phase("Ready"): "1x9 0x290",
            _phase("Pending"): "0x9 1x5 0x284",
            _phase("Preparing"): "0x15 1x284",
        },
        silent_at=38,
        fires_at=41,
        alert="HostprepPoolStuckOnNode",
    ),
    Scenario(
        name="A damaged region that an engine holds",
        changed={
            agent(
                "hostprep_region_bytes", pool="kv", backing="HugeTLB2Mi", state="Damaged"
            ): "0x10 1073741824x289",
        },
        expected=(Expected(10), Expected(13, ("HostprepRegionDamaged",))),
    ),
    Scenario(
        name="A damaged region that is rebuilt at once is no trouble",
        changed={
            agent(
                "hostprep_region_bytes", pool="kv", backing="HugeTLB2Mi", state="Damaged"
            ): "0x10 1073741824 0x288",
        },
        expected=(Expected(11), Expected(12), *QUIET),
    ),
    Scenario(
        name="An engine whose rank failed to register, restarted an hour later",
        changed={
            _gates("Closed"): "0x8 1x1 0x290",
            _gates("Degraded"): "0x10 1x60 0x229",
            _gates("Open"): "0x75 1x224",
        },
        expected=(
            Expected(14),
            Expected(17, ("HostprepEngineDegraded",)),
            Expected(80),
        ),
    ),
    Scenario(
        name="An engine that is stopped before its gate opens is no trouble",
        changed={_gates("Closed"): "0x8 1x1 0x290", _gates("Degraded"): "0x10 1 0x288"},
        expected=(Expected(12), Expected(17), *QUIET),
    ),
    one_alert(
        "Somebody removes region files again and again",
        {agent("hostprep_verify_problems_total", pool="kv", reason="Missing"): "0x10 0+1x5 5x283"},
        silent_at=12,
        fires_at=24,
        alert="HostprepVerifyProblemsRepeat",
    ),
)

_AGENTS = (
    one_alert(
        "An agent that is down",
        {agent("up"): "1x9 0x290"},
        silent_at=24,
        fires_at=26,
        alert="HostprepAgentDown",
    ),
    one_alert(
        "Agents that are not scraped at all",
        {agent("up", node): "1x9" for node in ("n1", "n2", "n3")},
        silent_at=24,
        fires_at=32,
        alert="HostprepAgentsMissing",
    ),
    one_alert(
        "A worker that hangs: no round for long",
        {agent("hostprep_verify_last_timestamp_seconds"): "0+60x10 600x289"},
        silent_at=16,
        fires_at=19,
        alert="HostprepVerificationStale",
    ),
    Scenario(
        name="No rounds while a pool is prepared for twenty minutes",
        changed={
            agent("hostprep_verify_last_timestamp_seconds"): "0+60x10 600x20 1860+60x269",
            _phase("Ready"): "1x10 0x20 1x269",
            _phase("Preparing"): "0x10 1x20 0x269",
        },
        expected=(Expected(18), Expected(30), Expected(40)),
    ),
    one_alert(
        "An agent that lost the API server",
        {agent("hostprep_api_connected"): "1x9 0x290"},
        silent_at=19,
        fires_at=21,
        alert="HostprepAgentDisconnected",
    ),
    one_alert(
        "An agent whose status is refused",
        {agent("hostprep_status_writes_total", result="failed"): "0x9 0+2x290"},
        silent_at=19,
        fires_at=24,
        alert="HostprepStatusWritesFailing",
    ),
    one_alert(
        "A worker that dies again and again",
        {agent("hostprep_worker_restarts_total"): "0x10 1 2 3 4 5x286"},
        silent_at=11,
        fires_at=15,
        alert="HostprepWorkerRestarting",
    ),
)

_OPERATOR = (
    one_alert(
        "An operator that is down",
        {operator("up"): "1x9 0x290"},
        silent_at=14,
        fires_at=16,
        alert="HostprepOperatorDown",
    ),
    one_alert(
        "An operator that is not scraped",
        {operator("up"): "1x9"},
        silent_at=18,
        fires_at=22,
        alert="HostprepOperatorDown",
    ),
    one_alert(
        "An operator that nobody scrapes, in a cluster whose agents are not scraped either",
        {operator("up"): "", **{agent("up", node): "" for node in ("n1", "n2", "n3")}},
        silent_at=4,
        fires_at=6,
        alert="HostprepOperatorDown",
    ),
    one_alert(
        "Two replicas and no leader",
        {
            operator("hostprep_operator_leader"): "1x9 0x290",
            operator("hostprep_operator_leader", "op2:9809"): "0x300",
        },
        silent_at=14,
        fires_at=16,
        alert="HostprepOperatorNoLeader",
    ),
    one_alert(
        "An operator whose view grows old",
        {operator("hostprep_operator_last_sync_timestamp_seconds"): "0+60x10 600x289"},
        silent_at=36,
        fires_at=39,
        alert="HostprepOperatorNotSynced",
    ),
    Scenario(
        name="A replica that stands by has no view of its own",
        changed={
            operator("hostprep_operator_leader", "op2:9809"): "0x300",
            operator("hostprep_operator_last_sync_timestamp_seconds", "op2:9809"): "0x300",
        },
        expected=QUIET,
    ),
    one_alert(
        "A queue that is not worked off",
        {operator("hostprep_operator_queue_depth"): "0x9 200+10x290"},
        silent_at=21,
        fires_at=26,
        alert="HostprepOperatorQueueGrowing",
    ),
    Scenario(
        name="A queue that is long for a moment, as when thousands of nodes reboot",
        changed={operator("hostprep_operator_queue_depth"): "0x9 5000x3 0x286"},
        expected=(Expected(12), Expected(18), *QUIET),
    ),
    one_alert(
        "Reconciles that fail again and again",
        {
            operator(
                "hostprep_operator_reconcile_errors_total", kind="node", reason="Forbidden"
            ): "0x9 0+1x290"
        },
        silent_at=23,
        fires_at=28,
        alert="HostprepReconcileErrors",
    ),
    one_alert(
        "Two versions side by side for hours",
        {
            agent("hostprep_build_info", "n3", version="1.0", component="agent"): "1x9",
            agent("hostprep_build_info", "n3", version="1.1", component="agent"): "_x9 1x290",
        },
        silent_at=120,
        fires_at=135,
        alert="HostprepVersionSkew",
    ),
)

PROCESS_CASES = (*_MEMORY, *_AGENTS, *_OPERATOR)
