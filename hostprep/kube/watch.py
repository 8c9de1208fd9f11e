"""One collection of objects at the API server, followed for ever: listed, then watched.

What agent and operator know of the cluster comes in by this one path:

- A list is read page by page, then watched from its version on. Events come in the server's
  order, so an object's changes are seen one by one, and its deletion last, with its last version.
- The server ends a watch after minutes, and bookmarks move its version on meanwhile: the next
  watch begins where the last one ended, without a list.
- A watch that broke is tried again from where it was. Where that fails several times in a row,
  where the version is too old (410), or where the server refuses, the list is read again.
- Objects that were known and are not in a complete list any more are reported as vanished:
  nothing is missed while the connection is away.

Nothing here ends it: every error is logged once, and tried again ever less often.
"""

from __future__ import annotations

import asyncio
import math
import re
import time
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from enum import Enum

from hostprep.kube.backoff import Backoff
from hostprep.kube.client import Json, KubeClient, Resource, WatchEvent
from hostprep.kube.errors import ApiError, GoneError, UnreachableError
from hostprep.kube.logs import Logger

_FIRST_PAUSE_S = 0.5
_SHORTEST_STREAM_S = 1.0
"""A watch that lived so long worked: the pauses start over."""
_BROKEN_IN_A_ROW = 3
"""So many broken watches, and the list is read again: perhaps only watching does not work."""
_NUMBER = re.compile(r"\d+")


class Event(Enum):
    """What happened."""

    OBSERVED = "observed"
    """An object is there in this version: listed, added or modified."""
    DELETED = "deleted"
    """An object was deleted; the document is its last version."""
    VANISHED = "vanished"
    """An object that was known is not in the list any more. Its deletion was not seen: there is no
    document, and what was observed of it last is all that there is."""
    LISTED = "listed"
    """The list has been read to the end, and everything that vanished was reported."""
    CURRENT = "current"
    """A bookmark: everything up to that version has been reported."""


@dataclass(frozen=True, slots=True)
class Change:
    """One event."""

    event: Event
    resource_version: str
    """Of the object; of the list where the event is VANISHED, LISTED or CURRENT."""
    name: str = ""
    uid: str = ""
    document: Json | None = None
    """The object, where it was OBSERVED or DELETED."""


class Reflector:
    """Follows one collection; `changes` is to be called once."""

    def __init__(
        self,
        client: KubeClient,
        resource: Resource,
        log: Logger,
        *,
        label_selector: str = "",
        field_selector: str = "",
        page: int = 250,
        relist_s: float = math.inf,
        longest_pause_s: float = 30.0,
        known: Callable[[], Mapping[str, str]] | None = None,
    ) -> None:
        """`page`: objects a page; `relist_s`: after so many seconds the list is read again.

        `longest_pause_s`: between two tries. `known`: name to UID of what the caller takes to be
        there when a list has been read, where it learns of objects in other ways too; without it,
        what was reported.
        """
        self._client = client
        self._resource = resource
        self._log = log
        self._label_selector = label_selector
        self._field_selector = field_selector
        self._page = page
        self._relist_s = relist_s
        self._uids: dict[str, str] = {}
        """Name to UID of what was reported and is there; empty where the caller knows."""
        self._known = known
        self._since = ""
        """The version to watch from; empty where a list is needed."""
        self._listed_s = 0.0
        self._streams_since_s = math.inf
        """When the running watch was granted; infinite where none is."""
        self._broken = 0
        """Watches in a row that broke before they worked."""
        self._backoff = Backoff(first_s=_FIRST_PAUSE_S, most_s=longest_pause_s)
        self._trouble = ""
        """Why it does not work, as last logged; empty while it does."""
        self.connected = False
        """Whether the last page of a list came, or the running watch works."""
        self.heard_s = -math.inf
        """When the server last sent anything, by the monotonic clock: at least every other minute
        comes a bookmark."""

    async def changes(self) -> AsyncIterator[Change]:
        """Yield what is there and then what changes, for ever. Raises nothing of its own."""
        while True:
            self._streams_since_s = math.inf
            try:
                if not self._since or time.monotonic() - self._listed_s >= self._relist_s:
                    async for change in self._list():
                        yield change
                async for change in self._watch():
                    yield change
                pause_s = 0.0 if self._has_worked() else self._backoff.next_s()
            except ApiError as error:
                pause_s = self._failed(error)
            await asyncio.sleep(pause_s)

    def _has_worked(self) -> bool:
        """Whether the watch that has just ended lived long enough; then pauses start over."""
        if time.monotonic() - self._streams_since_s < _SHORTEST_STREAM_S:
            return False
        self._backoff.reset()
        self._broken = 0
        return True

    def _failed(self, error: ApiError) -> float:
        """Decide where to go on after an error; return in how many seconds.

        A list that works says nothing of the watch: both again at once, from every node, would be
        what keeps an overloaded server down.
        """
        self.connected = isinstance(error, GoneError)
        self._log_trouble(error)
        self._has_worked()
        self._broken += 1
        if self._broken >= _BROKEN_IN_A_ROW or not isinstance(error, UnreachableError):
            self._since = ""
        return max(self._backoff.next_s(), error.retry_after_s)

    async def _list(self) -> AsyncIterator[Change]:
        """Yield every object, then what vanished, then LISTED. Raises ApiError."""
        self._since, version = "", ""
        listed: set[str] = set()
        async for page in self._client.pages(
            self._resource,
            limit=self._page,
            label_selector=self._label_selector,
            field_selector=self._field_selector,
        ):
            version, self.connected = page.resource_version, True
            for document in page.items:
                change = _change_of(Event.OBSERVED, document)
                listed.add(change.name)
                self._keep(change)
                yield change
        known = dict(self._uids if self._known is None else self._known())
        for name in known.keys() - listed:
            self._uids.pop(name, None)
            yield Change(Event.VANISHED, version, name, known[name])
        self._listed_s = self.heard_s = time.monotonic()
        self._since = version
        yield Change(Event.LISTED, version)

    async def _watch(self) -> AsyncIterator[Change]:
        """Yield what changes until the watch ends. Raises ApiError."""
        async for event in self._client.watch(
            self._resource,
            since=self._since,
            label_selector=self._label_selector,
            field_selector=self._field_selector,
            longest_s=self._listed_s + self._relist_s - time.monotonic(),
        ):
            self.heard_s = time.monotonic()
            if event.type == "STARTED":
                self._streams_since_s = self.heard_s
                self._log_back()
            elif (change := self._reported(event)) is not None:
                yield change
            self._since = event.resource_version

    def _reported(self, line: WatchEvent) -> Change | None:
        """Return the change that a line of the watch stands for."""
        if line.type == "BOOKMARK":
            return Change(Event.CURRENT, line.resource_version)
        if line.type not in ("ADDED", "MODIFIED", "DELETED"):
            return None  # of a later version of the protocol
        is_end = line.type == "DELETED"
        change = _change_of(Event.DELETED if is_end else Event.OBSERVED, line.object)
        self._keep(change)
        return change

    def _keep(self, change: Change) -> None:
        if self._known is not None:
            return
        if change.event is Event.DELETED:
            self._uids.pop(change.name, None)
        else:
            self._uids[change.name] = change.uid

    def _log_trouble(self, error: ApiError) -> None:
        """Log once, and again for another reason: numbers in it are ports, times and ids."""
        if isinstance(error, GoneError):
            self._log.info("watch_expired", error=error.summary)
            return
        trouble = f"{error.status} {_NUMBER.sub('#', error.answer)}"
        if trouble == self._trouble:
            return
        self._trouble = trouble
        url = self._client.configuration.host
        self._log.warning("api_away", error=error.summary, url=url)

    def _log_back(self) -> None:
        """Log that the watch is granted: a list alone proves nothing."""
        self.connected = True
        if self._trouble:
            self._log.info("api_back", url=self._client.configuration.host)
        self._trouble = ""


def _change_of(event: Event, document: Json) -> Change:
    """Return the change of an object. Raises UnreachableError for what is no object."""
    metadata = document.get("metadata")
    name = metadata.get("name") if isinstance(metadata, dict) else None
    if not isinstance(metadata, dict) or not isinstance(name, str):
        raise UnreachableError("the answer holds what is no object")
    return Change(
        event,
        str(metadata.get("resourceVersion") or ""),
        name,
        str(metadata.get("uid") or ""),
        document,
    )
