"""A pool and one node, as most stories begin."""

from __future__ import annotations

from typing import Any

from tests.unit.hostprep_operator.reconcile.cluster_model import Cluster
from tests.unit.hostprep_operator.reconcile.write_checks import check_write

LABEL = "ready.hostprep.dev/kv"


def joining(*, name: str = "n1", tainted: bool = True, **spec: Any) -> Cluster:
    """A pool, and a node that joins later."""
    cluster = Cluster(check=check_write)
    cluster.add_pool("kv", **spec)
    cluster.now_s += 10
    cluster.add_node(name, tainted=tainted)
    cluster.add_agent(name)
    return cluster


def opened(*, name: str = "n1", tainted: bool = True, **spec: Any) -> Cluster:
    cluster = joining(name=name, tainted=tainted, **spec)
    cluster.reconcile(name)
    cluster.now_s += 20
    cluster.agent_reports(name)
    cluster.reconcile(name)
    return cluster


def labels(cluster: Cluster, name: str = "n1") -> set[str]:
    keys = cluster.nodes[name]["metadata"]["labels"]
    return {key for key in keys if key.startswith("ready.")}
