"""vLLM with LMCache inside its processes, over leased regions: our connector for LMCache's."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence

from hostprep.engines.catalogue import way_of
from hostprep.engines.importable import python_path
from hostprep.engines.installed import installed_version, untried
from hostprep.engines.launching import Launch, Options, Wanted
from hostprep.engines.lmcache.inside_settings import FILE, key_in_file, size_asked
from hostprep.engines.vllm import starting
from hostprep.engines.vllm.command_line import CommandLine, parse_config, read_command
from hostprep.engines.vllm.configuration import Kind, checked
from hostprep.engines.vllm.simple_layout import share_of
from hostprep.errors import BadInputError
from hostprep.register.chunks import ONE_CALL_LIMIT_BYTES
from hostprep.units import format_bytes

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from hostprep.claim import Lease

__all__ = ["arranged", "wanted"]

_EXTRA = "kv_connector_extra_config"
_MODULE = "kv_connector_module_path"
_LMCACHES = "lmcache.integration.vllm.lmcache_connector_v1"
"""Where LMCache has a connector of its own, for vLLMs that lacked one."""
_KIND = Kind(
    way="lmcache-inprocess",
    connector="HostprepLMCacheConnector",
    replaces=("LMCacheConnectorV1", "LMCacheConnectorV1Dynamic"),
    connector_module="hostprep.engines.lmcache.vllm_connector",
    spec=None,
    spec_module=None,
)


def wanted(command: tuple[str, ...], environ: Mapping[str, str], options: Options) -> Wanted:
    """Return what the command needs of the pool: a region for each data-parallel rank.

    LMCache's `max_local_cpu_size` (GiB a rank) is the least that each rank's part of it must
    have. Raises BadInputError for a configuration that contradicts; reads, and changes nothing.
    """
    del options
    line = read_command(command)
    config = _config(line)
    base = starting.wanted(_KIND, line.with_config(config))
    if key_in_file(environ):
        raise BadInputError(
            f"{environ[FILE]} sets max_local_cpu_size, which --engine {_KIND.way} has to see",
            reason="BadCommand",
            remedy="move it to LMCACHE_MAX_LOCAL_CPU_SIZE, or leave it out to use the whole region",
        )
    asked = size_asked(config.get(_EXTRA) or {}, environ)
    if asked is None:
        return base
    ranks = _ranks_here(line)
    because = f"{asked.because} for each rank"
    if ranks > 1:
        because += f", and {ranks} share a region"
    return Wanted(count=base.count, size_bytes=asked.size_bytes * ranks, because=because)


def arranged(
    command: tuple[str, ...], environ: Mapping[str, str], leases: Sequence[Lease]
) -> Launch:
    """Return the command with our connector in LMCache's place.

    Raises BadInputError where a rank's part is too large: LMCache's copies go anywhere, so that
    its memory is registered with CUDA by one call.
    """
    line = read_command(command)
    config = _config(line)
    ranks = _ranks_here(line)
    asked = size_asked(config.get(_EXTRA) or {}, environ)
    for lease in leases:
        region = lease.region
        part = share_of(region.size_bytes, region.page_bytes, ranks=ranks, index=0)
        _check_one_call(asked.size_bytes if asked is not None else part.size_bytes)
    config["kv_connector"] = _KIND.connector
    config[_MODULE] = _KIND.connector_module
    config.setdefault("kv_role", "kv_both")
    variables = python_path(leases[0].paths.root, line.program, environ)
    version = installed_version(line.program, ("lmcache",), environ)
    notes = untried("LMCache", version, way_of(_KIND.way).versions)
    return Launch(line.with_config(config), variables, (), notes)


def _config(line: CommandLine) -> dict[str, Any]:
    """Return the connector's configuration; LMCache's own module is what ours stands in for."""
    config = copy.deepcopy(parse_config(line))
    if config.get(_MODULE) == _LMCACHES:
        del config[_MODULE]
    checked(config, _KIND)
    return config


def _ranks_here(line: CommandLine) -> int:
    """Return how many processes with a GPU each data-parallel rank has on this node."""
    sizes = (line.number(f"--{kind}-parallel-size") or 1 for kind in ("tensor", "pipeline"))
    ranks = 1
    for size in sizes:
        ranks *= max(1, size)
    return max(1, ranks // max(1, line.number("--nnodes") or 1))


def _check_one_call(size_bytes: int) -> None:
    if size_bytes >= ONE_CALL_LIMIT_BYTES:
        raise BadInputError(
            f"each rank would have {format_bytes(size_bytes)}, registered with CUDA by one call, "
            f"which fails from {format_bytes(ONE_CALL_LIMIT_BYTES)} on",
            reason="RegionTooLarge",
            remedy="set LMCACHE_MAX_LOCAL_CPU_SIZE (GiB a rank), or claim a smaller region",
        )
