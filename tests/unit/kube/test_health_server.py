"""A port that is open before its server, and what the server answers."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import structlog.testing
from aiohttp import ClientSession, ClientTimeout

from hostprep.errors import BadInputError
from hostprep.kube.health_server import (
    HealthServer,
    Listener,
    MisuseLog,
    max_connections,
    parse_listen,
)

pytestmark = pytest.mark.unit


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (":9808", (None, 9808)),
        ("127.0.0.1:0", ("127.0.0.1", 0)),
        ("[::1]:80", ("::1", 80)),
        ("localhost:80", ("localhost", 80)),
    ],
)
def test_addresses_to_listen_on(text: str, expected: tuple[str | None, int]) -> None:
    assert parse_listen(text) == expected


@pytest.mark.parametrize("text", ["", "9808", ":", ":port", ":65536", ":-1", "a b:1", "host:"])
def test_no_address_is_refused(text: str) -> None:
    with pytest.raises(BadInputError, match="no address.*--listen"):
        parse_listen(text)


def test_who_asks_before_there_is_a_server_waits_for_it() -> None:
    async def ask() -> tuple[int, str]:
        listener = Listener.open("127.0.0.1:0")
        server = HealthServer(listener, lambda: b"", lambda: None, lambda: "not yet")
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
            server = HealthServer(listener, lambda: b"", lambda: None, why_not)
            await server.start()
            async with ClientSession(f"http://127.0.0.1:{listener.port}") as client:
                async with client.get("/readyz") as answer:
                    statuses.append(answer.status)
            await server.stop()
        listener.close()
        return statuses

    assert asyncio.run(asyncio.wait_for(ask_two(), 30)) == [200, 503]


def test_stopping_twice_does_no_harm_even_with_the_port_closed_between() -> None:
    async def stop_twice() -> None:
        server = HealthServer(Listener.open("127.0.0.1:0"), bytes, lambda: None, lambda: None)
        await server.start()
        await server.stop()
        server.listener.close()
        await server.stop()

    asyncio.run(asyncio.wait_for(stop_twice(), 30))


def test_without_a_host_it_listens_on_every_address() -> None:
    listener = Listener.open(":0")
    families = [one.family for one in listener.sockets]
    listener.close()
    assert socket.AF_INET in families
    assert len(families) == len(set(families))


@pytest.mark.parametrize("host", ["256.1.1.1", "no such host", "." * 70])
def test_an_address_that_is_none_is_refused(host: str) -> None:
    with pytest.raises(BadInputError, match="cannot listen on"):
        Listener.open(f"{host}:9808")


# --- a port that others misuse


@pytest.fixture
def log_lines(caplog: pytest.LogCaptureFixture) -> Iterator[Callable[[], int]]:
    """Count the lines of our own loggers and of asyncio's, however logs are configured."""
    with structlog.testing.capture_logs() as lines:
        yield lambda: len(lines) + sum(one.name == "asyncio" for one in caplog.records)


@asynccontextmanager
async def _serving(
    *,
    metrics: Callable[[], bytes] = lambda: b"one 1\n",
    why_not: Callable[[], str | None] = lambda: None,
    connection_s: float = 10.0,
) -> AsyncIterator[int]:
    """Run a server, and yield its port."""
    listener = Listener.open("127.0.0.1:0")
    server = HealthServer(listener, metrics, why_not, lambda: None, connection_s=connection_s)
    await server.start()
    try:
        yield listener.port
    finally:
        await server.stop()
        listener.close()


async def _status(port: int, path: str = "/healthz") -> int:
    async with ClientSession(timeout=ClientTimeout(total=2)) as client:
        async with client.get(f"http://127.0.0.1:{port}{path}") as answer:
            await answer.read()
            return answer.status


async def _say(port: int, text: bytes) -> bytes:
    """Send that, and return everything that comes until the server closes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(text)
    answer = await asyncio.wait_for(reader.read(), 5)
    writer.close()
    return answer


async def _connect(port: int, source: str = "127.0.0.1") -> socket.socket:
    one = socket.socket()
    one.setblocking(False)
    one.bind((source, 0))
    await asyncio.get_running_loop().sock_connect(one, ("127.0.0.1", port))
    return one


def _is_open(one: socket.socket) -> bool:
    try:
        return one.recv(1) != b""
    except BlockingIOError:
        return True
    except ConnectionResetError:
        return False


def test_probes_are_answered_beside_1100_idle_connections(
    log_lines: Callable[[], int],
) -> None:
    async def attack() -> tuple[list[int], int]:
        async with _serving() as port:
            idle = [await _connect(port) for _ in range(1100)]
            statuses = [await _status(port, path) for path in ("/healthz", "/readyz", "/metrics")]
            still_open = sum(_is_open(one) for one in idle)
            for one in idle:
                one.close()
            return statuses, still_open

    statuses, still_open = asyncio.run(asyncio.wait_for(attack(), 60))
    assert statuses == [200, 200, 200]
    assert still_open <= max_connections()
    assert log_lines() == 1


def test_the_address_with_most_connections_gives_way() -> None:
    async def attack() -> tuple[bool, list[bool]]:
        async with _serving() as port:
            slow = await _connect(port)  # it came first: the oldest of all
            many = [await _connect(port, "127.0.0.2") for _ in range(max_connections() + 20)]
            await asyncio.sleep(0.2)
            result = _is_open(slow), [_is_open(one) for one in many]
            for one in (slow, *many):
                one.close()
            return result

    slow, many = asyncio.run(asyncio.wait_for(attack(), 60))
    assert slow
    # The oldest go, as many as are too many; the newest stay.
    assert many == [False] * 21 + [True] * (len(many) - 21)


def test_a_connection_that_sends_nothing_or_too_slowly_ends() -> None:
    async def attack() -> tuple[bytes, bytes]:
        async with _serving(connection_s=0.3) as port:
            return await _say(port, b""), await _say(port, b"GET /healthz HTTP/1.1\r\n")

    assert asyncio.run(asyncio.wait_for(attack(), 30)) == (b"", b"")


def test_a_connection_that_reads_nothing_ends() -> None:
    async def attack() -> bytes:
        # More than the kernel's buffers take.
        async with _serving(metrics=lambda: b"x" * 40_000_000, connection_s=0.3) as port:
            return (await _say(port, b"GET /metrics HTTP/1.1\r\n\r\n"))[:15]

    async def attack_reading_nothing() -> int:
        async with _serving(metrics=lambda: b"x" * 40_000_000, connection_s=0.3) as port:
            one = await _connect(port)
            one.send(b"GET /metrics HTTP/1.1\r\n\r\n")
            await asyncio.sleep(1.0)
            received = 0
            with contextlib.suppress(ConnectionError):
                while got := await asyncio.get_running_loop().sock_recv(one, 1 << 20):
                    received += len(got)
            one.close()
            return received

    assert asyncio.run(asyncio.wait_for(attack(), 30)) == b"HTTP/1.1 200 OK"
    assert asyncio.run(asyncio.wait_for(attack_reading_nothing(), 30)) < 40_000_000


@pytest.mark.parametrize(
    ("request_", "status"),
    [
        (b"GET /healthz HTTP/1.1\r\nHost: a\r\n\r\nGET /healthz HTTP/1.1\r\n\r\n", 200),
        (b"GET /metrics?name[]=one HTTP/1.0\r\n\r\n", 200),
        (b"GET /secret HTTP/1.1\r\n\r\n", 404),
        (b"POST /healthz HTTP/1.1\r\n\r\n", 405),
        (b"\x16\x03\x01\x02\x00\x01\r\n\r\n", 400),
        (b"GET /healthz\r\n\r\n", 400),
        (b"GET /" + b"a" * 20_000, 431),
    ],
)
def test_a_connection_has_one_answer(request_: bytes, status: int) -> None:
    async def ask() -> bytes:
        async with _serving() as port:
            return await _say(port, request_[:8192])

    answer = asyncio.run(asyncio.wait_for(ask(), 30))
    assert answer.startswith(f"HTTP/1.1 {status} ".encode())
    assert answer.count(b"HTTP/1.1") == 1 + (status == 400)  # which is in the reason
    assert b"\r\nConnection: close\r\n" in answer


def test_a_head_request_is_answered_without_a_body() -> None:
    async def ask() -> bytes:
        async with _serving() as port:
            return await _say(port, b"HEAD /metrics HTTP/1.1\r\n\r\n")

    answer = asyncio.run(asyncio.wait_for(ask(), 30))
    assert b"Content-Length: 6\r\n" in answer
    assert answer.endswith(b"\r\n\r\n")


def test_bad_requests_make_one_line_of_log(log_lines: Callable[[], int]) -> None:
    async def attack() -> None:
        async with _serving() as port:
            for _ in range(200):
                await _say(port, b"nonsense\r\n\r\n")

    asyncio.run(asyncio.wait_for(attack(), 30))
    assert log_lines() == 1


def test_the_next_line_of_log_says_what_came_meanwhile() -> None:
    lines: list[dict[str, Any]] = []

    class Log:
        def warning(self, event: str, **keys: Any) -> None:
            lines.append({"event": event, **keys})

        info = error = warning

    clock = iter([0.0, 1.0, 30.0, 60.0])
    misuse = MisuseLog(Log(), clock=lambda: next(clock))
    for what in ("status 400", "status 400", "timed out", "status 400"):
        misuse.count(what)
    assert lines == [
        {"event": "connections_refused", "counts": {"status 400": 1}},
        {"event": "connections_refused", "counts": {"status 400": 2, "timed out": 1}},
    ]


def test_what_cannot_be_said_does_not_end_the_server() -> None:
    async def ask() -> tuple[int, list[int]]:
        def fail() -> bytes:
            raise ValueError

        async with _serving(metrics=fail, why_not=lambda: "pool \udcff") as port:
            return await _status(port, "/metrics"), [await _status(port) for _ in range(2)]

    assert asyncio.run(asyncio.wait_for(ask(), 30)) == (500, [503, 503])


def test_a_process_without_descriptors_answers_again_once_it_has_some(
    log_lines: Callable[[], int],
) -> None:
    async def attack() -> int:
        async with _serving() as port:
            first = await _connect(port)
            held: list[int] = []
            client = socket.socket()
            client.setblocking(False)
            with contextlib.suppress(OSError):
                while True:
                    held.append(os.dup(first.fileno()))
            await asyncio.get_running_loop().sock_connect(client, ("127.0.0.1", port))
            await asyncio.sleep(0.5)
            for fd in held:
                os.close(fd)
            status = await _status(port)
            first.close()
            client.close()
            return status

    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, limits[1]))
    try:
        assert max_connections() == 64
        assert asyncio.run(asyncio.wait_for(attack(), 30)) == 200
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert log_lines() == 1
