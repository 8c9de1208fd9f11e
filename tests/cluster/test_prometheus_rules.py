"""What promtool says of rules and dashboard: they parse, fire when they should, and are silent."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.cluster.charts import MONITORING, render, render_error
from tests.cluster.prometheus import promtool
from tests.support.observability import (
    AGENT_JOB,
    DASHBOARD,
    OPERATOR_JOB,
    RULES,
    RULES_TEST,
    alerts,
    firing,
    queries,
    without_variables,
)

pytestmark = pytest.mark.cluster

_NEVER = "vector(0) > 1"


def test_prometheus_accepts_the_rules() -> None:
    done = promtool("check", "rules", "--lint=all", "--lint-fatal", str(RULES))
    assert done.returncode == 0, done.stdout + done.stderr


def test_each_alert_fires_for_its_fault_alone_and_a_healthy_cluster_is_silent() -> None:
    done = promtool("test", "rules", str(RULES_TEST))
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_query_of_the_dashboard_parses(tmp_path: Path) -> None:
    rules = [
        {"record": f"parsed:query_{number}:value", "expr": without_variables(expr)}
        for number, expr in enumerate(queries())
    ]
    path = tmp_path / "queries.yaml"
    path.write_text(yaml.safe_dump({"groups": [{"name": "queries", "rules": rules}]}))
    done = promtool("check", "rules", str(path))
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("name", [alert["alert"] for alert in alerts()])
def test_an_alert_that_never_fires_fails_its_case(name: str, tmp_path: Path) -> None:
    document = yaml.safe_load(RULES.read_text(encoding="utf-8"))
    for group in document["groups"]:
        for rule in group["rules"]:
            if rule.get("alert") == name:
                rule["expr"] = _NEVER
    (tmp_path / RULES.name).write_text(yaml.safe_dump(document))
    cases = yaml.safe_load(RULES_TEST.read_text(encoding="utf-8"))
    cases["tests"] = [
        test for test in cases["tests"] if any(name in names for names in firing(test))
    ]
    (tmp_path / RULES_TEST.name).write_text(yaml.safe_dump(cases))
    done = promtool("test", "rules", RULES_TEST.name, cwd=tmp_path)
    assert done.returncode == 1
    assert name in done.stdout + done.stderr


def test_the_chart_carries_rules_and_dashboard_unchanged() -> None:
    objects = {item["kind"]: item for item in render(*MONITORING)}
    rules = yaml.safe_load(RULES.read_text(encoding="utf-8"))
    assert objects["PrometheusRule"]["spec"]["groups"] == rules["groups"]
    assert DASHBOARD.read_text(encoding="utf-8") in objects["ConfigMap"]["data"].values()


def _rules_with(tmp_path: Path, values: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The chart's rules with values under prometheusRule, by name; promtool accepts them."""
    path = tmp_path / "values.yaml"
    path.write_text(yaml.safe_dump({"prometheusRule": values}))
    objects = {item["kind"]: item for item in render(*MONITORING, "--values", str(path))}
    groups = objects["PrometheusRule"]["spec"]["groups"]
    rule_file = tmp_path / RULES.name
    rule_file.write_text(yaml.safe_dump({"groups": groups}))
    done = promtool("check", "rules", "--lint=all", "--lint-fatal", str(rule_file))
    assert done.returncode == 0, done.stdout + done.stderr
    rules = [rule for group in groups for rule in group["rules"]]
    return {rule.get("alert") or rule["record"]: rule for rule in rules}


def test_values_of_the_chart_change_thresholds_and_single_alerts(tmp_path: Path) -> None:
    changed = _rules_with(
        tmp_path,
        {
            "thresholds": {"nodeShare": 0.25, "blockedSeconds": 604800},
            "alerts": {
                "HostprepNodesBlocked": {"enabled": False},
                "HostprepRebootStorm": {"severity": "page", "for": "5m"},
            },
        },
    )
    assert changed["hostprep_threshold:node_share"]["expr"] == "vector(0.25)"
    assert changed["hostprep_threshold:blocked_seconds"]["expr"] == "vector(604800)"
    assert changed["hostprep_threshold:single_nodes"]["expr"] == "vector(1)"
    storm = changed["HostprepRebootStorm"]
    assert (storm["for"], storm["labels"]["severity"]) == ("5m", "page")
    names = {alert["alert"] for alert in alerts()}
    assert names - set(changed) == {"HostprepNodesBlocked"}


def test_a_share_that_the_chart_raises_silences_the_alert_that_it_is_about(tmp_path: Path) -> None:
    _rules_with(tmp_path, {"thresholds": {"nodeShare": 0.5, "smallFleetNodes": 0}})
    cases = yaml.safe_load(RULES_TEST.read_text(encoding="utf-8"))
    cases["tests"] = [
        test
        for test in cases["tests"]
        if any("HostprepNodesFailed" in names for names in firing(test))
    ]
    for test in cases["tests"]:
        test.pop("alert_rule_test", None)
        for at in test["promql_expr_test"]:
            at["exp_samples"] = []
    (tmp_path / RULES_TEST.name).write_text(yaml.safe_dump(cases))
    done = promtool("test", "rules", RULES_TEST.name, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_misspelt_alert_in_the_values_is_refused_and_the_message_lists_the_names() -> None:
    error = render_error(
        *MONITORING, "--set", "prometheusRule.alerts.HostprepNodesBlocket.enabled=false"
    )
    assert "prometheusRule.alerts.HostprepNodesBlocket: there is no such alert" in error
    assert "HostprepNodesBlocked" in error


def test_the_charts_monitors_give_the_labels_that_rules_and_dashboard_expect() -> None:
    monitors = [item for item in render(*MONITORING) if item["kind"] == "PodMonitor"]
    jobs = {}
    for monitor in monitors:
        (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
        labels = {rule["targetLabel"]: rule for rule in endpoint["relabelings"]}
        jobs[labels["job"]["replacement"]] = set(labels)
    assert jobs == {AGENT_JOB: {"job", "node"}, OPERATOR_JOB: {"job"}}
