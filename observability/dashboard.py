"""The Grafana dashboard: its variables and rows, and the JSON made of them."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator

from grafana_foundation_sdk.builders import dashboard as builders
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models import dashboard

from observability.panels import DATASOURCE, Query, Row, built
from observability.rows_engines import ENGINES
from observability.rows_health import AGENTS, OPERATOR
from observability.rows_pools import GLANCE, MEMORY, NODES, TIME_TO_READY

__all__ = ["ROWS", "VARIABLES", "dashboard_text", "queries", "without_variables"]

ROWS: tuple[Row, ...] = (GLANCE, TIME_TO_READY, NODES, MEMORY, ENGINES, AGENTS, OPERATOR)

VARIABLES = {
    "cluster": "label_values(hostprep_build_info, cluster)",
    "pool": 'label_values({__name__=~"hostprep_operator_pool_nodes|hostprep_pool_phase", '
    'cluster=~"$cluster"}, pool)',
    "node": 'label_values(hostprep_build_info{cluster=~"$cluster", component="agent"}, node)',
}
"""Name to query. "All" is `.*`, which also matches series without that label."""


def queries() -> Iterator[Query]:
    """Yield every query of the dashboard."""
    for row in ROWS:
        for panel in row.panels:
            yield from panel.queries


def without_variables(expr: str, *, rate_interval: str = "5m") -> str:
    """Return the expression as Grafana sends it with "All" chosen everywhere."""
    for name in VARIABLES:
        expr = expr.replace(f"${name}", ".*")
    return expr.replace("$__rate_interval", rate_interval)


def dashboard_text() -> str:
    """Return the text of charts/hostprep/files/dashboards/hostprep.json."""
    board = _with_rows(_with_variables(_empty())).build()
    return json.dumps(board, cls=JSONEncoder, indent=2, sort_keys=True) + "\n"


def _empty() -> builders.Dashboard:
    return (
        builders.Dashboard("Hostprep: host memory of nodes")
        .uid("hostprep")
        .description("Pools of prepared host memory: where they are ready, and why where not.")
        .tags(["hostprep", "kubernetes", "memory"])
        .timezone("browser")
        .time("now-6h", "now")
        .refresh("30s")
        .tooltip(dashboard.DashboardCursorSync.CROSSHAIR)
        .editable()
    )


def _with_variables(board: builders.Dashboard) -> builders.Dashboard:
    source = builders.DatasourceVariable("datasource").label("Data source").type("prometheus")
    board.with_variable(source)
    for name, query in VARIABLES.items():
        board.with_variable(_variable(name, query))
    return board


def _variable(name: str, query: str) -> builders.QueryVariable:
    return (
        builders.QueryVariable(name)
        .label(name.capitalize())
        .datasource(DATASOURCE)
        .query(query)
        .refresh(dashboard.VariableRefresh.ON_TIME_RANGE_CHANGED)
        .sort(dashboard.VariableSort.ALPHABETICAL_ASC)
        .multi(True)
        .include_all(True)
        .all_value(".*")
        .current(dashboard.VariableOption(selected=True, text=["All"], value=["$__all"]))
    )


def _with_rows(board: builders.Dashboard) -> builders.Dashboard:
    """Add rows and panels, with identifiers that links can name."""
    number = itertools.count(1)
    for row in ROWS:
        board.with_row(builders.Row(row.title).id(next(number)))
        for panel in row.panels:
            board.with_panel(built(panel).id(next(number)))
    return board
