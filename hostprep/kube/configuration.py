"""Address and credentials of the API server: from a kubeconfig, or a pod's service account."""

from __future__ import annotations

import os
import warnings
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import yaml
from kubernetes.aio.client.configuration import Configuration
from kubernetes.aio.config.incluster_config import load_incluster_config
from kubernetes.aio.config.kube_config import load_kube_config

from hostprep.errors import BadInputError

_HOME = "~/.kube/config"
_MAX_CONNECTIONS = 24
"""At once: one for each of the operator's workers, and some for its Lease, which must not wait."""

# The client's own annotations stop short of these.
_load_file: Callable[..., Awaitable[object]] = load_kube_config
_load_pod: Callable[[Configuration], None] = load_incluster_config


async def load_configuration(kubeconfig: str | None) -> Configuration | None:
    """Return the API server's address and credentials; None where there is no configuration.

    The file `kubeconfig`, else KUBECONFIG, else what kubelet gives a pod, else ~/.kube/config.
    Raises BadInputError for one that cannot be used.
    """
    path = kubeconfig or os.environ.get("KUBECONFIG") or None
    if path is None and not os.environ.get("KUBERNETES_SERVICE_HOST"):
        path = _file_at_home()
        if path is None:
            return None
    if path is not None:
        _check_file(path)
    configuration = _empty()
    try:
        if path is None:
            _load_pod(configuration)
        else:
            with warnings.catch_warnings(action="ignore"):
                await _load_file(path, client_configuration=configuration, persist_config=False)
    except Exception as error:  # of a file that is none, the loader raises whatever it meets
        why = " ".join(str(error).removeprefix("Invalid kube-config file. ").split())
        raise _bad_configuration(path, f"cannot be used: {why}") from error
    return configuration


def _file_at_home() -> str | None:
    path = os.path.expanduser(_HOME)
    return path if os.path.exists(path) else None


def _empty() -> Configuration:
    configuration = Configuration(connection_pool_maxsize=_MAX_CONNECTIONS)
    # Otherwise each request asks a thread for proxies and ~/.netrc: a third of its cost.
    proxied = any(name.lower().endswith("_proxy") for name in os.environ)
    configuration.client_session_kwargs = {"trust_env": proxied}
    # Python 3.13 checks RFC 5280 to the letter: it refuses clusters whose certificates lack the
    # authority's key identifier, which no client in Go minds. All else is checked as ever.
    configuration.disable_strict_ssl_verification = True
    return configuration


def _bad_configuration(path: str | None, why: str) -> BadInputError:
    name = f"kubeconfig {path}" if path else "the API server's configuration of this pod"
    return BadInputError(
        f"{name} {why}",
        reason="BadKubeconfig",
        remedy="give one that works with kubectl by --kubeconfig or KUBECONFIG",
    )


def _check_file(path: str) -> None:
    """Raise BadInputError for what the client meets with a traceback, or a line of its own.

    `path` may be several, as in KUBECONFIG; those that do not exist are passed over.
    """
    files = [os.path.expanduser(name) for name in path.split(os.pathsep) if name]
    files = [name for name in files if os.path.exists(name)]
    if not files:
        raise _bad_configuration(path, "does not exist")
    documents = [_document_of(name) for name in files]
    if not any(document.get("current-context") for document in documents):
        raise _bad_configuration(path, "has no current-context")


def _document_of(path: str) -> Mapping[str, Any]:
    try:
        with open(path, encoding="utf-8") as file:
            document = yaml.safe_load(file)
    except OSError as error:
        raise _bad_configuration(path, f"cannot be read: {error.strerror}") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None)
        where = f" (line {mark.line + 1}, column {mark.column + 1})" if mark else ""
        raise _bad_configuration(path, f"is not YAML{where}") from error
    if not isinstance(document, dict):
        raise _bad_configuration(path, "is empty, or no kubeconfig at all")
    return document
