"""Rules, dashboard, metrics page and runbook: complete, and about metrics that exist."""

from __future__ import annotations

import re
from typing import Any

import pytest
import yaml

from tests.support.observability import (
    AGENT_METRICS,
    METRICS,
    METRICS_PAGE,
    OPERATOR_METRICS,
    RULES,
    RUNBOOK,
    VALUES,
    Metric,
    alerts,
    board,
    families_in,
    firing,
    panels,
    queries,
    rule_tests,
    rules,
    variable_queries,
    without_variables,
)

pytestmark = pytest.mark.unit

_ALERTS = alerts()
_NAMES = {metric.name for metric in METRICS}
_EXPRESSIONS = (*(rule["expr"] for rule in rules()), *queries(), *variable_queries().values())
_RUNBOOK_URL = "https://hostprep.dev/docs/runbooks/alerts.md"
"""The chart replaces it by a value."""


def _alert_name(alert: dict[str, Any]) -> str:
    return str(alert["alert"])


def _page() -> str:
    return METRICS_PAGE.read_text(encoding="utf-8")


@pytest.mark.parametrize("expression", _EXPRESSIONS)
def test_rules_and_dashboard_read_metrics_that_agent_or_operator_export(expression: str) -> None:
    assert families_in(expression) <= _NAMES
    recorded = {rule["record"] for rule in rules() if "record" in rule}
    assert set(re.findall(r"\w+:hostprep_\w+:\w+", expression)) <= recorded


def test_rules_and_dashboard_compare_with_thresholds_that_the_rules_record() -> None:
    used = {name for expr in _EXPRESSIONS for name in re.findall(r"hostprep_threshold:\w+", expr)}
    recorded = {rule["record"] for rule in rules() if "record" in rule}
    assert used == {name for name in recorded if name.startswith("hostprep_threshold:")}


def test_the_charts_values_are_the_thresholds_of_the_rules() -> None:
    values = yaml.safe_load(VALUES.read_text(encoding="utf-8"))["prometheusRule"]["thresholds"]
    snake = {re.sub("[A-Z]", lambda m: f"_{m[0].lower()}", name): v for name, v in values.items()}
    recorded = {
        rule["record"].removeprefix("hostprep_threshold:"): rule["expr"]
        for rule in rules()
        if rule.get("record", "").startswith("hostprep_threshold:")
    }
    assert {name: f"vector({value})" for name, value in snake.items()} == recorded


def test_the_metrics_page_lists_every_threshold_with_its_default() -> None:
    values = yaml.safe_load(VALUES.read_text(encoding="utf-8"))["prometheusRule"]["thresholds"]
    rows = re.findall(r"^\| `(\w+)` \| ([\d.]+) \| [^|]+\. \|$", _page(), re.MULTILINE)
    assert rows == [(name, str(value)) for name, value in values.items()]


def test_every_metric_is_shown_on_the_dashboard() -> None:
    assert set().union(*map(families_in, queries())) == _NAMES


def test_the_dashboard_does_not_need_the_rules() -> None:
    assert not [expr for expr in queries() if ":hostprep_" in expr]


def test_a_label_in_a_selector_is_one_that_its_metric_has() -> None:
    given = {"cluster", "node", "job", "instance", "le"}
    labels = {metric.name: {*metric.labels, *given} for metric in METRICS}
    for expression in _EXPRESSIONS:
        for name, selector in re.findall(r"(?<![\w:])(hostprep_\w+)\{([^}]*)\}", expression):
            (family,) = families_in(name)
            assert set(re.findall(r"(\w+)(?==~?\"|!=)", selector)) <= labels[family], expression


@pytest.mark.parametrize("alert", _ALERTS, ids=_alert_name)
def test_an_alert_fires_in_a_case_and_is_silent_before(alert: dict[str, Any]) -> None:
    cases = [firing(test) for test in rule_tests()]
    fires = [expected for expected in cases if any(alert["alert"] in names for names in expected)]
    assert fires
    assert any(alert["alert"] not in expected[0] for expected in fires)


@pytest.mark.parametrize("alert", _ALERTS, ids=_alert_name)
def test_an_alert_tells_a_person_what_to_do(alert: dict[str, Any]) -> None:
    assert alert["alert"].startswith("Hostprep")
    assert alert["labels"]["severity"] in {"critical", "warning", "info"}
    summary = alert["annotations"]["summary"]
    description = alert["annotations"]["description"]
    assert summary.endswith(".")
    assert len(summary) < 120
    assert "`" in description or "dashboard" in description or "look" in description
    assert re.search(r"\$value|\d", description), "no number"


def test_every_alert_has_its_section_in_the_runbook_and_none_is_left_over() -> None:
    text = RUNBOOK.read_text(encoding="utf-8")
    headings = re.findall(r"^### (\w+)$", text, re.MULTILINE)
    assert sorted(headings) == sorted(map(_alert_name, _ALERTS))
    for alert in _ALERTS:
        url = f"{_RUNBOOK_URL}#{alert['alert'].lower()}"
        assert alert["annotations"]["runbook_url"] == url
    anchors = {heading.lower() for heading in headings}
    assert set(re.findall(r"\]\(#(\w+)\)", text)) <= anchors


@pytest.mark.parametrize(
    ("heading", "metrics"), [("## Agent", AGENT_METRICS), ("## Operator", OPERATOR_METRICS)]
)
def test_the_metrics_page_lists_every_metric_with_type_and_labels(
    heading: str, metrics: frozenset[Metric]
) -> None:
    section = _page().split(f"{heading}\n", 1)[1].split("\n## ", 1)[0]
    rows = re.findall(r"^\| `(\w+)` \| (\w+) \| ([^|]*) \| [^|]+\. \|$", section, re.MULTILINE)
    listed = [Metric(name, kind, tuple(re.findall(r"`(\w+)`", ls))) for name, kind, ls in rows]
    assert len(listed) == len(set(listed))
    assert set(listed) == metrics


def test_the_metrics_page_and_the_runbook_name_no_metric_that_does_not_exist() -> None:
    assert families_in(_page()) <= _NAMES
    assert families_in(RUNBOOK.read_text(encoding="utf-8")) <= _NAMES


def test_the_metrics_page_lists_every_alert() -> None:
    rows = re.findall(r"^\| \[(Hostprep\w+)\]\((.*)\) \| (\w+) \| (\w+) \|$", _page(), re.MULTILINE)
    assert rows == [
        (
            alert["alert"],
            f"runbooks/alerts.md#{alert['alert'].lower()}",
            alert["labels"]["severity"],
            alert["for"],
        )
        for alert in _ALERTS
    ]


def test_every_panel_says_what_it_shows_in_which_unit() -> None:
    for panel in panels():
        assert panel["title"]
        assert panel["description"].endswith(".")
        assert panel["fieldConfig"]["defaults"]["unit"]
        assert panel["targets"]


def test_no_panel_has_a_line_or_a_row_for_each_node_of_a_large_fleet() -> None:
    by_node = [expr for expr in queries() if re.search(r"by \([^)]*\b(node|instance)\b", expr)]
    assert by_node
    assert not [expr for expr in by_node if not expr.startswith("topk(")]


def test_panels_fit_and_do_not_overlap() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in board()["panels"]:
        at = panel["gridPos"]
        cells = {(at["x"] + dx, at["y"] + dy) for dx in range(at["w"]) for dy in range(at["h"])}
        assert not cells & taken, panel["title"]
        assert at["x"] + at["w"] <= 24
        taken |= cells


def test_panels_have_identifiers_that_links_can_name() -> None:
    numbers = [panel["id"] for panel in board()["panels"]]
    assert len(numbers) == len(set(numbers))


def test_every_panel_asks_the_data_source_that_the_person_chose() -> None:
    for panel in panels():
        assert panel["datasource"]["uid"] == "${datasource}"
        assert {target["datasource"]["uid"] for target in panel["targets"]} == {"${datasource}"}


def test_no_variable_is_left_in_a_query_once_all_are_chosen() -> None:
    assert not [expr for expr in queries() if "$" in without_variables(expr)]


def test_the_rule_file_holds_nothing_but_plain_rule_groups() -> None:
    document = yaml.safe_load(RULES.read_text(encoding="utf-8"))
    assert list(document) == ["groups"]
    assert all({"record", "alert"} & set(rule) for rule in rules())


def test_a_recorded_series_is_no_metric_and_a_histograms_parts_are_one() -> None:
    expression = (
        "sum by (le) (rate(hostprep_verify_duration_seconds_bucket[5m])) > a:hostprep_x:max"
    )
    assert families_in(expression) == {"hostprep_verify_duration_seconds"}


def test_a_metric_has_labels_that_are_bounded() -> None:
    unbounded = {"node", "region", "pod", "path", "name"}
    assert not [metric.name for metric in METRICS if unbounded & set(metric.labels)]
