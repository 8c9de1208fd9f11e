"""Panels as values, and how grafana-foundation-sdk makes them; data for tests and for the JSON."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from grafana_foundation_sdk.builders import common as common_builders
from grafana_foundation_sdk.builders import dashboard as builders
from grafana_foundation_sdk.builders import prometheus, stat, table, timeseries
from grafana_foundation_sdk.models import common, dashboard
from grafana_foundation_sdk.models.prometheus import PromQueryFormat

__all__ = ["DATASOURCE", "Panel", "Query", "Row", "built"]

DATASOURCE = dashboard.DataSourceRef(type_val="prometheus", uid="${datasource}")

Step = tuple[float | None, str]
_Builder = timeseries.Panel | stat.Panel | table.Panel
_ALL_GREEN: tuple[Step, ...] = ((None, "green"),)
_PHASE_COLOURS = {
    "Ready": "green",
    "Preparing": "blue",
    "Pending": "blue",
    "Resizing": "blue",
    "Releasing": "purple",
    "Degraded": "orange",
    "Failed": "red",
}


@dataclass(frozen=True, slots=True)
class Query:
    """One PromQL expression with the dashboard's variables in it, and the name of its series."""

    expr: str
    legend: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """One panel; `width` of 24 columns, `height` of rows."""

    title: str
    description: str
    queries: tuple[Query, ...]
    kind: Literal["timeseries", "stat", "table"] = "timeseries"
    unit: str = "short"
    width: int = 8
    height: int = 8
    thresholds: tuple[Step, ...] = _ALL_GREEN
    """From the lowest: value from which on (None: from the start), and colour."""
    stacked: bool = False
    columns: tuple[tuple[str, str, str], ...] = ()
    """Of a table: column, its title, its unit."""
    maximum: float | None = None


@dataclass(frozen=True, slots=True)
class Row:
    """A row of panels under one heading."""

    title: str
    panels: tuple[Panel, ...]


def built(panel: Panel) -> _Builder:
    """Return the panel's builder."""
    if panel.kind == "table":
        builder: _Builder = _table(panel)
    elif panel.kind == "stat":
        builder = _stat(panel)
    else:
        builder = _timeseries(panel)
    builder.title(panel.title).description(panel.description).datasource(DATASOURCE)
    builder.height(panel.height).span(panel.width).min(0).unit(panel.unit)
    builder.thresholds(_thresholds(panel.thresholds))
    if panel.maximum is not None:
        builder.max(panel.maximum)
    for index, query in enumerate(panel.queries):
        builder.with_target(_target(query, index, panel.kind))
    return builder


def _target(query: Query, index: int, kind: str) -> prometheus.Dataquery:
    target = prometheus.Dataquery().expr(query.expr).ref_id(chr(ord("A") + index))
    target.datasource(DATASOURCE)
    if query.legend:
        target.legend_format(query.legend)
    if kind == "table":
        return target.instant().format(PromQueryFormat.TABLE)
    return target.instant() if kind == "stat" else target.range()


def _thresholds(steps: tuple[Step, ...]) -> builders.ThresholdsConfig:
    return (
        builders.ThresholdsConfig()
        .mode(dashboard.ThresholdsMode.ABSOLUTE)
        .steps([dashboard.Threshold(value=value, color=colour) for value, colour in steps])
    )


def _timeseries(panel: Panel) -> timeseries.Panel:
    builder = (
        timeseries.Panel()
        .line_width(1)
        .fill_opacity(30 if panel.stacked else 8)
        .show_points(common.VisibilityMode.NEVER)
        .tooltip(
            common_builders.VizTooltipOptions()
            .mode(common.TooltipDisplayMode.MULTI)
            .sort(common.SortOrder.DESCENDING)
        )
        .legend(
            common_builders.VizLegendOptions()
            .display_mode(common.LegendDisplayMode.LIST)
            .placement(common.LegendPlacement.BOTTOM)
            .show_legend(True)
        )
    )
    if panel.stacked:
        builder.stacking(common_builders.StackingConfig().mode(common.StackingMode.NORMAL))
    if panel.thresholds != _ALL_GREEN:
        builder.thresholds_style(
            common_builders.GraphThresholdsStyleConfig().mode(common.GraphTresholdsStyleMode.DASHED)
        )
    return builder


def _stat(panel: Panel) -> stat.Panel:
    return (
        stat.Panel()
        .color_mode(
            common.BigValueColorMode.NONE
            if panel.thresholds == _ALL_GREEN
            else common.BigValueColorMode.VALUE
        )
        .graph_mode(common.BigValueGraphMode.NONE)
        .reduce_options(common_builders.ReduceDataOptions().calcs(["lastNotNull"]))
    )


def _table(panel: Panel) -> table.Panel:
    builder = table.Panel().show_header(True)
    if len(panel.queries) > 1:
        builder.with_transformation(dashboard.DataTransformerConfig(id_val="merge", options={}))
    builder.with_transformation(
        dashboard.DataTransformerConfig(
            id_val="organize",
            options={
                "excludeByName": {"Time": True, "Value #A": True},
                "indexByName": {name: index for index, (name, _, _) in enumerate(panel.columns)},
                "renameByName": {name: title for name, title, _ in panel.columns},
            },
        )
    )
    for _, title, unit in panel.columns:
        builder.override_by_name(title, _column(title, unit))
    return builder


def _column(title: str, unit: str) -> list[dashboard.DynamicConfigValue]:
    values = [dashboard.DynamicConfigValue(id_val="unit", value=unit)]
    if title != "Phase":
        return values
    colours = dashboard.ValueMap(
        options={
            phase: dashboard.ValueMappingResult(color=colour, index=index)
            for index, (phase, colour) in enumerate(_PHASE_COLOURS.items())
        }
    )
    return [
        *values,
        dashboard.DynamicConfigValue(id_val="mappings", value=[colours]),
        dashboard.DynamicConfigValue(
            id_val="custom.cellOptions", value={"type": "color-background", "mode": "basic"}
        ),
    ]
