"""The agent and an API server that is slow, overloaded, or has made the object anew."""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import Mapping
from typing import Any

import pytest
from aiohttp import web
from kubernetes.aio.client.configuration import Configuration

from hostprep.agent.messages import ReconcileResult
from hostprep.agent.metrics import Metrics
from hostprep.agent.node_api import NodeApi
from hostprep.agent.reporter import Reporter
from hostprep.agent.state import AgentState
from hostprep.kube.client import KubeClient
from hostprep.kube.logs import make_logger, set_up_logs
from tests.support.agent_values import (
    desired_state_of,
    entry_of,
    observation_of,
    pool_observation,
    region,
    result_of,
)

pytestmark = pytest.mark.unit

JsonObject = dict[str, Any]


class _Answers:
    """An API server that lists, and answers every watch with one status."""

    def __init__(self, watch_status: int) -> None:
        self._watch_status = watch_status
        self.lists = 0

    async def answer(self, request: web.Request) -> web.Response:
        if "watch" in request.query:
            return web.json_response({"message": "no"}, status=self._watch_status)
        self.lists += 1
        return web.json_response({"items": [], "metadata": {"resourceVersion": "7"}})

    async def watched_for(self, seconds: float) -> int:
        """How often the list is read while somebody watches for so long."""
        app = web.Application()
        app.router.add_get("/{any:.*}", self.answer)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        api = NodeApi("n1", KubeClient(Configuration(url), throttled_tries=1), make_logger("test"))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                async for _ in api.watch():
                    pass
        await api.close()
        await runner.cleanup()
        return self.lists


@pytest.mark.parametrize("status", [403, 410, 429, 500])
def test_a_server_that_lists_and_refuses_to_watch_is_asked_ever_less_often(status: int) -> None:
    assert 1 <= asyncio.run(_Answers(status).watched_for(3.0)) <= 5


class _Lines:
    """A log that is kept, until something is said that is waited for."""

    def __init__(self, last: str) -> None:
        self._last = last
        self.is_over = asyncio.Event()
        self.said: list[tuple[str, dict[str, Any]]] = []

    def info(self, event: str, **keys: Any) -> None:
        self.said.append((event, keys))
        if event == self._last:
            self.is_over.set()

    warning = error = info


async def _answer_by(steps: list[int], request: web.Request) -> web.StreamResponse:
    """Refuse as the steps say, one a request; then grant everything."""
    if steps:
        body = {"kind": "Status", "message": f"refused by {steps[0]}"}
        return web.json_response(body, status=steps.pop(0))
    if "watch" not in request.query:
        return web.json_response({"items": [], "metadata": {"resourceVersion": "7"}})
    stream = web.StreamResponse()
    await stream.prepare(request)
    await asyncio.sleep(60)
    return stream


def test_why_there_is_no_api_server_is_logged_once_for_each_reason_and_its_return() -> None:
    async def scene() -> tuple[str, _Lines]:
        steps, log = [403, 403, 401], _Lines("api_back")
        app = web.Application()
        app.router.add_get("/{any:.*}", functools.partial(_answer_by, steps))
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        api = NodeApi("n1", KubeClient(Configuration(url)), log)
        await _watch_until(api, log.is_over)
        await runner.cleanup()
        return url, log

    url, log = asyncio.run(scene())
    assert log.said == [
        ("api_away", {"error": "HTTP 403: refused by 403", "url": url}),
        ("api_away", {"error": "HTTP 401: refused by 401", "url": url}),
        ("api_back", {"url": url}),
    ]


def test_a_connection_that_is_refused_is_said_to_be() -> None:
    log = _Lines("api_away")
    api = NodeApi("n1", KubeClient(Configuration("http://127.0.0.1:1")), log)

    asyncio.run(_watch_until(api, log.is_over))

    event, keys = log.said[0]
    assert (event, keys["url"]) == ("api_away", "http://127.0.0.1:1")
    assert "Cannot connect" in keys["error"]


async def _watch_until(api: NodeApi, is_over: asyncio.Event) -> None:
    async def watch() -> None:
        async for _ in api.watch():
            pass

    task = asyncio.create_task(watch())
    async with asyncio.timeout(20):
        await is_over.wait()
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
    await api.close()


class _SlowApi(NodeApi):
    """Its answer to a write comes after the watch has brought the next object of that name."""

    def __init__(self) -> None:
        self.reporter: Reporter | None = None
        self.uids: list[str] = []

    async def patch_status(self, patch: Mapping[str, Any], *, uid: str) -> JsonObject:
        self.uids.append(uid)
        if self.reporter is not None and uid == "first":
            self.reporter.observe(None)
            self.reporter.observe(_object("second", 9))
        return _object(uid, 5 if uid == "first" else 10) | {"status": dict(patch)}


def _object(uid: str, version: int) -> JsonObject:
    return {"metadata": {"uid": uid, "resourceVersion": str(version)}, "status": {}}


def test_a_late_answer_of_an_object_that_was_made_anew_does_not_hide_the_new_one() -> None:
    async def scene() -> list[str]:
        state = AgentState(Metrics())
        state.set_desired(desired_state_of(entry_of()))
        number = state.request(now_s=0).number
        done = ReconcileResult(
            number, observation_of(pool_observation(region())), (result_of(entry_of()),), busy=False
        )
        state.take(done, now_s=0, wall_s=0)
        api = _SlowApi()
        set_up_logs(style="json", level="error")
        reporter = Reporter(state, api, state.metrics, make_logger("agent"))
        api.reporter = reporter
        reporter.observe(_object("first", 4))
        await reporter.report()
        await reporter.report()
        return api.uids

    assert asyncio.run(scene()) == ["first", "second"]
