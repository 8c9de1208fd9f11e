"""Cases of the rules: clusters in good health, and troubles that the operator sees."""

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

__all__ = ["CLUSTER_CASES"]


def _nodes(state: str) -> str:
    return operator("hostprep_operator_pool_nodes", pool="kv", state=state)


def _phase(phase: str) -> str:
    return agent("hostprep_pool_phase", pool="kv", phase=phase)


_HEALTHY = (
    Scenario(name="A healthy cluster is silent", expected=(*QUIET, Expected(290))),
    Scenario(
        name="Nodes that come and go all the time are no trouble",
        changed={
            _nodes("selected"): "5x300",
            _nodes("preparing"): "2x300",
            operator("hostprep_operator_openings_total"): "3+1x300",
            operator("hostprep_operator_oldest_closed_seconds"): "120x300",
        },
        expected=QUIET,
    ),
    Scenario(
        name="A roll-out of the operating system, a node at a time, is no storm",
        changed={
            operator("hostprep_operator_reboots_detected_total"): "0 0 0 0 1x4 2x4 3x4 4x300",
            agent("up"): "1x9 0x9 1x281",
        },
        expected=QUIET,
    ),
    Scenario(
        name="A big pool that is first prepared for ten minutes is no trouble",
        changed={
            _nodes("ready"): "0x10 3x290",
            _nodes("preparing"): "3x10 0x290",
            operator("hostprep_operator_openings_total"): "0x10 3x290",
            operator("hostprep_operator_oldest_closed_seconds"): "0+60x10 0x289",
            _phase("Ready"): "0x10 1x290",
            _phase("Preparing"): "1x10 0x290",
            agent("hostprep_verify_last_timestamp_seconds"): "0x10 660+60x289",
        },
        expected=(Expected(5), Expected(12), *QUIET),
    ),
    Scenario(
        name="An outage of the API server of three minutes is no trouble",
        changed={
            agent("hostprep_api_connected"): "1x10 0x2 1x287",
            agent("hostprep_status_writes_total", result="failed"): "0x10 1 2 3 3x287",
            operator(
                "hostprep_operator_reconcile_errors_total", kind="node", reason="Timeout"
            ): "0x10 5 10 15 15x287",
        },
        expected=(Expected(12), Expected(16), *QUIET),
    ),
    Scenario(
        name="The operator's restart within two minutes is no trouble",
        changed={
            operator("up"): "1x10 0x1 1x288",
            operator("hostprep_operator_openings_total"): "3x10 _x2 0x287",
            operator("hostprep_operator_leader"): "1x10 _x2 0 1x286",
            operator("hostprep_operator_last_sync_timestamp_seconds"): "0+60x10 _x2 840+60x287",
        },
        expected=(Expected(12), Expected(16), *QUIET),
    ),
    Scenario(
        name="A pool without nodes, as with scaling from zero, is no trouble",
        changed={
            _nodes("selected"): "0x300",
            _nodes("ready"): "0x300",
            operator("hostprep_operator_nodes", state="ready"): "0x300",
        },
        expected=QUIET,
    ),
    Scenario(
        name="A node that no pool selects has verified nothing, and is no trouble",
        changed={agent("hostprep_verify_last_timestamp_seconds"): "0x300"},
        expected=QUIET,
    ),
)

_POOLS = (
    Scenario(
        name="A failed node: the pool is not where it should be, even while others are opened",
        changed={
            _nodes("ready"): "3x9 2x290",
            _nodes("failed"): "0x9 1x290",
            operator("hostprep_operator_openings_total"): "3+1x300",
        },
        expected=(Expected(24), Expected(26, ("HostprepPoolNotReady",))),
        words=(
            Words(
                alert="HostprepPoolNotReady",
                minute=26,
                labels={"pool": "kv", "severity": "warning"},
                summary="Pool kv is not where it should be.",
                description="1 of the 3 nodes that pool kv selects have not had it ready for 15 "
                "minutes; engines there find no prepared memory. See which and why: `kubectl get "
                "hmn`, then `kubectl describe hmn NODE`.",
            ),
        ),
    ),
    one_alert(
        "A node that is being prepared and never gets there",
        {_nodes("ready"): "3x9 2x290", _nodes("preparing"): "0x9 1x290"},
        silent_at=24,
        fires_at=26,
        alert="HostprepPoolNotReady",
    ),
    Scenario(
        name="A pool that is ready nowhere",
        changed={_nodes("ready"): "3x9 0x290", _nodes("degraded"): "0x9 3x290"},
        expected=(
            Expected(24),
            Expected(26, ("HostprepPoolNotReady", "HostprepPoolNowhereReady")),
        ),
    ),
)

_NODES = (
    one_alert(
        "A taint that is stuck",
        {operator("hostprep_operator_oldest_closed_seconds"): "0x9 0+60x290"},
        silent_at=26,
        fires_at=29,
        alert="HostprepNodeClosedTooLong",
    ),
    Scenario(
        name="A node that misses its deadline, once",
        changed={operator("hostprep_operator_deadlines_exceeded_total"): "0x10 1x289"},
        expected=(Expected(10), Expected(12, ("HostprepDeadlineExceeded",)), Expected(45)),
    ),
    one_alert(
        "A node whose agent says nothing",
        {
            operator("hostprep_operator_nodes", state="ready"): "3x9 2x290",
            operator("hostprep_operator_nodes", state="unknown"): "0x9 1x290",
        },
        silent_at=24,
        fires_at=26,
        alert="HostprepNodesUnknown",
    ),
    Scenario(
        name="A hundred of a thousand nodes reboot at once",
        changed={
            operator("hostprep_operator_nodes", state="ready"): "1000x300",
            operator("hostprep_operator_reboots_detected_total"): "0x10 100x289",
        },
        expected=(Expected(10), Expected(12, ("HostprepRebootStorm",)), Expected(30)),
    ),
    Scenario(
        name="Ten of a thousand nodes reboot: no storm",
        changed={
            operator("hostprep_operator_nodes", state="ready"): "1000x300",
            operator("hostprep_operator_reboots_detected_total"): "0x10 10x289",
        },
        expected=(Expected(12), *QUIET),
    ),
)

CLUSTER_CASES = (*_HEALTHY, *_POOLS, *_NODES)
