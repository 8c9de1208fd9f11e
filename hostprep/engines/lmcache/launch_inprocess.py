"""Launching vLLM with LMCache inside its processes: our connector in the place of LMCache's."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

from hostprep.backing import Backing
from hostprep.client.handoff import Region
from hostprep.client.lease import Lease
from hostprep.engines.allocator import Allocator, share_of
from hostprep.engines.installation import python_path, release_notes
from hostprep.engines.launching import EngineStart, Launch, Requirements, refuse_in_file
from hostprep.engines.lmcache.settings import (
    REQUESTER,
    read_settings,
    requested_size,
)
from hostprep.engines.vllm import launch as vllm_launch
from hostprep.engines.vllm.command_parser import (
    CommandLine,
    local_worker_count,
    parse_config,
    read_command,
)

_EXTRA = "kv_connector_extra_config"
_MODULE = "kv_connector_module_path"
_PAGE_BYTES = Backing.HUGETLB_2MI.page_bytes
_LMCACHE_MODULE = "lmcache.integration.vllm.lmcache_connector_v1"
"""Where LMCache has a connector of its own, for vLLMs that lacked one."""
_CONNECTOR = vllm_launch.Connector(
    integration="lmcache-inprocess",
    name="HostprepLMCacheConnector",
    replaces=("LMCacheConnectorV1", "LMCacheConnectorV1Dynamic"),
    module="hostprep.engines.lmcache.vllm_connector",
)


def requirements(start: EngineStart) -> Requirements:
    """Return what the command needs of the pool: a region for each data-parallel rank.

    LMCache's `max_local_cpu_size` (GiB a rank) is the least that each rank's part of it must
    have. Raises BadInputError for a configuration that contradicts; reads, and changes nothing.
    """
    line, environ = read_command(start.command), start.environ
    keys = f"{vllm_launch.SIZE_KEYS}|nnodes"
    refuse_in_file(line.last("--config"), keys, engine=_CONNECTOR.integration)
    config = _config(line)
    extra = config.get(_EXTRA) or {}
    read_settings(extra)
    required = vllm_launch.connector_requirements(_CONNECTOR, line.with_config(config), environ)
    requested = requested_size(extra, environ)
    if requested is None:
        return required
    ranks = local_worker_count(line)
    size_bytes, because = requested[0], f"{requested[1]} for each rank"
    if ranks > 1:
        # Each part is whole pages: of these here, or larger ones, which `complete` knows.
        size_bytes = -(-size_bytes // _PAGE_BYTES) * _PAGE_BYTES * ranks
        because += f", and {ranks} share a region"
    return Requirements(count=required.count, size_bytes=size_bytes, because=because)


def complete(start: EngineStart, leases: Sequence[Lease]) -> Launch:
    """Return the command with our connector in LMCache's place.

    Raises BadInputError where a rank's part is smaller than what LMCache is to take.
    """
    line, environ = read_command(start.command), start.environ
    config = _config(line)
    requested = requested_size(config.get(_EXTRA) or {}, environ)
    for lease in leases:
        _check_part(lease.region, local_worker_count(line), requested)
    config["kv_connector"] = _CONNECTOR.name
    config[_MODULE] = _CONNECTOR.module
    config.setdefault("kv_role", "kv_both")
    variables = python_path(leases[0].paths.root, line.program, environ)
    notes = (
        *vllm_launch.notes_of(line, _CONNECTOR, environ),
        *release_notes(start.integration, line.program, environ),
    )
    used_bytes = None
    if requested is not None:
        used_bytes = requested[0] * local_worker_count(line) * len(leases)
    return Launch(line.with_config(config), variables, notes=notes, used_bytes=used_bytes)


def _config(line: CommandLine) -> dict[str, Any]:
    """Return the connector's configuration, without LMCache's own module, which ours replaces."""
    config = copy.deepcopy(parse_config(line))
    if config.get(_MODULE) == _LMCACHE_MODULE:
        del config[_MODULE]
    vllm_launch.check_config(config, _CONNECTOR)
    return config


def _check_part(region: Region, ranks: int, requested: tuple[int, str] | None) -> None:
    share = share_of(region.size_bytes, region.page_bytes, ranks=ranks, index=0)
    size_bytes = requested[0] if requested is not None else max(1, share.size_bytes)
    Allocator(share, requester=REQUESTER).allocate(size_bytes)
