"""Rules, dashboard and metrics as their tests read them.

The list of metrics comes from the registries of agent and operator; the rest from the files in
observability/.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from prometheus_client import CollectorRegistry

import hostprep.agent.metrics
import hostprep_operator.metrics

ROOT = Path(__file__).resolve().parents[2]
RULES = ROOT / "observability/rules.yaml"
RULES_TEST = ROOT / "observability/rules_test.yaml"
DASHBOARD = ROOT / "observability/dashboard.json"
METRICS_PAGE = ROOT / "docs/metrics.md"
RUNBOOK = ROOT / "docs/runbooks/alerts.md"
VALUES = ROOT / "charts/hostprep/values.yaml"

AGENT_JOB = "hostprep-agent"
"""Value of the label `job` that the scrape configuration gives the agents."""
OPERATOR_JOB = "hostprep-operator"

_NAME = re.compile(r"(?<![\w:])hostprep_\w+(?![\w:])")
_HISTOGRAM_PART = re.compile(r"_(bucket|sum|count)$")


@dataclass(frozen=True, slots=True)
class Metric:
    """A metric family, under the name that a query uses (a counter's ends in `_total`)."""

    name: str
    kind: str
    labels: tuple[str, ...]


def _registered(registry: CollectorRegistry) -> Iterator[Metric]:
    for collector in registry._collector_to_names:
        kind = collector._type  # type: ignore[attr-defined]
        name = collector._name + ("_total" if kind == "counter" else "")  # type: ignore[attr-defined]
        yield Metric(name, kind, tuple(collector._labelnames))  # type: ignore[attr-defined]


AGENT_METRICS = frozenset(_registered(hostprep.agent.metrics.Metrics()._registry))
OPERATOR_METRICS = frozenset(_registered(hostprep_operator.metrics.Metrics().registry))
METRICS = AGENT_METRICS | OPERATOR_METRICS


def families_in(text: str) -> set[str]:
    """The metric families that an expression or a page names; recorded series have colons."""
    histograms = {metric.name for metric in METRICS if metric.kind == "histogram"}

    def family(name: str) -> str:
        whole = _HISTOGRAM_PART.sub("", name)
        return whole if whole in histograms else name

    return {family(name) for name in _NAME.findall(text)}


@functools.cache
def rules() -> list[dict[str, Any]]:
    """Every rule of every group."""
    groups = yaml.safe_load(RULES.read_text(encoding="utf-8"))["groups"]
    return [rule for group in groups for rule in group["rules"]]


def alerts() -> list[dict[str, Any]]:
    """Every alerting rule."""
    return [rule for rule in rules() if "alert" in rule]


@functools.cache
def rule_tests() -> list[dict[str, Any]]:
    """The tests of rules_test.yaml."""
    tests: list[dict[str, Any]] = yaml.safe_load(RULES_TEST.read_text(encoding="utf-8"))["tests"]
    return tests


def firing(test: dict[str, Any]) -> list[set[str]]:
    """The alerts that a test expects, by time of evaluation."""
    return [
        {name for sample in at["exp_samples"] for name in re.findall(r'="(\w+)"', sample["labels"])}
        for at in test["promql_expr_test"]
    ]


@functools.cache
def board() -> dict[str, Any]:
    """The dashboard."""
    document: dict[str, Any] = json.loads(DASHBOARD.read_text(encoding="utf-8"))
    return document


def panels() -> list[dict[str, Any]]:
    """The panels that show something: all but the headings of rows."""
    return [panel for panel in board()["panels"] if panel["type"] != "row"]


def queries() -> list[str]:
    """Every query of the dashboard's panels, with the dashboard's variables in it."""
    return [target["expr"] for panel in panels() for target in panel["targets"]]


def variable_queries() -> dict[str, str]:
    """The dashboard's variables that are looked up in Prometheus: name to query."""
    variables = board()["templating"]["list"]
    return {each["name"]: each["query"] for each in variables if each["type"] == "query"}


def without_variables(expr: str, *, rate_interval: str = "5m") -> str:
    """The expression as Grafana sends it with "All" chosen everywhere."""
    for name in variable_queries():
        expr = expr.replace(f"${name}", ".*")
    return expr.replace("$__rate_interval", rate_interval)
