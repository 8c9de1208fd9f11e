"""The upper half of the dashboard: pools, time to ready, nodes, memory."""

from __future__ import annotations

from observability.panels import Panel, Query, Row

__all__ = ["GLANCE", "MEMORY", "NODES", "TIME_TO_READY"]

_C = 'cluster=~"$cluster"'
_P = 'cluster=~"$cluster", pool=~"$pool"'
_A = 'cluster=~"$cluster", pool=~"$pool", node=~"$node"'
_N = 'cluster=~"$cluster", node=~"$node"'
_NONE_IS_GOOD = ((None, "green"), (1.0, "orange"))


def _pool_nodes(state: str) -> str:
    return f'max by (cluster, pool) (hostprep_operator_pool_nodes{{{_P}, state="{state}"}})'


GLANCE = Row(
    "At a glance",
    (
        Panel(
            title="Nodes ready, of those selected",
            description="The figure that matters: the share of a pool's nodes that hold its memory "
            "verified for this boot. Below 100 % for long: HostprepPoolNotReady.",
            queries=(Query(f"{_pool_nodes('ready')} / {_pool_nodes('selected')}", "{{pool}}"),),
            kind="stat",
            unit="percentunit",
            thresholds=((None, "red"), (0.9, "orange"), (1.0, "green")),
            maximum=1,
            height=5,
        ),
        Panel(
            title="Nodes not ready",
            description="Nodes that a pool selects and that do not hold it, over all pools.",
            queries=(Query(f"sum({_pool_nodes('selected')} - {_pool_nodes('ready')})"),),
            kind="stat",
            thresholds=_NONE_IS_GOOD,
            width=4,
            height=5,
        ),
        Panel(
            title="Longest closed",
            description="For how long the longest-closed node has waited. Autoscalers give a node "
            "up after 15 minutes; the default deadline is 10.",
            queries=(Query(f"max(hostprep_operator_oldest_closed_seconds{{{_C}}})"),),
            kind="stat",
            unit="s",
            thresholds=((None, "green"), (600.0, "orange"), (900.0, "red")),
            width=4,
            height=5,
        ),
        Panel(
            title="Memory ready",
            description="Bytes that engines find prepared, and what the pools ask for.",
            queries=(
                Query(f"sum(hostprep_pool_ready_bytes{{{_A}}})", "ready"),
                Query(f"sum(hostprep_pool_wanted_bytes{{{_A}}})", "wanted"),
            ),
            kind="stat",
            unit="bytes",
            height=5,
        ),
        Panel(
            title="Nodes of a pool by state",
            description="From the operator. A node is in one state only, and selected in any.",
            queries=(
                Query(
                    f"max by (cluster, pool, state) (hostprep_operator_pool_nodes{{{_P}}})",
                    "{{pool}} {{state}}",
                ),
            ),
            width=12,
        ),
        Panel(
            title="Nodes by verdict",
            description="All nodes with a required pool. Closed: engines are kept away. Unknown: "
            "no live agent or kubelet; taint and labels stay as they were.",
            queries=(
                Query(f"max by (cluster, state) (hostprep_operator_nodes{{{_C}}})", "{{state}}"),
            ),
            stacked=True,
            width=12,
        ),
    ),
)

TIME_TO_READY = Row(
    "Time to ready",
    (
        Panel(
            title="From joining or reboot to open",
            description="What an autoscaler waits for, over the last hour.",
            queries=tuple(
                Query(
                    f"histogram_quantile({share}, sum by (le) "
                    f"(increase(hostprep_operator_node_ready_seconds_bucket{{{_C}}}[1h])))",
                    legend,
                )
                for share, legend in ((0.5, "half"), (0.95, "95 %"), (0.99, "99 %"))
            ),
            unit="s",
            thresholds=((None, "green"), (600.0, "orange"), (900.0, "red")),
        ),
        Panel(
            title="Preparing",
            description="How long preparations took, since the agents started: a node prepares "
            "once a boot, and adopts after a restart of its agent.",
            queries=tuple(
                Query(
                    f"histogram_quantile({share}, sum by (le, pool) "
                    f"(hostprep_prepare_duration_seconds_bucket{{{_A}}}))",
                    "{{pool}} " + legend,
                )
                for share, legend in ((0.5, "half"), (0.95, "95 %"))
            ),
            unit="s",
        ),
        Panel(
            title="Memory populated",
            description="Made resident since the agents started; flat in a steady state.",
            queries=(
                Query(
                    f"sum by (pool, backing) (hostprep_populated_bytes_total{{{_A}}})",
                    "{{pool}} {{backing}}",
                ),
            ),
            unit="bytes",
        ),
        Panel(
            title="Nodes opened and closed",
            description="In each quarter of an hour. Closings have a cause: join, reboot, repair, "
            "resize.",
            queries=(
                Query(f"sum(increase(hostprep_operator_openings_total{{{_C}}}[15m]))", "opened"),
                Query(
                    f"sum by (cause) (increase(hostprep_operator_closings_total{{{_C}}}[15m]))",
                    "closed: {{cause}}",
                ),
            ),
            width=12,
        ),
        Panel(
            title="Reboots and missed deadlines",
            description="In each quarter of an hour.",
            queries=(
                Query(
                    f"sum(increase(hostprep_operator_reboots_detected_total{{{_C}}}[15m]))",
                    "reboots",
                ),
                Query(
                    f"sum(increase(hostprep_operator_deadlines_exceeded_total{{{_C}}}[15m]))",
                    "deadlines missed",
                ),
            ),
            width=12,
        ),
    ),
)

NODES = Row(
    "Nodes",
    (
        Panel(
            title="Pools on nodes",
            description="From the agents: the phase of each pool on each node, what it holds, and "
            "how many of its regions engines have.",
            queries=(
                Query(f"max by (node, instance, pool, phase) (hostprep_pool_phase{{{_A}}} == 1)"),
                Query(f"max by (node, instance, pool) (hostprep_pool_ready_bytes{{{_A}}})"),
                Query(f"max by (node, instance, pool) (hostprep_pool_wanted_bytes{{{_A}}})"),
                Query(f"max by (node, instance, pool) (hostprep_regions_leased{{{_A}}})"),
            ),
            kind="table",
            columns=(
                ("node", "Node", "string"),
                ("instance", "Agent", "string"),
                ("pool", "Pool", "string"),
                ("phase", "Phase", "string"),
                ("Value #B", "Ready", "bytes"),
                ("Value #C", "Wanted", "bytes"),
                ("Value #D", "Regions leased", "short"),
            ),
            width=24,
            height=10,
        ),
        Panel(
            title="Pools by phase",
            description="How many (pool, node) pairs are in each phase.",
            queries=(Query(f"sum by (phase) (hostprep_pool_phase{{{_A}}})", "{{phase}}"),),
            stacked=True,
            width=12,
        ),
        Panel(
            title="Failures to prepare",
            description="By reason, since the agents started; the status of the HostMemoryNode "
            "has the message and the remedy.",
            queries=(
                Query(
                    f"sum by (pool, reason) (hostprep_prepare_failures_total{{{_A}}})",
                    "{{pool}} {{reason}}",
                ),
            ),
            width=12,
        ),
    ),
)

MEMORY = Row(
    "Memory",
    (
        Panel(
            title="Regions by state",
            description="Free ones wait for an engine, Leased ones have one, Dirty ones wait to be "
            "scrubbed; Damaged ones are rebuilt once they are given back.",
            queries=(Query(f"sum by (state) (hostprep_region_bytes{{{_A}}})", "{{state}}"),),
            unit="bytes",
            stacked=True,
        ),
        Panel(
            title="Regions by backing",
            description="Which pages the memory is made of. Base where huge pages were asked for "
            "means that there were none to be had.",
            queries=(Query(f"sum by (backing) (hostprep_region_bytes{{{_A}}})", "{{backing}}"),),
            unit="bytes",
            stacked=True,
        ),
        Panel(
            title="Regions leased",
            description="Regions that engines hold.",
            queries=(Query(f"sum by (pool) (hostprep_regions_leased{{{_A}}})", "{{pool}}"),),
        ),
        Panel(
            title="Regions for kubelet to hand out",
            description="Of pools with attach.mode devicePlugin: Unhealthy ones are between two "
            "owners, damaged, or not published. Below: agents that kubelet knows, by pool.",
            queries=(
                Query(f"sum by (pool, health) (hostprep_devices{{{_A}}})", "{{pool}} {{health}}"),
                Query(
                    f"sum by (pool) (hostprep_device_plugin_registered{{{_A}}})",
                    "{{pool}} registered",
                ),
            ),
            width=24,
        ),
        Panel(
            title="Huge pages",
            description="In pages, over the nodes chosen: all there are, and those our pools hold.",
            queries=(
                Query(
                    f"sum by (page_size, kind) (hostprep_huge_pages{{{_N}}})",
                    "{{page_size}} {{kind}}",
                ),
            ),
            width=12,
        ),
        Panel(
            title="Damaged",
            description="Bytes of regions that are damaged, by node.",
            queries=(
                Query(
                    "sum by (node, instance, pool) "
                    f'(hostprep_region_bytes{{{_A}, state="Damaged"}})',
                    "{{node}} {{pool}}",
                ),
            ),
            unit="bytes",
            width=12,
        ),
    ),
)
