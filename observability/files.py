"""Which files are generated, and their texts."""

from __future__ import annotations

from pathlib import Path

from observability.cases_cluster import CLUSTER_CASES
from observability.cases_processes import PROCESS_CASES
from observability.catalogue import AGENT, OPERATOR, table_of
from observability.dashboard import dashboard_text
from observability.rules import alerts, rules_text
from observability.scenarios import rules_test_text

__all__ = ["DASHBOARD", "METRICS_PAGE", "ROOT", "RULES", "RULES_TEST", "RUNBOOK", "generated"]

ROOT = Path(__file__).resolve().parent.parent
RULES = ROOT / "charts/hostprep/files/rules/hostprep.yaml"
DASHBOARD = ROOT / "charts/hostprep/files/dashboards/hostprep.json"
RULES_TEST = ROOT / "tests/unit/observability/rules_test.yaml"
METRICS_PAGE = ROOT / "docs/metrics.md"
RUNBOOK = ROOT / "docs/runbooks/alerts.md"


def generated() -> dict[Path, str]:
    """Return every generated file's text. Of docs/metrics.md only the tables are generated."""
    return {
        RULES: rules_text(),
        RULES_TEST: rules_test_text((*CLUSTER_CASES, *PROCESS_CASES)),
        DASHBOARD: dashboard_text(),
        METRICS_PAGE: _metrics_page(METRICS_PAGE.read_text(encoding="utf-8")),
    }


def _metrics_page(page: str) -> str:
    tables = {AGENT: table_of(AGENT), OPERATOR: table_of(OPERATOR), "alerts": _alert_table()}
    for name, table in tables.items():
        before, rest = page.split(f"<!-- {name}: generated -->\n", 1)
        _, after = rest.split(f"<!-- {name}: end -->", 1)
        page = f"{before}<!-- {name}: generated -->\n{table}\n<!-- {name}: end -->{after}"
    return page


def _alert_table() -> str:
    rows = [
        f"| [{alert.name}](runbooks/alerts.md#{alert.name.lower()}) | {alert.severity} "
        f"| {alert.hold} |"
        for alert in alerts()
    ]
    return "\n".join(["| alert | severity | holds for |", "|---|---|---|", *rows])
