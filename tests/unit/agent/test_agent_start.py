"""The start: a port that is open before its server, and before anything is changed."""

from __future__ import annotations

import asyncio
import json
import socket
from pathlib import Path

import pytest
from aiohttp import ClientSession, web
from kubernetes.aio.client.configuration import Configuration

from hostprep.agent.health import HealthServer
from hostprep.agent.kube import NodeApi
from hostprep.agent.listener import Listener
from hostprep.agent.metrics import Metrics
from hostprep.errors import BadInputError
from tests.support.agent_process import run_agent

pytestmark = pytest.mark.unit


def test_who_asks_before_there_is_a_server_waits_for_it() -> None:
    async def ask() -> tuple[int, str]:
        listener = Listener.open("127.0.0.1:0")
        server = HealthServer(listener, Metrics(), lambda: None, lambda: "not yet")
        async with ClientSession(f"http://127.0.0.1:{listener.port}") as client:
            asked = asyncio.create_task(client.get("/readyz"))
            await asyncio.sleep(0.2)
            assert not asked.done()
            await server.start()
            answer = await asked
            said = answer.status, await answer.text()
        await server.stop()
        listener.close()
        return said

    assert asyncio.run(asyncio.wait_for(ask(), 30)) == (503, "not yet\n")


def test_a_port_outlives_its_server_for_the_next_one() -> None:
    async def ask_two() -> list[int]:
        listener, statuses = Listener.open("127.0.0.1:0"), []
        for why_not in (lambda: None, lambda: "stopping"):
            server = HealthServer(listener, Metrics(), lambda: None, why_not)
            await server.start()
            async with ClientSession(f"http://127.0.0.1:{listener.port}") as client:
                async with client.get("/readyz") as answer:
                    statuses.append(answer.status)
            await server.stop()
        listener.close()
        return statuses

    assert asyncio.run(asyncio.wait_for(ask_two(), 30)) == [200, 503]


def test_without_a_host_it_listens_on_every_address() -> None:
    listener = Listener.open(":0")
    families = [one.family for one in listener.sockets]
    listener.close()
    assert socket.AF_INET in families
    assert len(families) == len(set(families))


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


@pytest.mark.parametrize("host", ["256.1.1.1", "no such host", "." * 70])
def test_an_address_that_is_none_is_refused(host: str) -> None:
    with pytest.raises(BadInputError, match="cannot listen on"):
        Listener.open(f"{host}:9808")


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


def test_a_watch_goes_on_from_what_was_asked_before() -> None:
    async def watch() -> list[tuple[str, str]]:
        server = _Server()
        app = web.Application()
        app.router.add_get("/{any:.*}", server.answer)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        api = NodeApi("n1", Configuration(f"http://127.0.0.1:{runner.addresses[0][1]}"), None)
        first, version = await api.ask()
        assert api.connected
        changed = await anext(aiter(api.watch(version)))
        await api.close()
        await runner.cleanup()
        assert first.document == changed.document == _ITEM
        return server.asked[:2]

    assert asyncio.run(asyncio.wait_for(watch(), 30)) == [("", ""), ("true", "7")]
