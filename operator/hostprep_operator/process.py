"""The operator's process by kopf: start and end in order, signals, and no objects of kopf's.

Kopf calls the handlers of start and clean-up, and ends what runs in it when a signal comes or the
stop flag is set. It watches nothing and writes nothing: objects come in by `watch`, over the watch
that agents use too. Peering is off: the Lease decides which replica works.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Awaitable, Callable
from typing import Any

import kopf
from kubernetes.aio.client.configuration import Configuration

from hostprep.kube.client import KubeClient

_IDENTITY: Any = "hostprep-operator"
"""A type of kopf's that it does not export. It takes no part in kopf's peering."""
_RETRIES_S = (0.1, 0.3, 1.0, *([2.0] * 1800))
"""Kopf reads at its start what the server serves: an hour without one, with a try every 2 s."""

Handler = Callable[[], Awaitable[None]]


async def run_process(
    kube: KubeClient,
    *,
    namespace: str,
    stop: asyncio.Event,
    start_up: Handler,
    clean_up: Handler,
) -> None:
    """Run `start_up`, wait until `stop` is set or a signal comes, run `clean_up`.

    Tasks that were started before go on meanwhile; those that were started in it are cancelled at
    its end. Raises what a handler raises.
    """
    registry = kopf.OperatorRegistry()

    @kopf.on.startup(registry=registry, errors=kopf.ErrorsMode.PERMANENT)
    async def started(**_: object) -> None:
        await start_up()

    @kopf.on.cleanup(registry=registry, errors=kopf.ErrorsMode.PERMANENT)
    async def stopped(**_: object) -> None:
        await clean_up()

    @kopf.on.login(registry=registry)
    async def log_in(**_: object) -> kopf.ConnectionInfo:
        return await _connection_info(kube.configuration)

    await kopf.operator(
        registry=registry,
        settings=make_settings(),
        namespaces=[namespace],
        standalone=True,
        stop_flag=stop,
        # Left to itself kopf asks for the user's name: an image's user has none.
        identity=_IDENTITY,
    )


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
    """Return settings for a kopf that watches and posts nothing."""
    settings = kopf.OperatorSettings()
    settings.scanning.disabled = True
    settings.posting.enabled = False
    settings.peering.standalone = True
    settings.networking.enforce_retry_after = True
    settings.networking.error_backoffs = _RETRIES_S
    settings.process.ultimate_exiting_timeout = None
    return settings
