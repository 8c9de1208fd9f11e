"""`hostprep exec --engine trtllm`: says what to do instead, since it maps no file of anybody's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hostprep.engines.launching import Launch, Options, Wanted
from hostprep.errors import BadInputError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from hostprep.client.lease import Lease

__all__ = ["arranged", "wanted"]

_VARIABLES = {
    "TLLM_KV_CACHE_MANAGER_V2_PREFAULT_THREADS": "pools are populated by all CPUs of their NUMA "
    "node before any engine starts, so it has nothing to speed up",
    "TLLM_KV_CACHE_MANAGER_V2_THP": "a pool's backings choose the pages: HugeTLB2Mi for certain "
    "huge ones, THP for those it speaks of",
}
"""Its two variables for faster pools (issue 15430), and what takes their place."""


def wanted(command: tuple[str, ...], environ: Mapping[str, str], options: Options) -> Wanted:
    """Refuse: TensorRT-LLM's own host pools are anonymous memory. Always raises BadInputError."""
    del command, options
    set_here = [f"{name} is set: {why}" for name, why in _VARIABLES.items() if name in environ]
    raise BadInputError(
        "TensorRT-LLM allocates its host pools as anonymous memory, which nobody can prepare, "
        "so there is nothing to claim for it" + "".join(f"; {words}" for words in set_here),
        reason="NoMemoryOfItsOwn",
        remedy="keep its KV cache in an LMCache server or a Mooncake store that has the prepared "
        "memory: `hostprep engines trtllm --connector lmcache --server tcp://127.0.0.1:5555` "
        "prints the configuration for `trtllm-serve --config FILE`",
    )


def arranged(
    command: tuple[str, ...], environ: Mapping[str, str], leases: Sequence[Lease]
) -> Launch:
    """Never called: nothing is claimed."""
    del environ, leases
    return Launch(command, {})
