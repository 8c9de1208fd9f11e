"""The dashboard's row about engines: their gates, and how registering went."""

from __future__ import annotations

from observability.panels import Panel, Query, Row

__all__ = ["ENGINES"]

_A = 'cluster=~"$cluster", pool=~"$pool", node=~"$node"'

ENGINES = Row(
    "Engines that register with CUDA",
    (
        Panel(
            title="Gates",
            description="Engines that run, by gate. Closed: they serve from GPU memory while they "
            "register. Degraded: they do until they are restarted, which HostprepEngineDegraded "
            "tells.",
            queries=(
                Query(f"sum by (pool, state) (hostprep_gates{{{_A}}})", "{{pool}} {{state}}"),
            ),
            stacked=True,
        ),
        Panel(
            title="From first rank to open gate",
            description="How long engines were without their host tier, since the agents started.",
            queries=tuple(
                Query(
                    f"histogram_quantile({share}, sum by (le, pool) "
                    f"(hostprep_gate_open_seconds_bucket{{{_A}}}))",
                    "{{pool}} " + legend,
                )
                for share, legend in ((0.5, "half"), (0.95, "95 %"))
            ),
            unit="s",
        ),
        Panel(
            title="Runs whose gate never opened",
            description="In each quarter of an hour.",
            queries=(
                Query(
                    f"sum by (pool) (increase(hostprep_gates_degraded_total{{{_A}}}[15m]))",
                    "{{pool}}",
                ),
            ),
        ),
        Panel(
            title="Memory registered",
            description="Added up over all ranks that live: ranks that each register a whole "
            "region count it each.",
            queries=(Query(f"sum by (pool) (hostprep_registered_bytes{{{_A}}})", "{{pool}}"),),
            unit="bytes",
            width=12,
        ),
        Panel(
            title="Longest chunk",
            description="The longest single call to register, by pool: about as long as a "
            "neighbour may have stalled. The goal is 50 ms.",
            queries=(
                Query(
                    f"max by (pool) (hostprep_register_longest_chunk_seconds{{{_A}}})",
                    "{{pool}}",
                ),
            ),
            unit="s",
            thresholds=((None, "green"), (0.25, "orange")),
            width=12,
        ),
    ),
)
