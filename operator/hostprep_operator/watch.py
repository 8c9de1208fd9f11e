"""Kopf's part: it watches, hands every event over, and knows nothing else.

Its handlers only take a record and return: an error in one is logged by kopf and never retried, so
nothing that can fail belongs there. Only `on.event` is used: every other kind of handler makes kopf
write to the objects that it handles.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Protocol

import kopf
import structlog
from kubernetes.aio.client.configuration import Configuration

from hostprep.api.names import AGENT_COMPONENT, COMPONENT_LABEL, GROUP, VERSION
from hostprep.api.names import NODE_PLURAL as HOST_MEMORY_NODES
from hostprep.api.names import POOL_PLURAL as POOLS
from hostprep.kube.backoff import Backoff
from hostprep_operator.keys import Kind
from hostprep_operator.settings import make_settings

_log = structlog.get_logger("watch")

AGENT_SELECTOR = f"app.kubernetes.io/name=hostprep,{COMPONENT_LABEL}={AGENT_COMPONENT}"
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


async def connection_info(configuration: Configuration) -> kopf.ConnectionInfo:
    """Return kopf's form of it; called again whenever the server refuses the token."""
    header = await configuration.get_api_key_with_prefix("BearerToken", alias="authorization")
    scheme, _, token = (header or "").rpartition(" ")
    return _ConnectionInfo(
        server=configuration.host,
        ca_path=configuration.ssl_ca_cert,
        ca_data=None if configuration.ssl_ca_cert else configuration.ca_cert_data,
        insecure=not configuration.verify_ssl,
        scheme=scheme or None,
        token=token or None,
        certificate_path=configuration.cert_file,
        private_key_path=configuration.key_file,
    )


class _ConnectionInfo(kopf.ConnectionInfo):
    """Accepts certificates without a key identifier, as `load_configuration` does."""

    def as_ssl_context(self) -> ssl.SSLContext:
        context = super().as_ssl_context()
        context.verify_flags &= ~ssl.VERIFY_X509_STRICT
        return context


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
        backoff = Backoff(first_s=0.5, most_s=30.0)
        while not self._stop.is_set():
            began_s = asyncio.get_running_loop().time()
            if await self._run_once(on_started) or self._stop.is_set():
                return
            if asyncio.get_running_loop().time() - began_s > _HEALTHY_S:
                backoff.reset()
            pause_s = backoff.next_s()
            self._on_state(False)
            _log.warning("watches ended; starting them again", in_s=round(pause_s, 1))
            await self._pause(pause_s)

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
