"""The operator's way to the API server."""

from __future__ import annotations

from collections.abc import Callable

from hostprep.errors import BadInputError
from hostprep.kube.client import KubeClient
from hostprep.kube.configuration import load_configuration


async def connect(
    kubeconfig: str | None, *, on_write: Callable[[str, str], None] | None = None
) -> KubeClient:
    """Return a client. Raises BadInputError where no API server is configured, or wrongly."""
    configuration = await load_configuration(kubeconfig)
    if configuration is None:
        raise BadInputError(
            "no API server is configured",
            reason="NoKubeconfig",
            remedy="run in a pod with a service account, or give --kubeconfig FILE",
        )
    return KubeClient(
        configuration,
        name="hostprep-operator",
        renew=lambda: load_configuration(kubeconfig),
        on_write=on_write,
    )
