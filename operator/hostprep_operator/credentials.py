"""Where the API server is, and who we are to it: for our own client, and for kopf's watches."""

from __future__ import annotations

import os
import ssl
import warnings

import kopf
from kubernetes.aio.client import Configuration
from kubernetes.aio.config import (
    KUBE_CONFIG_DEFAULT_LOCATION,
    ConfigException,
    load_incluster_config,
    load_kube_config,
)

from hostprep.errors import BadInputError

__all__ = ["connection_info", "load_configuration"]

_SOCKETS = 24
"""Connections at once: the workers' and a few more, so that the Lease never waits for them."""


class _ConnectionInfo(kopf.ConnectionInfo):
    """Kopf's way to the API server, for certificates without a key identifier as well.

    Python 3.13 checks RFC 5280 to the letter; no client in Go does, and clusters are out there
    whose certificates lack it. Chain, name and validity are checked as ever.
    """

    def as_ssl_context(self) -> ssl.SSLContext:
        context = super().as_ssl_context()
        context.verify_flags &= ~ssl.VERIFY_X509_STRICT
        return context


async def load_configuration(kubeconfig: str | None) -> Configuration:
    """Return how to reach the API server.

    The file given; else the pod's service account; else KUBECONFIG or ~/.kube/config.
    Raises BadInputError when none of them is there or can be read.
    """
    configuration = Configuration(connection_pool_maxsize=_SOCKETS)
    # Otherwise each request asks a thread for proxies and ~/.netrc: a third of its cost.
    proxied = any(name.lower().endswith("_proxy") for name in os.environ)
    configuration.client_session_kwargs = {"trust_env": proxied}
    configuration.disable_strict_ssl_verification = True
    path = kubeconfig or _default_file()
    try:
        if path is None:
            load_incluster_config(configuration)  # type: ignore[no-untyped-call]
        else:
            await _load_file(path, configuration)
    except Exception as error:  # of a file that is none, the loader raises whatever it meets
        raise BadInputError(
            f"no way to the API server: {path or 'service account'}: {_first_line(error)}",
            reason="NoKubeconfig",
            remedy="run in a pod with a service account, or give --kubeconfig FILE",
        ) from error
    return configuration


def _first_line(error: Exception) -> str:
    lines = str(error).splitlines()
    return lines[0] if lines and isinstance(error, ConfigException | OSError) else "not readable"


async def _load_file(path: str, configuration: Configuration) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        await load_kube_config(  # type: ignore[no-untyped-call]
            config_file=path, client_configuration=configuration, persist_config=False
        )


def _default_file() -> str | None:
    if os.environ.get("KUBERNETES_SERVICE_HOST") and not os.environ.get("KUBECONFIG"):
        return None
    named = os.environ.get("KUBECONFIG") or KUBE_CONFIG_DEFAULT_LOCATION
    return os.path.expanduser(named)


async def connection_info(configuration: Configuration) -> kopf.ConnectionInfo:
    """Return the same for kopf; called again whenever the server refuses the token."""
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
