"""Alerts about pools and nodes, from the operator's view: no agent need be reachable."""

from __future__ import annotations

from observability.model import Alert, Group, Record

__all__ = ["NODES", "POOLS"]

_RECORDED = (
    Record(
        name="cluster_pool_state:hostprep_nodes:max",
        expr="max by (cluster, pool, state) (hostprep_operator_pool_nodes)",
    ),
    Record(
        name="cluster_pool:hostprep_nodes_not_ready:max",
        expr='max by (cluster, pool) (hostprep_operator_pool_nodes{state="selected"})\n'
        '- max by (cluster, pool) (hostprep_operator_pool_nodes{state="ready"})',
    ),
)

_SELECTED = (
    "{{ with printf \"cluster_pool_state:hostprep_nodes:max{cluster='%s',pool='%s',"
    "state='selected'}\" $labels.cluster $labels.pool | query }}{{ . | first | value }}{{ end }}"
)

# Where nodes come and go all the time, some are always being prepared. As long as at least as many
# were opened lately as are not ready, that is what is seen; a failed or degraded node never is.
_NOT_READY = """\
(
    cluster_pool:hostprep_nodes_not_ready:max
  > on (cluster) group_left ()
    sum by (cluster) (increase(hostprep_operator_openings_total[15m]))
)
or
(
    cluster_pool:hostprep_nodes_not_ready:max > 0
  and on (cluster, pool)
    cluster_pool_state:hostprep_nodes:max{state=~"failed|degraded"} > 0
)"""

_NOWHERE_READY = """\
cluster_pool_state:hostprep_nodes:max{state="selected"} > 0
and on (cluster, pool)
  cluster_pool_state:hostprep_nodes:max{state="ready"} == 0"""

POOLS = Group(
    "hostprep.pools",
    (
        *_RECORDED,
        Alert(
            name="HostprepPoolNotReady",
            expr=_NOT_READY,
            hold="15m",
            severity="warning",
            summary="Pool {{ $labels.pool }} is not where it should be.",
            description="{{ $value }} of the " + _SELECTED + " nodes that pool {{ $labels.pool }} "
            "selects have not had it ready for 15 minutes; engines there find no prepared memory. "
            "See which and why: `kubectl get hmn`, then `kubectl describe hmn NODE`.",
        ),
        Alert(
            name="HostprepPoolNowhereReady",
            expr=_NOWHERE_READY,
            hold="15m",
            severity="critical",
            summary="Pool {{ $labels.pool }} is ready on no node.",
            description="Pool {{ $labels.pool }} selects {{ $value }} nodes and has been ready on "
            "none of them for 15 minutes. Look at the pool's conditions first, since all nodes "
            "share the cause: `kubectl describe hmp {{ $labels.pool }}`.",
        ),
    ),
)

_REBOOTS = """\
sum by (cluster) (increase(hostprep_operator_reboots_detected_total[15m])) >= 5
and on (cluster)
  sum by (cluster) (increase(hostprep_operator_reboots_detected_total[15m]))
  >= on (cluster)
  0.05 * sum by (cluster) (max by (cluster, state) (hostprep_operator_nodes))"""

NODES = Group(
    "hostprep.nodes",
    (
        Alert(
            name="HostprepNodeClosedTooLong",
            expr="max by (cluster) (hostprep_operator_oldest_closed_seconds) > 900",
            hold="2m",
            severity="warning",
            summary="A node has been closed for {{ $value | humanizeDuration }}.",
            description="A node has waited {{ $value | humanizeDuration }} for its memory; "
            "autoscalers give such a node up after 15 minutes. Find it and its reason: `kubectl "
            "get events -A --field-selector reason=MemoryClosed`, then `kubectl describe node "
            "NODE` (condition hostprep.dev/HostMemoryReady).",
        ),
        Alert(
            name="HostprepDeadlineExceeded",
            expr="sum by (cluster) "
            "(increase(hostprep_operator_deadlines_exceeded_total[30m])) >= 1",
            hold="0m",
            severity="warning",
            summary="Nodes were not ready within readiness.deadlineSeconds.",
            description='{{ $value | printf "%.0f" }} nodes missed their deadline in the last '
            "30 minutes; with `onDeadline: OpenWithout` they now serve without prepared memory. "
            "Which: `kubectl get events -A --field-selector reason=DeadlineExceeded`.",
        ),
        Alert(
            name="HostprepNodesUnknown",
            expr='max by (cluster) (hostprep_operator_nodes{state="unknown"}) > 0',
            hold="15m",
            severity="warning",
            summary="The state of host memory is unknown on {{ $value }} nodes.",
            description="{{ $value }} nodes have had no live agent, or no live kubelet, for 15 "
            "minutes; their taints and labels stay as they were. Look for agents that do not run: "
            "`kubectl get pods -A -o wide -l app.kubernetes.io/component=agent`, and at "
            "`kubectl get nodes`.",
        ),
        Alert(
            name="HostprepRebootStorm",
            expr=_REBOOTS,
            hold="0m",
            severity="info",
            summary="Many nodes rebooted at once.",
            description='{{ $value | printf "%.0f" }} nodes with prepared memory rebooted within '
            "15 minutes and were closed until theirs is prepared again. If no roll-out of the "
            "operating system explains it, look for a common cause (power, kernel, firmware).",
        ),
    ),
)
