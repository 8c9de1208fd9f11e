"""Clusters in trouble and clusters in good health: the unit tests of the rules, for promtool.

Every scenario is a healthy cluster of three nodes and one pool with some series changed; it says
which alerts fire at which minute, and by that which do not.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import yaml

from observability.model import AGENT_JOB, OPERATOR_JOB, RUNBOOK_URL

__all__ = [
    "QUIET",
    "RULES_FROM_TESTS",
    "Expected",
    "Scenario",
    "Words",
    "agent",
    "one_alert",
    "operator",
    "rules_test_text",
]

MINUTES = 300
RULES_FROM_TESTS = "../../../charts/hostprep/files/rules/hostprep.yaml"
_NODES = ("n1", "n2", "n3")
_GIB = 1024**3
_PHASES = ("Pending", "Preparing", "Ready", "Resizing", "Degraded", "Failed", "Releasing")
_HEADER = """\
# Written by `python -m observability --write`: change observability/cases_*.py, not this file.
# promtool test rules rules_test.yaml
"""


@dataclass(frozen=True, slots=True)
class Expected:
    """Exactly these alerts fire at this minute."""

    minute: int
    firing: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Words:
    """What one firing alert says, word for word."""

    alert: str
    minute: int
    labels: Mapping[str, str]
    summary: str
    description: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """A healthy cluster but for `changed`: series to values in promtool's notation; "" removes."""

    name: str
    changed: Mapping[str, str] = field(default_factory=dict)
    expected: tuple[Expected, ...]
    words: tuple[Words, ...] = ()


QUIET = (Expected(20), Expected(60))
"""Nothing fires, neither early nor late."""


def one_alert(
    name: str, changed: Mapping[str, str], *, silent_at: int, fires_at: int, alert: str
) -> Scenario:
    """Return a scenario in which that alert alone fires, and not before its time."""
    return Scenario(
        name=name,
        changed=changed,
        expected=(Expected(silent_at), Expected(fires_at, (alert,))),
    )


def agent(metric: str, node: str = "n1", **labels: str) -> str:
    """Return the series of one agent."""
    return _series(metric, job=AGENT_JOB, instance=f"{node}:9808", node=node, **labels)


def operator(metric: str, instance: str = "op:9809", **labels: str) -> str:
    """Return the series of one replica of the operator."""
    return _series(metric, job=OPERATOR_JOB, instance=instance, **labels)


def _series(metric: str, **labels: str) -> str:
    return metric + "{" + ", ".join(f'{key}="{labels[key]}"' for key in sorted(labels)) + "}"


def rules_test_text(scenarios: tuple[Scenario, ...]) -> str:
    """Return the text of tests/unit/observability/rules_test.yaml."""
    document = {
        "rule_files": [RULES_FROM_TESTS],
        "evaluation_interval": "1m",
        "tests": [_test(scenario) for scenario in scenarios],
    }
    return _HEADER + yaml.safe_dump(document, sort_keys=False, width=100)


def _test(scenario: Scenario) -> dict[str, Any]:
    values = {**_healthy(), **scenario.changed}
    test: dict[str, Any] = {
        "name": scenario.name,
        "interval": "1m",
        "input_series": [
            {"series": series, "values": text} for series, text in values.items() if text
        ],
        "promql_expr_test": [_firing(expected) for expected in scenario.expected],
    }
    if scenario.words:
        test["alert_rule_test"] = [_said(words) for words in scenario.words]
    return test


def _firing(expected: Expected) -> dict[str, Any]:
    return {
        "expr": 'group by (alertname) (ALERTS{alertstate="firing"})',
        "eval_time": f"{expected.minute}m",
        "exp_samples": [
            {"labels": f'{{alertname="{name}"}}', "value": 1} for name in expected.firing
        ],
    }


def _said(words: Words) -> dict[str, Any]:
    return {
        "alertname": words.alert,
        "eval_time": f"{words.minute}m",
        "exp_alerts": [
            {
                "exp_labels": dict(words.labels),
                "exp_annotations": {
                    "summary": words.summary,
                    "description": words.description,
                    "runbook_url": f"{RUNBOOK_URL}#{words.alert.lower()}",
                },
            }
        ],
    }


def _steady(value: float) -> str:
    return f"{value:g}x{MINUTES}"


def _healthy() -> dict[str, str]:
    values: dict[str, str] = {}
    for node in _NODES:
        values |= _healthy_agent(node)
    return values | _healthy_operator()


def _healthy_agent(node: str) -> dict[str, str]:
    now = f"0+60x{MINUTES}"
    phases = {
        agent("hostprep_pool_phase", node, pool="kv", phase=phase): _steady(phase == "Ready")
        for phase in _PHASES
    }
    return phases | {
        agent("up", node): _steady(1),
        agent("hostprep_build_info", node, version="1.0", component="agent"): _steady(1),
        agent("hostprep_pool_wanted_bytes", node, pool="kv"): f"{4 * _GIB}x{MINUTES}",
        agent("hostprep_pool_ready_bytes", node, pool="kv"): f"{4 * _GIB}x{MINUTES}",
        agent(
            "hostprep_region_bytes", node, pool="kv", backing="HugeTLB2Mi", state="Free"
        ): f"{4 * _GIB}x{MINUTES}",
        agent("hostprep_verify_last_timestamp_seconds", node): now,
        agent("hostprep_worker_restarts_total", node): _steady(0),
        agent("hostprep_status_writes_total", node, result="written"): _steady(5),
        agent("hostprep_status_writes_total", node, result="unchanged"): f"0+12x{MINUTES}",
        agent("hostprep_api_connected", node): _steady(1),
    }


def _healthy_operator() -> dict[str, str]:
    every_ten_minutes = " ".join(f"{60 * minute}x9" for minute in range(0, MINUTES, 10))
    counts = {"selected": 3, "ready": 3}
    others = ("preparing", "degraded", "failed", "releasing", "unavailable")
    pool_nodes = {
        operator("hostprep_operator_pool_nodes", pool="kv", state=state): _steady(count)
        for state, count in (counts | dict.fromkeys(others, 0)).items()
    }
    nodes = {
        operator("hostprep_operator_nodes", state=state): _steady(count)
        for state, count in {"ready": 3, "closed": 0, "unknown": 0}.items()
    }
    return (
        pool_nodes
        | nodes
        | {
            operator("up"): _steady(1),
            operator("hostprep_build_info", version="1.0", component="operator"): _steady(1),
            operator("hostprep_operator_openings_total"): _steady(3),
            operator("hostprep_operator_deadlines_exceeded_total"): _steady(0),
            operator("hostprep_operator_reboots_detected_total"): _steady(0),
            operator("hostprep_operator_oldest_closed_seconds"): _steady(0),
            operator("hostprep_operator_queue_depth"): _steady(0),
            operator("hostprep_operator_leader"): _steady(1),
            operator("hostprep_operator_last_sync_timestamp_seconds"): every_ten_minutes,
        }
    )
