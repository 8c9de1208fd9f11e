"""The lower half of the dashboard: whether agents and operator do their work."""

from __future__ import annotations

from observability.model import AGENT_JOB
from observability.panels import Panel, Query, Row

__all__ = ["AGENTS", "OPERATOR"]

_C = 'cluster=~"$cluster"'
_N = 'cluster=~"$cluster", node=~"$node"'
_RATE = "[$__rate_interval]"
_NONE_IS_GOOD = ((None, "green"), (1.0, "orange"))

AGENTS = Row(
    "Health of agents",
    (
        Panel(
            title="Agents down",
            description="Agents that Prometheus does not reach.",
            queries=(Query(f'count(up{{job="{AGENT_JOB}", {_N}}} == 0) or vector(0)'),),
            kind="stat",
            thresholds=_NONE_IS_GOOD,
            width=4,
        ),
        Panel(
            title="Agents without API server",
            description="They keep what they were last told.",
            queries=(Query(f"count(hostprep_api_connected{{{_N}}} == 0) or vector(0)"),),
            kind="stat",
            thresholds=_NONE_IS_GOOD,
            width=4,
        ),
        Panel(
            title="Age of the last verification",
            description="The ten oldest. Seconds in a steady state; more while a pool is prepared.",
            queries=(
                Query(
                    "topk(10, time() - max by (node, instance) "
                    f"(hostprep_verify_last_timestamp_seconds{{{_N}}} > 0))",
                    "{{node}}",
                ),
            ),
            unit="s",
            thresholds=((None, "green"), (120.0, "orange")),
        ),
        Panel(
            title="Duration of a verification round",
            description="Over the last hour.",
            queries=tuple(
                Query(
                    f"histogram_quantile({share}, sum by (le) "
                    f"(increase(hostprep_verify_duration_seconds_bucket{{{_N}}}[1h])))",
                    legend,
                )
                for share, legend in ((0.5, "half"), (0.99, "99 %"))
            ),
            unit="s",
        ),
        Panel(
            title="Problems found",
            description="By verification, since the agents started; they are repaired.",
            queries=(
                Query(
                    f"sum by (reason) (hostprep_verify_problems_total{{{_N}}})",
                    "{{reason}}",
                ),
            ),
        ),
        Panel(
            title="Workers restarted",
            description="In the last hour, by node; each new worker adopts what is there.",
            queries=(
                Query(
                    "sum by (node, instance) "
                    f"(increase(hostprep_worker_restarts_total{{{_N}}}[1h])) > 0",
                    "{{node}}",
                ),
            ),
            thresholds=((None, "green"), (3.0, "orange")),
        ),
        Panel(
            title="Status writes",
            description="Of all agents, a second. In a steady state nothing is written.",
            queries=(
                Query(
                    f"sum by (result) (rate(hostprep_status_writes_total{{{_N}}}{_RATE}))",
                    "{{result}}",
                ),
            ),
            unit="wps",
        ),
    ),
)

OPERATOR = Row(
    "Health of the operator",
    (
        Panel(
            title="Leaders",
            description="One replica works; none: HostprepOperatorNoLeader.",
            queries=(Query(f"sum(hostprep_operator_leader{{{_C}}})"),),
            kind="stat",
            thresholds=((None, "red"), (1.0, "green"), (2.0, "red")),
            width=4,
        ),
        Panel(
            title="Age of its view",
            description="Since the operator last compared its view with the API server; every ten "
            "minutes it does so.",
            queries=(
                Query(f"time() - max(hostprep_operator_last_sync_timestamp_seconds{{{_C}}})"),
            ),
            kind="stat",
            unit="s",
            thresholds=((None, "green"), (1500.0, "red")),
            width=4,
        ),
        Panel(
            title="Queue",
            description="Objects that wait for a reconcile.",
            queries=(Query(f"max(hostprep_operator_queue_depth{{{_C}}})", "waiting"),),
            thresholds=((None, "green"), (100.0, "orange")),
        ),
        Panel(
            title="Duration of reconciles",
            description="95 % took no longer, by kind, their writes included.",
            queries=(
                Query(
                    "histogram_quantile(0.95, sum by (le, kind) "
                    f"(rate(hostprep_operator_reconcile_duration_seconds_bucket{{{_C}}}{_RATE})))",
                    "{{kind}}",
                ),
            ),
            unit="s",
        ),
        Panel(
            title="Writes to the API server",
            description="A second, by kind and result; zero in a steady state.",
            queries=(
                Query(
                    f"sum by (kind, result) (rate(hostprep_operator_writes_total{{{_C}}}{_RATE}))",
                    "{{kind}} {{result}}",
                ),
            ),
            unit="wps",
        ),
        Panel(
            title="Reconciles that failed",
            description="In each quarter of an hour; they are tried again.",
            queries=(
                Query(
                    "sum by (kind, reason) "
                    f"(increase(hostprep_operator_reconcile_errors_total{{{_C}}}[15m]))",
                    "{{kind}} {{reason}}",
                ),
            ),
        ),
        Panel(
            title="Versions",
            description="Processes by component and version; two versions for long: a stuck "
            "roll-out.",
            queries=(Query(f"count by (component, version) (hostprep_build_info{{{_C}}})"),),
            kind="table",
            columns=(
                ("component", "Component", "string"),
                ("version", "Version", "string"),
                ("Value", "Processes", "short"),
            ),
        ),
    ),
)
