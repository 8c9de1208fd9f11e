"""Every metric of agent and operator: the docs are written from it, rules are checked by it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

__all__ = ["AGENT", "METRICS", "OPERATOR", "Metric", "metric_names_in", "table_of"]

Kind = Literal["gauge", "counter", "histogram"]

AGENT = "agent"
OPERATOR = "operator"


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric family, under the name that a query uses (a counter's ends in `_total`)."""

    name: str
    kind: Kind
    component: str
    meaning: str
    labels: tuple[str, ...] = ()


_AGENT_METRICS = (
    Metric(
        "hostprep_pool_wanted_bytes", "gauge", AGENT, "What the pool asks of the node.", ("pool",)
    ),
    Metric("hostprep_pool_ready_bytes", "gauge", AGENT, "Sound and published.", ("pool",)),
    Metric(
        "hostprep_pool_phase",
        "gauge",
        AGENT,
        "1 for the phase the pool is in on the node, 0 for the others.",
        ("pool", "phase"),
    ),
    Metric(
        "hostprep_region_bytes",
        "gauge",
        AGENT,
        "Bytes of regions by state: Free, Leased, Dirty, Retained, Damaged, Unpublished or "
        "Unfinished.",
        ("pool", "backing", "state"),
    ),
    Metric("hostprep_regions_leased", "gauge", AGENT, "Regions that engines hold.", ("pool",)),
    Metric(
        "hostprep_gates",
        "gauge",
        AGENT,
        "Engines that run, by what their gate is: Closed, Open, Degraded, or Unknown where the "
        "rank board cannot be read.",
        ("pool", "state"),
    ),
    Metric(
        "hostprep_gate_open_seconds",
        "histogram",
        AGENT,
        "From an engine's first rank joining the board to its gate opening; buckets from 0.1 to "
        "900 s.",
        ("pool",),
    ),
    Metric(
        "hostprep_gates_degraded_total",
        "counter",
        AGENT,
        "Runs of engines whose gate will never open; each once, those that were stopped before it "
        "opened included.",
        ("pool",),
    ),
    Metric(
        "hostprep_registered_bytes",
        "gauge",
        AGENT,
        "Registered with CUDA, added up over the ranks that live: may be more than the region.",
        ("pool",),
    ),
    Metric(
        "hostprep_register_longest_chunk_seconds",
        "gauge",
        AGENT,
        "Longest single call to register a chunk, of the engines that run.",
        ("pool",),
    ),
    Metric(
        "hostprep_devices",
        "gauge",
        AGENT,
        "Regions as kubelet hands them out, where it does: Healthy or Unhealthy.",
        ("pool", "health"),
    ),
    Metric(
        "hostprep_device_plugin_registered",
        "gauge",
        AGENT,
        "1 while kubelet knows the pool's regions, 0 while it cannot be told of them.",
        ("pool",),
    ),
    Metric(
        "hostprep_prepare_duration_seconds",
        "histogram",
        AGENT,
        "How long preparations took that changed something; buckets from 0.1 to 900 s.",
        ("pool",),
    ),
    Metric(
        "hostprep_prepare_failures_total",
        "counter",
        AGENT,
        "Preparations that failed or were refused; reasons as in the pool's status.",
        ("pool", "reason"),
    ),
    Metric(
        "hostprep_populated_bytes_total",
        "counter",
        AGENT,
        "Memory made resident since the agent started; adopted memory is not counted.",
        ("pool", "backing"),
    ),
    Metric(
        "hostprep_verify_duration_seconds",
        "histogram",
        AGENT,
        "How long a round took that checks every region against the kernel.",
    ),
    Metric(
        "hostprep_verify_last_timestamp_seconds",
        "gauge",
        AGENT,
        "When the last such round ended, seconds since the epoch; 0 before the first.",
    ),
    Metric(
        "hostprep_verify_problems_total",
        "counter",
        AGENT,
        "What such rounds found wrong.",
        ("pool", "reason"),
    ),
    Metric(
        "hostprep_huge_pages",
        "gauge",
        AGENT,
        "Huge pages of the node, in pages: total, and held by our pools.",
        ("page_size", "kind"),
    ),
    Metric(
        "hostprep_status_writes_total",
        "counter",
        AGENT,
        "Writes of the HostMemoryNode's status: written, unchanged (not sent), failed.",
        ("result",),
    ),
    Metric(
        "hostprep_worker_restarts_total",
        "counter",
        AGENT,
        "Times the worker process ended and was started again.",
    ),
    Metric("hostprep_api_connected", "gauge", AGENT, "1 while the API server answers."),
)

_OPERATOR_METRICS = (
    Metric(
        "hostprep_operator_pool_nodes",
        "gauge",
        OPERATOR,
        "Nodes of a pool: selected, ready, preparing, degraded, failed, releasing, unavailable.",
        ("pool", "state"),
    ),
    Metric(
        "hostprep_operator_nodes",
        "gauge",
        OPERATOR,
        "Nodes with a required pool by verdict: ready, closed, unknown.",
        ("state",),
    ),
    Metric("hostprep_operator_openings_total", "counter", OPERATOR, "Nodes opened."),
    Metric(
        "hostprep_operator_closings_total",
        "counter",
        OPERATOR,
        "Nodes closed, by cause: join, reboot, repair, resize.",
        ("cause",),
    ),
    Metric(
        "hostprep_operator_deadlines_exceeded_total",
        "counter",
        OPERATOR,
        "Nodes still closed after `readiness.deadlineSeconds`.",
    ),
    Metric(
        "hostprep_operator_reboots_detected_total",
        "counter",
        OPERATOR,
        "Nodes whose boot id changed.",
    ),
    Metric(
        "hostprep_operator_oldest_closed_seconds",
        "gauge",
        OPERATOR,
        "For how long the longest-closed node has been closed; 0 when none is.",
    ),
    Metric(
        "hostprep_operator_node_ready_seconds",
        "histogram",
        OPERATOR,
        "From a node's joining, or from its reboot being seen, to its opening.",
    ),
    Metric(
        "hostprep_operator_writes_total",
        "counter",
        OPERATOR,
        "Writes to the API server, by kind of object and result.",
        ("kind", "result"),
    ),
    Metric(
        "hostprep_operator_reconcile_duration_seconds",
        "histogram",
        OPERATOR,
        "How long one reconcile took, its writes included.",
        ("kind",),
    ),
    Metric(
        "hostprep_operator_reconcile_errors_total",
        "counter",
        OPERATOR,
        "Reconciles that failed and are tried again.",
        ("kind", "reason"),
    ),
    Metric(
        "hostprep_operator_queue_depth", "gauge", OPERATOR, "Objects that wait for a reconcile."
    ),
    Metric("hostprep_operator_leader", "gauge", OPERATOR, "1 in the replica that does the work."),
    Metric(
        "hostprep_operator_last_sync_timestamp_seconds",
        "gauge",
        OPERATOR,
        "When the operator last compared its view with the API server, seconds since the epoch.",
    ),
)

METRICS = (
    Metric(
        "hostprep_build_info",
        "gauge",
        "both",
        "Always 1; the version of the process, `component` is agent or operator.",
        ("version", "component"),
    ),
    *_AGENT_METRICS,
    *_OPERATOR_METRICS,
)

_NAME = re.compile(r"(?<![\w:])hostprep_\w+(?![\w:])")
_HISTOGRAM_PART = re.compile(r"_(bucket|sum|count)$")


def metric_names_in(expression: str) -> frozenset[str]:
    """Return the families that a PromQL expression reads; recorded series have colons, and go."""
    histograms = {metric.name for metric in METRICS if metric.kind == "histogram"}
    return frozenset(_family(name, histograms) for name in _NAME.findall(expression))


def _family(name: str, histograms: set[str]) -> str:
    family = _HISTOGRAM_PART.sub("", name)
    return family if family in histograms else name


def table_of(component: str) -> str:
    """Return the Markdown table of one component's metrics."""
    rows = [
        f"| `{metric.name}` | {metric.kind} | {_labels(metric)} | {metric.meaning} |"
        for metric in METRICS
        if metric.component in (component, "both")
    ]
    return "\n".join(["| metric | type | labels | meaning |", "|---|---|---|---|", *rows])


def _labels(metric: Metric) -> str:
    return ", ".join(f"`{label}`" for label in metric.labels) or "none"
