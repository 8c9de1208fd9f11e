"""vLLM with LMCache inside its processes, over leased regions: our connector for LMCache's."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence

from hostprep.backing import Backing
from hostprep.engines.catalogue import way_of
from hostprep.engines.importable import python_path
from hostprep.engines.installed import installed_version, untried
from hostprep.engines.launching import Launch, Options, Wanted
from hostprep.engines.lmcache.inside_settings import ASKER, Asked, read_settings, size_asked
from hostprep.engines.lmcache.sizes import check_one_call
from hostprep.engines.shares import Parts
from hostprep.engines.vllm import starting
from hostprep.engines.vllm.command_line import CommandLine, parse_config, read_command
from hostprep.engines.vllm.configuration import SIMPLE, Kind, checked
from hostprep.engines.vllm.ranks import workers_here
from hostprep.engines.vllm.simple_layout import share_of

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from hostprep.client.handoff import Region
    from hostprep.client.lease import Lease

__all__ = ["arranged", "wanted"]

_EXTRA = "kv_connector_extra_config"
_MODULE = "kv_connector_module_path"
_PAGE_BYTES = Backing.HUGETLB_2MI.page_bytes
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
    starting.refuse_in_file(line, _KIND, f"{starting.SIZES}|nnodes")
    config = _config(line)
    extra = config.get(_EXTRA) or {}
    read_settings(extra)
    base = starting.wanted(_KIND, line.with_config(config))
    asked = size_asked(extra, environ)
    if asked is None:
        return base
    ranks = workers_here(line)
    size_bytes, because = asked.size_bytes, f"{asked.because} for each rank"
    if ranks > 1:
        # Each part is whole pages: of these here, or larger ones, which `arranged` knows.
        size_bytes = -(-size_bytes // _PAGE_BYTES) * _PAGE_BYTES * ranks
        because += f", and {ranks} share a region"
    return Wanted(count=base.count, size_bytes=size_bytes, because=because)


def arranged(
    command: tuple[str, ...], environ: Mapping[str, str], leases: Sequence[Lease]
) -> Launch:
    """Return the command with our connector in LMCache's place.

    Raises BadInputError where a rank's part is smaller than what LMCache is told to take, or too
    large: its copies go anywhere, so that its memory is registered with CUDA by one call.
    """
    line = read_command(command)
    config = _config(line)
    asked = size_asked(config.get(_EXTRA) or {}, environ)
    for lease in leases:
        _check_part(lease.region, workers_here(line), asked)
    config["kv_connector"] = _KIND.connector
    config[_MODULE] = _KIND.connector_module
    config.setdefault("kv_role", "kv_both")
    variables = python_path(leases[0].paths.root, line.program, environ)
    version = installed_version(line.program, ("lmcache",), environ)
    notes = (
        *starting.notes(line, _KIND, environ, way_of(SIMPLE.way).versions),
        *untried("LMCache", version, way_of(_KIND.way).versions),
    )
    return Launch(line.with_config(config), variables, (), notes)


def _config(line: CommandLine) -> dict[str, Any]:
    """Return the connector's configuration; LMCache's own module is what ours stands in for."""
    config = copy.deepcopy(parse_config(line))
    if config.get(_MODULE) == _LMCACHES:
        del config[_MODULE]
    checked(config, _KIND)
    return config


def _check_part(region: Region, ranks: int, asked: Asked | None) -> None:
    part = share_of(region.size_bytes, region.page_bytes, ranks=ranks, index=0)
    parts = Parts(part.offset_bytes, part.size_bytes, part.page_bytes, asker=ASKER)
    size_bytes = asked.size_bytes if asked is not None else max(1, part.size_bytes)
    check_one_call(
        size_bytes,
        owner="each rank",
        remedy="set LMCACHE_MAX_LOCAL_CPU_SIZE (GiB a rank), or claim a smaller region",
    )
    parts.take(size_bytes)
