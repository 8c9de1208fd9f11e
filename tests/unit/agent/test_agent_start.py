"""The start: a port that is open before its server, and before anything is changed."""

from __future__ import annotations

import asyncio
import json
import socket
from pathlib import Path

import pytest
from aiohttp import web
from kubernetes.aio.client.configuration import Configuration

from hostprep.agent.node_api import NodeApi
from hostprep.errors import BadInputError
from hostprep.kube.client import KubeClient
from hostprep.kube.health_server import Listener
from hostprep.kube.logs import make_logger
from testbed.agent_process import run_agent

pytestmark = pytest.mark.unit


def test_a_port_that_others_have_is_refused_before_anything_is_changed(tmp_path: Path) -> None:
    root, state = tmp_path / "root", tmp_path / "state"
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(BadInputError, match="cannot listen on 127.0.0.1") as caught:
            Listener.open(address)
        options = ("--node-name", "a", "--allow-cgroup-v1", "--listen", address)
        done = run_agent(str(root), state, *options)
    assert caught.value.reason == "CannotListen"
    assert done.returncode == 2, done.stderr
    assert "cannot listen on" in done.stderr
    assert not root.exists()
    assert [path.name for path in state.iterdir()] == ["agent.lock"]


_ITEM = {"metadata": {"name": "n1", "resourceVersion": "8"}}


class _Server:
    """An API server that has one object, and writes down what it is asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, str]] = []

    async def answer(self, request: web.Request) -> web.StreamResponse:
        query = request.query
        self.asked.append((query.get("watch", ""), query.get("resourceVersion", "")))
        if "watch" not in query:
            return web.json_response({"items": [_ITEM], "metadata": {"resourceVersion": "7"}})
        return web.Response(text=json.dumps({"type": "MODIFIED", "object": _ITEM}) + "\n")


def test_a_watch_goes_on_from_the_version_of_the_list() -> None:
    async def watch() -> list[tuple[str, str]]:
        server = _Server()
        app = web.Application()
        app.router.add_get("/{any:.*}", server.answer)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        api = NodeApi("n1", KubeClient(Configuration(url)), make_logger("test"))
        observed = aiter(api.watch())
        first = await anext(observed)
        assert api.connected
        changed = await anext(observed)
        await api.close()
        await runner.cleanup()
        assert first == changed == _ITEM
        return server.asked[:2]

    assert asyncio.run(asyncio.wait_for(watch(), 30)) == [("", ""), ("true", "7")]
