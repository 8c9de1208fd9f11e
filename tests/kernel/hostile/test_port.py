"""Whoever reaches the agent's port: probes are answered all the same, and the log stays short."""

from __future__ import annotations

import contextlib
import http.client
import resource
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from testbed.agent_process import AgentProcess
from testbed.processes import wait_for
from tests.kernel.hostile.attackers import STRANGER

pytestmark = pytest.mark.kernel

_NO_SERVER = """\
apiVersion: v1
kind: Config
clusters: [{name: none, cluster: {server: "http://127.0.0.1:9"}}]
contexts: [{name: none, context: {cluster: none, user: none}}]
current-context: none
users: [{name: none, user: {}}]
"""
_IDLE = 1100


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[AgentProcess]:
    """An agent that holds no memory, with as many files as a container gets."""
    kubeconfig = tmp_path / "kubeconfig"
    kubeconfig.write_text(_NO_SERVER)
    state = tmp_path / "state"
    state.mkdir()
    agent = AgentProcess("attacked", str(tmp_path / "root"), state, kubeconfig, interval_s=1.0)
    try:
        resource.prlimit(agent.pid, resource.RLIMIT_NOFILE, (1024, 1024))
        wait_for(lambda: agent.get("/readyz")[0] == 200, 30.0, why="not ready before the attack")
        yield agent
    finally:
        agent.close()


def _port(agent: AgentProcess) -> int:
    return int(next(line["port"] for line in agent.log() if "port" in line))


def _connect(port: int) -> socket.socket:
    one = socket.socket()
    one.settimeout(5.0)
    one.connect(("127.0.0.1", port))
    return one


def _lift_own_limit() -> None:
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))


def _probes_are_answered(agent: AgentProcess, *, times: int = 5) -> None:
    """As the chart's probes ask: /healthz and /readyz within two and three seconds."""
    for path, timeout_s in [("/healthz", 2.0), ("/readyz", 3.0)] * times:
        connection = http.client.HTTPConnection("127.0.0.1", _port(agent), timeout=timeout_s)
        connection.request("GET", path)
        assert connection.getresponse().status == 200, path
        connection.close()


def test_idle_connections_keep_no_probe_from_being_answered(agent: AgentProcess) -> None:
    port = _port(agent)

    def attack() -> list[socket.socket]:
        _lift_own_limit()
        return [_connect(port) for _ in range(_IDLE)]

    lines = len(agent.log_text().splitlines())
    with STRANGER.keeps(attack):
        _probes_are_answered(agent)
    refused = [line for line in agent.log() if line["event"] == "connections_refused"]
    assert len(refused) == 1, "the attack was not noticed, or too often"
    assert len(agent.log_text().splitlines()) <= lines + 10


def test_connecting_again_and_again_keeps_no_probe_from_being_answered(
    agent: AgentProcess,
) -> None:
    port = _port(agent)

    kept: list[socket.socket] = []

    def connect() -> None:
        with contextlib.suppress(OSError):
            kept.append(_connect(port))
            kept[-1].send(b"GET /metrics HTTP/1.1\r\n")  # and never the rest
        del kept[:-_IDLE]

    def connect_for_ever() -> None:
        while True:
            connect()

    def attack() -> threading.Thread:
        _lift_own_limit()
        for _ in range(_IDLE):
            connect()
        thread = threading.Thread(target=connect_for_ever, daemon=True)
        thread.start()
        return thread

    lines = len(agent.log_text().splitlines())
    with STRANGER.keeps(attack):
        _probes_are_answered(agent, times=10)
    assert len(agent.log_text().splitlines()) <= lines + 20
