"""Agents of many nodes, simulated in one process: they watch their objects and report status."""

from __future__ import annotations

import http.client
import json
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from hostprep.api.node_resource import NodeStatus, Phase, PoolEntry, PoolStatus, entries_of
from testbed.api import Api, ApiError
from testbed.operator_process import HMNS, NODES

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


_SIZE = 64 << 20


def _ready(entry: PoolEntry) -> Phase:
    return Phase.RELEASING if entry.absent else Phase.READY


def _age(hmn: JsonObject) -> int:
    return int(hmn["metadata"]["resourceVersion"])


def _is_answered(hmn: JsonObject) -> bool:
    status = hmn.get("status") or {}
    return bool(status.get("observedGeneration") == hmn["metadata"]["generation"])


class SimulatedAgents:
    """`phase` says how an entry stands; an absent one that is not held is gone at once."""

    def __init__(self, api: Api) -> None:
        self._api = api
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self.phase: Callable[[str, PoolEntry], Phase] = lambda _node, entry: _ready(entry)
        self.held: set[str] = set()
        """Nodes on which an engine holds a lease: they say so, and do not release."""
        self.silent: set[str] = set()
        """Nodes whose agent does not answer."""
        self.writes = 0
        self._known: dict[str, JsonObject] = {}
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop answering."""
        self._stop.set()
        self._thread.join(10)

    def report(self, *nodes: str) -> int:
        """Have these nodes' agents look again now, all of them when none is named.

        Returns how many statuses were written.
        """
        before = self.writes
        for name in nodes or list(self._known):
            hmn = self._known.get(name)
            if hmn is not None:
                self._answer(hmn)
        return self.writes - before

    def _run(self) -> None:
        for kind, hmn in watch(self._api, HMNS, self._stop):
            name = hmn["metadata"]["name"]
            if kind == "DELETED":
                self._known.pop(name, None)
                continue
            newest = self._known[name] = self._newest(hmn)
            if not _is_answered(newest):
                self._answer(newest)

    def _newest(self, hmn: JsonObject) -> JsonObject:
        """Return what our own last write showed where the event is older: a mere echo mostly."""
        known = self._known.get(hmn["metadata"]["name"], hmn)
        return known if _age(known) >= _age(hmn) else hmn

    def _answer(self, hmn: JsonObject) -> None:
        name = hmn["metadata"]["name"]
        if name in self.silent:
            return
        with self._lock:
            try:
                self._write(name, hmn)
            except (ApiError, OSError):
                self._known[name] = hmn  # gone or unreachable: the next event says more

    def _write(self, name: str, hmn: JsonObject) -> None:
        node = self._api.get(f"{NODES}/{name}")
        status = self._status(name, hmn, node["status"]["nodeInfo"]["bootID"]).to_json()
        if status == hmn.get("status"):
            return
        self.writes += 1
        body = {"metadata": {"uid": hmn["metadata"]["uid"]}, "status": status}
        self._known[name] = self._api.patch(f"{HMNS}/{name}/status", body)

    def _status(self, name: str, hmn: JsonObject, boot_id: str) -> NodeStatus:
        entries = [e for e in entries_of(hmn) if not e.absent or name in self.held]
        return NodeStatus(
            observed_generation=hmn["metadata"]["generation"],
            boot_id=boot_id,
            agent_version="simulated",
            pools=tuple(self._pool(name, entry) for entry in entries),
        )

    def _pool(self, name: str, entry: PoolEntry) -> PoolStatus:
        phase = Phase.RELEASING if entry.absent else self.phase(name, entry)
        return PoolStatus(
            name=entry.name,
            uid=entry.uid,
            generation=entry.generation,
            phase=phase,
            reason=phase.value,
            wanted_bytes=_SIZE,
            ready_bytes=_SIZE if phase is Phase.READY else 0,
            regions_leased=int(name in self.held),
        )
