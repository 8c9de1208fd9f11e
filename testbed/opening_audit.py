"""An independent witness: every opening of a node against what it says that it rests on.

It watches for the other irrevocable thing as well: an instruction to release a pool's memory.
"""

from __future__ import annotations

import json
import threading
import time
from dataclasses import dataclass
from typing import Any

from testbed.api import Api, ApiError
from testbed.operator_process import HMNS, NODES
from testbed.simulated_agents import watch

JsonObject = dict[str, Any]
_MARKS = "hostprep.dev/marks"
_LATE_S = 10.0
"""Two watches are not in step: a version that a node names may be seen after the node."""


@dataclass(frozen=True, slots=True)
class _Version:
    """What one version of a HostMemoryNode said."""

    boot_id: str
    waiting: tuple[str, ...]
    """Pools asked for and not Ready."""


@dataclass(frozen=True, slots=True)
class _Opening:
    """What a node's marks say. The same version may be abused for another boot."""

    name: str
    rests_on: str
    boot_id: str


class OpeningAudit:
    """Watches Nodes and HostMemoryNodes from its making to `check()` or `wrong_openings()`."""

    def __init__(self, api: Api) -> None:
        self.may_release: set[str] = set()
        """UIDs of pools that were deleted: add each before its deletion is asked for."""
        self.wrong_releases: list[str] = []
        """Absent entries of all other pools, where their nodes stay selected."""
        self._api = api
        self._stop = threading.Event()
        self._versions: dict[str, _Version] = {}
        self._openings: dict[_Opening, str] = {}
        """To the node's own boot at the first look; none where a list showed it, much later maybe.
        """
        self._threads = [
            threading.Thread(target=self._follow, args=(path, take), daemon=True)
            for path, take in ((HMNS, self._hmn), (NODES, self._node))
        ]
        for thread in self._threads:
            thread.start()

    @property
    def openings(self) -> int:
        """How many openings were seen."""
        return len(self._openings)

    def check(self) -> int:
        """Return how many openings were seen; raises AssertionError for one that was not right."""
        wrong = self.wrong_openings()
        assert not wrong, "\n".join(wrong)
        return self.openings

    def wrong_openings(self) -> list[str]:
        """Stop watching; return what is wrong, a sentence for each opening that was not right."""
        deadline = time.monotonic() + _LATE_S
        while self._unknown() and time.monotonic() < deadline:
            time.sleep(0.1)
        self._stop.set()
        for thread in self._threads:
            thread.join(10)
        for opening in self._unknown():
            self._read(opening.name, opening.rests_on)
        found = [
            _wrong(opening, boot_id, self._versions.get(opening.rests_on))
            for opening, boot_id in self._openings.items()
        ]
        return [sentence for sentence in found if sentence]

    def _unknown(self) -> list[_Opening]:
        return [one for one in list(self._openings) if one.rests_on not in self._versions]

    def _read(self, name: str, rests_on: str) -> None:
        """Ask for that very version: an API server that is killed does not show all to watchers."""
        try:
            listed = self._api.get(
                HMNS,
                fieldSelector=f"metadata.name={name}",
                resourceVersion=rests_on.partition("/")[2],
                resourceVersionMatch="Exact",
                limit="1",
            )
        except ApiError:
            return
        for document in listed["items"]:
            self._hmn("", document)

    def _follow(self, path: str, take: Any) -> None:
        for kind, document in watch(self._api, path, self._stop):
            if kind != "DELETED":
                take(kind, document)

    def _hmn(self, _kind: str, document: JsonObject) -> None:
        metadata, status = document["metadata"], document.get("status") or {}
        phases = {pool["name"]: pool["phase"] for pool in status.get("pools") or ()}
        waiting = []
        for entry in document["spec"].get("pools") or ():
            if entry["state"] == "Absent":
                self._release(metadata["name"], entry)
            elif phases.get(entry["name"]) != "Ready":
                waiting.append(entry["name"])
        version = _Version(status.get("bootID") or "", tuple(waiting))
        self._versions[f"{metadata['uid']}/{metadata['resourceVersion']}"] = version

    def _release(self, node: str, entry: JsonObject) -> None:
        if entry["uid"] not in self.may_release:
            self.wrong_releases.append(f"{node} was told to release {entry['name']}")

    def _node(self, kind: str, document: JsonObject) -> None:
        marks = json.loads(document["metadata"].get("annotations", {}).get(_MARKS, "{}"))
        if marks.get("openedAt") and not marks.get("closedAt"):
            # The first event that shows the opening; later ones may show a reboot after it.
            boot_id = "" if kind == "ADDED" else document["status"]["nodeInfo"]["bootID"]
            name = document["metadata"]["name"]
            opening = _Opening(name, marks["hmn"], marks["openedBoot"])
            self._openings.setdefault(opening, boot_id)


def _wrong(opening: _Opening, boot_id: str, version: _Version | None) -> str:
    name = opening.name
    if version is None:
        return f"{name} was opened on {opening.rests_on}, which never was"
    if boot_id not in {"", opening.boot_id}:
        return f"{name} was opened for boot {opening.boot_id} and runs {boot_id}"
    if version.boot_id != opening.boot_id:
        return f"{name} was opened in {opening.boot_id} on a status of {version.boot_id}"
    if version.waiting:
        return f"{name} was opened while it waited for {', '.join(version.waiting)}"
    return ""
