"""Kopf's part: it watches, hands every event over, and knows nothing else.

Its handlers only take a record and return: an error in one is logged by kopf and never retried, so
nothing that can fail belongs there. Only `on.event` is used: every other kind of handler makes kopf
write to the objects that it handles.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Protocol

import kopf
import structlog

from hostprep.api.names import AGENT_COMPONENT, COMPONENT_LABEL, GROUP, VERSION
from hostprep.api.names import NODE_PLURAL as HOST_MEMORY_NODES
from hostprep.api.names import POOL_PLURAL as POOLS
from hostprep_operator.keys import Kind
from hostprep_operator.settings import make_settings

__all__ = ["AGENT_SELECTOR", "Taker", "Watches"]

_log = structlog.get_logger("watch")

AGENT_SELECTOR = f"app.kubernetes.io/name=hostprep,{COMPONENT_LABEL}={AGENT_COMPONENT}"
_FIRST_PAUSE_S = 0.5
_LONGEST_PAUSE_S = 30.0
_HEALTHY_S = 60.0
_IDENTITY: Any = "hostprep-operator"
"""A type of kopf's that it does not export. It takes no part in kopf's peering."""


class Taker(Protocol):
    """Who gets the events. None of the methods waits or raises."""

    def seen(self, kind: Kind, document: Mapping[str, Any]) -> object:
        """Take an object in that version."""

    def gone(self, kind: Kind, document: Mapping[str, Any]) -> object:
        """Take note that an object was deleted; the document is its last version."""

    def listed(self, kind: Kind) -> object:
        """Take note that kopf has read the whole list: what vanished before was not told."""


def make_registry(
    taker: Taker, *, watch_agents: bool, login: Callable[[], Awaitable[kopf.ConnectionInfo]]
) -> kopf.OperatorRegistry:
    """Return a registry of its own with one handler for each kind."""
    registry = kopf.OperatorRegistry()

    @kopf.on.login(registry=registry)
    async def log_in(**_: object) -> kopf.ConnectionInfo:
        return await login()

    watched = {
        Kind.NODE: ("v1", "nodes"),
        Kind.POOL: (f"{GROUP}/{VERSION}", POOLS),
        Kind.HOST_MEMORY_NODE: (f"{GROUP}/{VERSION}", HOST_MEMORY_NODES),
    }
    if watch_agents:
        watched[Kind.AGENT] = ("v1", "pods")
    for kind, (api, plural) in watched.items():
        handler = _handler(taker, kind)
        kopf.on.event(api, plural, registry=registry, id=kind.value)(handler)
    return registry


def _handler(taker: Taker, kind: Kind) -> Callable[..., Awaitable[None]]:
    async def handle(event: Mapping[str, Any], **_: object) -> None:
        if event["type"] == "DELETED":
            taker.gone(kind, event["object"])
            return
        taker.seen(kind, event["object"])
        if event["type"] is None:
            taker.listed(kind)

    return handle


class Watches:
    """Kopf's operator, started again whenever it gives up."""

    def __init__(
        self,
        taker: Taker,
        *,
        namespace: str,
        watch_agents: bool,
        login: Callable[[], Awaitable[kopf.ConnectionInfo]],
        on_state: Callable[[bool], None],
    ) -> None:
        self._taker = taker
        self._namespace = namespace
        self._watch_agents = watch_agents
        self._login = login
        self._on_state = on_state
        self._stop = asyncio.Event()

    async def run(self, *, on_started: Callable[[], None]) -> None:
        """Watch until stop(); `on_started` is called each time kopf has set its signal handlers.

        Returns before stop() only where a signal came in the moment in which kopf's handlers stood.
        """
        pause_s = _FIRST_PAUSE_S
        while not self._stop.is_set():
            began_s = asyncio.get_running_loop().time()
            if await self._run_once(on_started) or self._stop.is_set():
                return
            if asyncio.get_running_loop().time() - began_s > _HEALTHY_S:
                pause_s = _FIRST_PAUSE_S
            self._on_state(False)
            _log.warning("watches ended; starting them again", in_s=pause_s)
            await self._pause(pause_s)
            pause_s = min(pause_s * 2, _LONGEST_PAUSE_S)

    def stop(self) -> None:
        """Have run() return."""
        self._stop.set()

    async def _run_once(self, on_started: Callable[[], None]) -> bool:
        """Run kopf; whether it was told to end, by us or by a signal, rather than failed."""
        ready = asyncio.Event()
        registry = make_registry(self._taker, watch_agents=self._watch_agents, login=self._login)
        notify = asyncio.create_task(self._notify(ready, on_started))
        try:
            await kopf.operator(
                registry=registry,
                settings=make_settings(agent_selector=AGENT_SELECTOR),
                namespaces=[self._namespace],
                standalone=True,
                stop_flag=self._stop,
                ready_flag=ready,
                # Left to itself kopf asks for the user's name: an image's user has none.
                identity=_IDENTITY,
            )
        except Exception as error:
            _log.warning("kopf failed", error=repr(error))
            return False
        else:
            return True
        finally:
            notify.cancel()

    async def _notify(self, ready: asyncio.Event, on_started: Callable[[], None]) -> None:
        await ready.wait()
        self._on_state(True)
        on_started()

    async def _pause(self, seconds: float) -> None:
        try:
            async with asyncio.timeout(seconds):
                await self._stop.wait()
        except TimeoutError:
            return
