"""Alerts about the operator itself."""

from __future__ import annotations

from observability.model import AGENT_JOB, OPERATOR_JOB, Alert, Group

__all__ = ["OPERATOR"]

_LOGS = "`kubectl logs -n NAMESPACE deployment/hostprep-operator`"

_DOWN = f"""\
(
    count by (cluster) (up{{job="{AGENT_JOB}"}})
  unless on (cluster)
    up{{job="{OPERATOR_JOB}"}} == 1
)
or
absent(up{{job="{OPERATOR_JOB}"}} == 1)"""

OPERATOR = Group(
    "hostprep.operator",
    (
        Alert(
            name="HostprepOperatorDown",
            expr=_DOWN,
            hold="5m",
            severity="critical",
            summary="The operator does not run.",
            description="No replica of the operator has answered for 5 minutes. Prepared memory "
            "stays and engines can attach, but new and rebooted nodes are not opened: scaling up "
            "stands still. `kubectl get pods -A -l app.kubernetes.io/component=operator`.",
        ),
        Alert(
            name="HostprepOperatorNoLeader",
            expr="max by (cluster) (hostprep_operator_leader) == 0",
            hold="5m",
            severity="critical",
            summary="No replica of the operator leads.",
            description="Replicas of the operator run, and for 5 minutes none has held the Lease, "
            "so none works. See who holds it and since when: `kubectl get lease -A | grep "
            f"hostprep`, and {_LOGS}.",
        ),
        Alert(
            name="HostprepOperatorNotSynced",
            # Compared every ten minutes, and whenever a watch was broken.
            expr="time() - max by (cluster) (hostprep_operator_last_sync_timestamp_seconds) > 1500",
            hold="2m",
            severity="critical",
            summary="The operator works from an old view.",
            description="The operator last compared its view with the API server "
            "{{ $value | humanizeDuration }} ago, instead of every ten minutes: it may not list "
            f"something, or gets no answer. Nodes may not be opened or closed. See {_LOGS}.",
        ),
        Alert(
            name="HostprepOperatorQueueGrowing",
            expr="min_over_time(hostprep_operator_queue_depth[10m]) > 100",
            hold="5m",
            severity="warning",
            summary="The operator does not keep up.",
            description="At least {{ $value }} objects have waited for the operator throughout the "
            "last 10 minutes, so nodes are opened late. Look at reconcile durations on the "
            "dashboard, and at throttling by the API server (429) or of the pod's CPU.",
        ),
        Alert(
            name="HostprepReconcileErrors",
            expr="sum by (cluster, kind, reason) "
            "(increase(hostprep_operator_reconcile_errors_total[5m])) > 0",
            hold="15m",
            severity="warning",
            summary="Reconciles of {{ $labels.kind }} keep failing ({{ $labels.reason }}).",
            description="Reconciles of {{ $labels.kind }} have failed for 15 minutes with "
            '{{ $labels.reason }} ({{ $value | printf "%.0f" }} in the last 5); they are tried '
            f"again, but what they were for is not done. {_LOGS} names the objects.",
        ),
        Alert(
            name="HostprepVersionSkew",
            expr="count by (cluster) (count by (cluster, version) (hostprep_build_info)) > 1",
            hold="2h",
            severity="info",
            summary="{{ $value }} versions of Hostprep run side by side.",
            description="{{ $value }} versions have run side by side for 2 hours: a roll-out is "
            "stuck, or was forgotten. `kubectl rollout status -n NAMESPACE "
            "daemonset/hostprep-agent`.",
        ),
    ),
)
