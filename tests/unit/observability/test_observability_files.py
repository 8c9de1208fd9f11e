"""Rules, dashboard and the metrics page: current, complete, and about metrics that exist."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
import yaml
from prometheus_client import CollectorRegistry

from observability import files
from observability.__main__ import main
from observability.cases_cluster import CLUSTER_CASES
from observability.cases_processes import PROCESS_CASES
from observability.catalogue import AGENT, METRICS, OPERATOR, Metric, metric_names_in
from observability.dashboard import ROWS, VARIABLES, queries, without_variables
from observability.model import Alert
from observability.rules import alerts, records

pytestmark = pytest.mark.unit

_CASES = (*CLUSTER_CASES, *PROCESS_CASES)
_ALERTS = tuple(alerts())
_CONTRACT = files.ROOT / "docs" / "control-plane.md"
_EXPRESSIONS = (
    *(alert.expr for alert in _ALERTS),
    *(record.expr for record in records()),
    *(query.expr for query in queries()),
    *VARIABLES.values(),
)


def _alert_names(alert: Alert) -> str:
    return alert.name


def _registered(registry: CollectorRegistry) -> Iterator[tuple[str, str, tuple[str, ...]]]:
    """Name in queries, type and labels of everything in a registry, with samples or without."""
    for collector in registry._collector_to_names:
        kind = collector._type  # type: ignore[attr-defined]
        name = collector._name + ("_total" if kind == "counter" else "")  # type: ignore[attr-defined]
        yield name, kind, tuple(collector._labelnames)  # type: ignore[attr-defined]


def _catalogued(component: str) -> set[tuple[str, str, tuple[str, ...]]]:
    wanted = (component, "both")
    return {(m.name, m.kind, m.labels) for m in METRICS if m.component in wanted}


def _contract_metrics() -> dict[str, tuple[str, ...]]:
    section = _CONTRACT.read_text(encoding="utf-8").split("## Metrics", 1)[1]
    found = re.findall(r"`(hostprep_\w+)(?:\{([^}]*)\})?`", section.split("\n## ")[0])
    return {name: tuple(filter(None, labels.split(","))) for name, labels in found}


def test_generated_files_are_current(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0, capsys.readouterr().out


def test_the_catalogue_is_the_contracts_list_of_metrics() -> None:
    assert {metric.name: metric.labels for metric in METRICS} == _contract_metrics()


def test_the_operator_exports_exactly_what_the_catalogue_lists() -> None:
    from hostprep_operator.metrics import Metrics

    assert set(_registered(Metrics().registry)) == _catalogued(OPERATOR)


def test_the_agent_exports_exactly_what_the_catalogue_lists() -> None:
    from hostprep.agent.metrics import Metrics

    assert set(_registered(Metrics()._registry)) == _catalogued(AGENT)


@pytest.mark.parametrize("expression", _EXPRESSIONS)
def test_rules_and_dashboard_read_metrics_of_the_catalogue_alone(expression: str) -> None:
    names = metric_names_in(expression)
    recorded = {rule.name for rule in records()}
    assert names <= {metric.name for metric in METRICS}
    assert set(re.findall(r"\w+:hostprep_\w+:\w+", expression)) <= recorded


def test_every_metric_is_shown_on_the_dashboard() -> None:
    shown = frozenset().union(*(metric_names_in(query.expr) for query in queries()))
    assert shown == {metric.name for metric in METRICS}


def test_the_dashboard_does_not_need_the_rules() -> None:
    assert not [query.expr for query in queries() if ":hostprep_" in query.expr]


def test_a_label_in_a_selector_is_one_that_its_metric_has() -> None:
    given = {"cluster", "node", "job", "instance", "le"}
    labels = {metric.name: {*metric.labels, *given} for metric in METRICS}
    for expression in _EXPRESSIONS:
        for name, selector in re.findall(r"(?<![\w:])(hostprep_\w+)\{([^}]*)\}", expression):
            family = next(iter(metric_names_in(name)))
            assert set(re.findall(r"(\w+)(?==~?\"|!=)", selector)) <= labels[family], expression


@pytest.mark.parametrize("alert", _ALERTS, ids=_alert_names)
def test_an_alert_fires_in_a_case_and_is_silent_before(alert: Alert) -> None:
    fires = [
        case for case in _CASES if any(alert.name in expected.firing for expected in case.expected)
    ]
    assert fires
    assert any(alert.name not in case.expected[0].firing for case in fires)


@pytest.mark.parametrize("alert", _ALERTS, ids=_alert_names)
def test_an_alert_tells_a_person_what_to_do(alert: Alert) -> None:
    assert alert.name.startswith("Hostprep")
    assert alert.summary.endswith(".")
    assert len(alert.summary) < 120
    assert (
        "`" in alert.description or "dashboard" in alert.description or "look" in alert.description
    )
    assert re.search(r"\$value|\d", alert.description), "no number"


def test_every_alert_has_its_section_in_the_runbook_and_none_is_left_over() -> None:
    text = files.RUNBOOK.read_text(encoding="utf-8")
    headings = re.findall(r"^### (\w+)$", text, re.MULTILINE)
    assert sorted(headings) == sorted(alert.name for alert in _ALERTS)
    anchors = {heading.lower() for heading in headings}
    assert {alert.runbook_url.partition("#")[2] for alert in _ALERTS} == anchors
    assert set(re.findall(r"\]\(#(\w+)\)", text)) <= anchors


def test_every_metric_is_explained_on_the_metrics_page() -> None:
    text = files.METRICS_PAGE.read_text(encoding="utf-8")
    missing = [metric.name for metric in METRICS if f"| `{metric.name}` |" not in text]
    assert not missing
    examples = re.findall(r"\| `([^`]*hostprep_[^`]*\([^`]*|hostprep_\w+\{[^`]*)` \|", text)
    assert examples
    known = {metric.name for metric in METRICS}
    assert frozenset().union(*map(metric_names_in, examples)) <= known


def test_every_panel_says_what_it_shows_in_which_unit() -> None:
    for row in ROWS:
        for panel in row.panels:
            assert panel.title
            assert panel.description.endswith(".")
            assert panel.unit
            assert panel.queries


def _panels() -> list[dict[str, Any]]:
    board = json.loads(files.DASHBOARD.read_text(encoding="utf-8"))
    found: list[dict[str, Any]] = board["panels"]
    return found


def test_panels_fit_and_do_not_overlap() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in _panels():
        at = panel["gridPos"]
        cells = {(at["x"] + dx, at["y"] + dy) for dx in range(at["w"]) for dy in range(at["h"])}
        assert not cells & taken, panel["title"]
        assert at["x"] + at["w"] <= 24
        taken |= cells


def test_every_panel_asks_the_data_source_that_the_person_chose() -> None:
    for panel in _panels():
        if panel["type"] != "row":
            assert panel["datasource"]["uid"] == "${datasource}"
            assert {t["datasource"]["uid"] for t in panel["targets"]} == {"${datasource}"}


def test_no_variable_is_left_in_a_query_once_all_are_chosen() -> None:
    assert not [query.expr for query in queries() if "$" in without_variables(query.expr)]


def test_the_rule_file_holds_nothing_but_plain_rule_groups() -> None:
    document = yaml.safe_load(files.RULES.read_text(encoding="utf-8"))
    assert list(document) == ["groups"]
    names = [rule.get("alert") for group in document["groups"] for rule in group["rules"]]
    assert [name for name in names if name] == [alert.name for alert in _ALERTS]


def test_a_recorded_series_is_no_metric_and_a_histograms_parts_are_one() -> None:
    expression = (
        "sum by (le) (rate(hostprep_verify_duration_seconds_bucket[5m])) > a:hostprep_x:max"
    )
    assert metric_names_in(expression) == {"hostprep_verify_duration_seconds"}


def test_a_metric_has_labels_that_are_bounded() -> None:
    def unbounded(metric: Metric) -> set[str]:
        return set(metric.labels) & {"node", "region", "pod", "path", "name"}

    assert not [metric.name for metric in METRICS if unbounded(metric)]
