"""Watching by kopf, which passes every event to the EventHandler.

Its handlers only store a record and return: kopf logs an error in one and never retries it, so
nothing that can fail belongs there. Only `on.event` is used: every other kind of handler makes kopf
write to the objects that it handles.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import kopf
import structlog
from kubernetes.aio.client.configuration import Configuration

from hostprep.api.names import (
    AGENT_COMPONENT,
    API_VERSION,
    COMPONENT_LABEL,
    NODE_PLURAL,
    POOL_PLURAL,
)
from hostprep.kube.backoff import Backoff, wait_for_event
from hostprep.kube.client import KubeClient
from hostprep_operator.store import EventHandler, Kind

_log = structlog.get_logger("watch")

AGENT_SELECTOR = f"app.kubernetes.io/name=hostprep,{COMPONENT_LABEL}={AGENT_COMPONENT}"
_HEALTHY_S = 60.0
_IDENTITY: Any = "hostprep-operator"
"""A type of kopf's that it does not export. It takes no part in kopf's peering."""
_PAGE = 100
"""Objects a page of kopf's own lists: with 15 KB a Node that is 1.5 MB at once."""
_IDLE_S = 0.05
"""Kopf keeps a task and the last event of each object for so long; the default of 5 s costs 300 MiB
at 5,000 nodes."""
_RETRIES_S = (0.1, 0.3, 1.0, *([2.0] * 300))
"""Ten minutes without an API server, with a try every 2 s."""


class Watches:
    """Kopf's operator, started again whenever it gives up."""

    def __init__(
        self,
        kube: KubeClient,
        handler: EventHandler,
        *,
        namespace: str,
        watch_agents: bool,
        on_state: Callable[[bool], None],
    ) -> None:
        """`on_state` is called with True each time kopf runs and has set its signal handlers."""
        self._kube = kube
        self._handler = handler
        self._namespace = namespace
        self._watch_agents = watch_agents
        self._on_state = on_state
        self._stop = asyncio.Event()

    async def run(self) -> None:
        """Watch until stop().

        Returns before stop() only where a signal came while kopf's own handlers were installed.
        """
        backoff = Backoff(first_s=0.5, most_s=30.0)
        while not self._stop.is_set():
            began_s = asyncio.get_running_loop().time()
            if await self._run_once() or self._stop.is_set():
                return
            if asyncio.get_running_loop().time() - began_s > _HEALTHY_S:
                backoff.reset()
            pause_s = backoff.next_s()
            self._on_state(False)
            _log.warning("watches ended; starting them again", in_s=round(pause_s, 1))
            await wait_for_event(self._stop, pause_s)

    def stop(self) -> None:
        """Make run() return."""
        self._stop.set()

    async def _run_once(self) -> bool:
        """Run kopf; return whether it was stopped, by us or by a signal, rather than failed."""
        ready = asyncio.Event()
        notify = asyncio.create_task(self._notify(ready))
        try:
            await kopf.operator(
                registry=self._registry(),
                settings=make_settings(),
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

    async def _notify(self, ready: asyncio.Event) -> None:
        await ready.wait()
        self._on_state(True)

    def _registry(self) -> kopf.OperatorRegistry:
        """Return a registry of its own with one kopf handler for each kind."""
        registry = kopf.OperatorRegistry()

        @kopf.on.login(registry=registry)
        async def log_in(**_: object) -> kopf.ConnectionInfo:
            return await _connection_info(self._kube.configuration)

        watched = {
            Kind.NODE: ("v1", "nodes"),
            Kind.POOL: (API_VERSION, POOL_PLURAL),
            Kind.HOST_MEMORY_NODE: (API_VERSION, NODE_PLURAL),
        }
        if self._watch_agents:
            watched[Kind.AGENT] = ("v1", "pods")
        for kind, (api, plural) in watched.items():
            handle = _on_event(self._handler, kind)
            kopf.on.event(api, plural, registry=registry, id=kind.value)(handle)
        return registry


def _on_event(handler: EventHandler, kind: Kind) -> Callable[..., Awaitable[None]]:
    async def handle(event: Mapping[str, Any], **_: object) -> None:
        if event["type"] == "DELETED":
            handler.deleted(kind, event["object"])
            return
        handler.observed(kind, event["object"])
        if event["type"] is None:
            handler.listed(kind)

    return handle


async def _connection_info(configuration: Configuration) -> kopf.ConnectionInfo:
    """Return the configuration as kopf has it; called again when the server refuses the token."""
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


def make_settings() -> kopf.OperatorSettings:
    """Return settings for thousands of nodes; kopf persists nothing on any object."""
    settings = kopf.OperatorSettings()
    settings.scanning.disabled = True
    settings.watching.chunk_size = _PAGE
    settings.watching.label_selectors["v1", "pods"] = AGENT_SELECTOR
    settings.queueing.idle_timeout = _IDLE_S
    settings.posting.enabled = False
    settings.peering.standalone = True
    settings.execution.max_workers = 1
    settings.networking.enforce_retry_after = True
    settings.networking.error_backoffs = _RETRIES_S
    settings.process.ultimate_exiting_timeout = None
    settings.persistence.diffbase_storage = _NoDiffBase()
    settings.persistence.progress_storage = _NoProgress()
    return settings


class _NoDiffBase(kopf.DiffBaseStorage):
    """Keeps nothing, and spares kopf a deep copy of every object that an event is about."""

    def build(self, **_: Any) -> Any:
        return {}

    def fetch(self, **_: Any) -> None:
        return None

    def store(self, **_: Any) -> None:
        return None


class _NoProgress(kopf.ProgressStorage):
    """Keeps nothing: each reconcile sees the whole state, none has to be resumed."""

    def fetch(self, **_: Any) -> None:
        return None

    def store(self, **_: Any) -> None:
        return None

    def purge(self, **_: Any) -> None:
        return None

    def touch(self, **_: Any) -> None:
        return None

    def clear(self, *, essence: kopf.BodyEssence) -> kopf.BodyEssence:
        return essence
