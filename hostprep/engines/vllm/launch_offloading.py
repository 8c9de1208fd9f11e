"""vLLM, our spec for its OffloadingConnector."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hostprep.engines.launching import Launch, Options, Wanted
from hostprep.engines.vllm import starting
from hostprep.engines.vllm.configuration import OFFLOADING

TYPE_CHECKING = False
if TYPE_CHECKING:
    from hostprep.client.lease import Lease

__all__ = ["arranged", "wanted"]


def wanted(command: tuple[str, ...], environ: Mapping[str, str], options: Options) -> Wanted:
    """Return what the command needs of the pool. Raises BadInputError."""
    del environ, options
    return starting.wanted(OFFLOADING, command)


def arranged(
    command: tuple[str, ...], environ: Mapping[str, str], leases: Sequence[Lease]
) -> Launch:
    """Return the command as it is to run over these leases."""
    return starting.arranged(OFFLOADING, command, environ, leases)
