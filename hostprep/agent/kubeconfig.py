"""Where the API server is, and who we are to it: a kubeconfig, or what a pod is given."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import aiohttp
import yaml
from kubernetes.aio.client.configuration import Configuration
from kubernetes.aio.config.config_exception import ConfigException
from kubernetes.aio.config.incluster_config import load_incluster_config
from kubernetes.aio.config.kube_config import load_kube_config

from hostprep.errors import BadInputError

__all__ = ["load_configuration"]

# The client's own annotations stop short of these.
_load_file: Callable[..., Awaitable[object]] = load_kube_config
_load_pod: Callable[[Configuration], None] = load_incluster_config
_UNUSABLE = (
    ConfigException,
    aiohttp.ClientError,
    OSError,
    ValueError,
    TypeError,
    KeyError,
    AttributeError,
)


async def load_configuration(path: str | None) -> Configuration | None:
    """Return the API server's address and credentials; None where there is no configuration.

    The file `path`, else KUBECONFIG, else what kubelet gives a pod. Raises BadInputError for
    one that cannot be read.
    """
    path = path or os.environ.get("KUBECONFIG") or None
    configuration = Configuration()
    # Python 3.13 checks RFC 5280 to the letter: it refuses clusters whose certificates lack the
    # authority's key identifier, which no client in Go minds. All else is checked as ever.
    configuration.disable_strict_ssl_verification = True
    try:
        if path is not None:
            _check_file(path)
            await _load_file(path, client_configuration=configuration, persist_config=False)
        elif os.environ.get("KUBERNETES_SERVICE_HOST"):
            _load_pod(configuration)
        else:
            return None
    except _UNUSABLE as error:
        why = " ".join(str(error).removeprefix("Invalid kube-config file. ").split())
        raise _bad_configuration(path, f"cannot be used: {why}") from error
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

    `path` may be several, as in KUBECONFIG; those that are not there are passed over.
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
