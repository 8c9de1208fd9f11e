"""What promtool says of rules and dashboard: they parse, fire when they should, and are silent."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from tests.cluster.charts import MONITORING, render
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


def test_the_charts_monitors_give_the_labels_that_rules_and_dashboard_expect() -> None:
    monitors = [item for item in render(*MONITORING) if item["kind"] == "PodMonitor"]
    jobs = {}
    for monitor in monitors:
        (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
        labels = {rule["targetLabel"]: rule for rule in endpoint["relabelings"]}
        jobs[labels["job"]["replacement"]] = set(labels)
    assert jobs == {AGENT_JOB: {"job", "node"}, OPERATOR_JOB: {"job"}}
