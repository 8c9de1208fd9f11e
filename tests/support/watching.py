"""A plain list and watch for tests, on connections of its own."""

from __future__ import annotations

import http.client
import json
import threading
import time
from collections.abc import Iterator
from typing import Any

from testbed.api import Api, ApiError

__all__ = ["watch"]

JsonObject = dict[str, Any]
_ANSWER_S = 10.0
_QUIET_S = 0.5
_RETRY_S = 0.1


class _ExpiredError(Exception):
    """The server has forgotten what followed that version."""


def watch(api: Api, path: str, stop: threading.Event) -> Iterator[tuple[str, JsonObject]]:
    """Yield (ADDED, MODIFIED or DELETED, object) until stopped.

    Goes on after the last thing seen; lists anew, as ADDED, only where the server has forgotten
    what followed it, as one that was killed has.
    """
    version = ""
    while not stop.is_set():
        try:
            if not version:
                listed = api.get(path)
                version = listed["metadata"]["resourceVersion"]
                for item in listed.get("items") or []:
                    yield "ADDED", item
            for kind, document in _stream(api, path, version, stop):
                version = document["metadata"]["resourceVersion"]
                yield kind, document
        except _ExpiredError:
            version = ""
        except TimeoutError:
            continue  # nothing happened for a while
        except (OSError, ApiError, http.client.HTTPException, ValueError):
            time.sleep(_RETRY_S)


def _stream(
    api: Api, path: str, version: str, stop: threading.Event
) -> Iterator[tuple[str, JsonObject]]:
    """Yield what happens until all is quiet: after a timeout a connection cannot be read again."""
    connection = http.client.HTTPSConnection(api._address, context=api._context, timeout=_ANSWER_S)
    try:
        query = f"watch=1&resourceVersion={version}&timeoutSeconds=600"
        connection.request("GET", f"{path}?{query}", headers=api._headers)
        sock = connection.sock
        answer = connection.getresponse()
        _check(answer.status)
        sock.settimeout(_QUIET_S)
        rest = b""
        while not stop.is_set():
            data = answer.read1(1 << 20)
            if not data:
                return
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                event = json.loads(line)
                if event["type"] == "ERROR":
                    _check(event["object"]["code"])
                yield event["type"], event["object"]
    finally:
        connection.close()


def _check(status: int) -> None:
    if status == http.HTTPStatus.GONE:
        raise _ExpiredError
    if status != http.HTTPStatus.OK:
        raise ConnectionError(f"the watch ended with {status}")
