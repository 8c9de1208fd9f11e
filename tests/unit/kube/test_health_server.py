"""A port that is open before its server, and what the server answers."""

from __future__ import annotations

import asyncio
import socket

import pytest
from aiohttp import ClientSession

from hostprep.errors import BadInputError
from hostprep.kube.health_server import HealthServer, Listener, parse_listen

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
