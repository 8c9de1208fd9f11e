"""A node with real memory, its HostMemoryNode, and agents with the chart's rights."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from hostprep.node.apply.service import Node
from testbed.agent_process import AgentProcess
from testbed.control_plane import ControlPlane
from testbed.machine import clean_node, machine_lock
from tests.cluster.agent_objects import Hmn
from tests.cluster.charts import NAMESPACE, cluster_with_the_chart

Start = Callable[..., AgentProcess]


@pytest.fixture(scope="module")
def cluster() -> Iterator[ControlPlane]:
    with machine_lock(), cluster_with_the_chart() as cluster:
        yield cluster


@pytest.fixture
def memory() -> Iterator[Node]:
    if os.geteuid() != 0:
        pytest.skip("needs root: huge pages and mounts")
    with clean_node() as node:
        yield node


@pytest.fixture
def hmn(cluster: ControlPlane) -> Iterator[Hmn]:
    hmn = Hmn(cluster.api, f"node-{secrets.token_hex(4)}")
    yield hmn
    cluster.api.delete(hmn.path)


@pytest.fixture
def start(cluster: ControlPlane, memory: Node, hmn: Hmn, tmp_path: Path) -> Iterator[Start]:
    """Start an agent of the node, by a token that the chart's rights hold for."""
    started: list[AgentProcess] = []
    cluster.api.create("/api/v1/nodes", {"metadata": {"name": hmn.name}})

    def begin(
        *options: str, kubeconfig: Path | None = None, state: str = "state", **more: Any
    ) -> AgentProcess:
        if kubeconfig is None:
            kubeconfig = cluster.token_kubeconfig(NAMESPACE, "hostprep-agent", node=hmn.name)
        agent = AgentProcess(hmn.name, memory.root, tmp_path / state, kubeconfig, *options, **more)
        started.append(agent)
        return agent

    yield begin
    for agent in started:
        agent.close()
    cluster.api.delete(f"/api/v1/nodes/{hmn.name}")
