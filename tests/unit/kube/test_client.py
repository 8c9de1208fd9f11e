"""Answers of the API server, and of what is none, as typed errors."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable

import pytest
from aiohttp import web
from kubernetes.aio.client.configuration import Configuration

from hostprep.kube.client import HOST_MEMORY_NODES, NODES, KubeClient
from hostprep.kube.errors import (
    ApiError,
    ConflictError,
    ForbiddenError,
    GoneError,
    NoSuchResourceError,
    NotFoundError,
    RefusedError,
    ThrottledError,
    UnauthorizedError,
    UnreachableError,
    error_of,
)

pytestmark = pytest.mark.unit

Answer = Callable[[web.Request], web.Response]


@contextlib.asynccontextmanager
async def _server(answer: Answer) -> AsyncIterator[str]:
    async def handle(request: web.Request) -> web.Response:
        return answer(request)

    app = web.Application()
    app.router.add_route("*", "/{any:.*}", handle)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


def _status(code: int, headers: dict[str, str] | None = None) -> web.Response:
    return web.json_response({"kind": "Status", "message": "no"}, status=code, headers=headers)


def test_a_missing_object_is_told_from_a_missing_resource() -> None:
    missing = b'{"kind":"Status","reason":"NotFound","details":{"name":"kv"}}'
    assert isinstance(error_of(404, missing), NotFoundError)
    error = error_of(404, b"404 page not found\n")
    assert isinstance(error, NoSuchResourceError)
    assert isinstance(error, RefusedError)
    assert error.reason == "NoSuchResource"


def test_errors_are_told_apart() -> None:
    assert isinstance(error_of(409, b"{}"), ConflictError)
    error = error_of(429, b"{}", retry_after="7")
    assert isinstance(error, ThrottledError)
    assert error.retry_after_s == 7
    refused = error_of(422, b'{"message":"spec.x: Invalid"}', request="PATCH x")
    assert isinstance(refused, RefusedError)
    assert "spec.x: Invalid" in str(refused)


@pytest.mark.parametrize(
    ("status", "kind", "reason"),
    [
        (400, RefusedError, "Refused"),
        (401, UnauthorizedError, "Refused"),
        (403, ForbiddenError, "Refused"),
        (409, ConflictError, "Conflict"),
        (410, GoneError, "Expired"),
        (429, ThrottledError, "TooMany"),
        (500, UnreachableError, "Unreachable"),
        (503, UnreachableError, "Unreachable"),
        (0, UnreachableError, "Unreachable"),
    ],
)
def test_reasons_are_those_of_the_metrics(status: int, kind: type[ApiError], reason: str) -> None:
    error = error_of(status, b"<html>\n no\n</html>")
    assert (type(error), error.reason, error.status) == (kind, reason, status)
    assert error.answer == "<html> no </html>"


def test_a_server_that_asks_for_patience_is_asked_again_and_then_reported() -> None:
    async def scene() -> list[str]:
        said: list[str] = []
        answers = [_status(429, {"Retry-After": "0"}) for _ in range(5)]
        answers.insert(1, web.json_response({"metadata": {"name": "n1"}}))
        async with _server(lambda _request: answers.pop(0)) as url:
            client = KubeClient(
                Configuration(url),
                on_write=lambda kind, result: said.append(f"{kind} {result}"),
            )
            assert await client.patch(NODES, "n1", {"a": 1}) == {"metadata": {"name": "n1"}}
            with pytest.raises(ThrottledError):
                await client.patch(NODES, "n1", {"a": 1})
            await client.close()
        assert not answers
        return said

    assert asyncio.run(scene()) == ["Node written", "Node toomany"]


def test_credentials_that_are_refused_are_read_again() -> None:
    async def scene() -> None:
        def answer(request: web.Request) -> web.Response:
            is_known = request.headers.get("Authorization") == "Bearer new"
            return web.json_response({"kind": "Node"}) if is_known else _status(401)

        async with _server(answer) as url:

            async def renew() -> Configuration:
                configuration = Configuration(url)
                configuration.api_key = {"BearerToken": "Bearer new"}
                return configuration

            client = KubeClient(Configuration(url), renew=renew)
            with pytest.raises(UnauthorizedError):
                await client.get(NODES, "n1")
            assert await client.get(NODES, "n1") == {"kind": "Node"}
            await client.close()

    asyncio.run(scene())


@pytest.mark.parametrize("text", ["<html>please log in</html>", "[]"])
def test_an_answer_that_is_no_json_is_trouble_on_the_way_and_not_the_end(text: str) -> None:
    async def scene() -> None:
        async with _server(lambda _request: web.Response(text=text)) as url:
            client = KubeClient(Configuration(url))
            with pytest.raises(UnreachableError, match="no JSON"):
                await client.get(NODES, "n1")
            await client.close()

    asyncio.run(scene())


def test_an_object_that_is_no_list_does_not_pass_for_an_empty_one() -> None:
    async def scene() -> None:
        async with _server(lambda _request: web.json_response({})) as url:
            client = KubeClient(Configuration(url))
            with pytest.raises(UnreachableError, match="no list"):
                _ = [page async for page in client.pages(HOST_MEMORY_NODES)]
            await client.close()

    asyncio.run(scene())


def test_a_watch_that_the_server_ends_with_an_error_raises_it() -> None:
    seen: list[tuple[str, str]] = []

    async def watch(client: KubeClient) -> None:
        async for event in client.watch(HOST_MEMORY_NODES, since="7"):
            seen.append((event.type, event.resource_version))

    async def scene() -> None:
        lines = (
            '{"type":"BOOKMARK","object":{"metadata":{"resourceVersion":"8"}}}\n'
            '{"type":"ERROR","object":{"kind":"Status","code":410,"message":"too old"}}\n'
        )
        async with _server(lambda _request: web.Response(text=lines)) as url:
            client = KubeClient(Configuration(url))
            with pytest.raises(GoneError, match="too old"):
                await watch(client)
            await client.close()

    asyncio.run(scene())
    assert seen == [("STARTED", "7"), ("BOOKMARK", "8")]
