"""Launching Mooncake's store service: its REST interface mounts leased regions as it starts."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence

from hostprep.client.lease import Lease
from hostprep.engines.helper_process import start_beside
from hostprep.engines.installation import release_notes
from hostprep.engines.launching import (
    CommandSyntax,
    EngineStart,
    Launch,
    Requirements,
    ServerCommand,
)
from hostprep.errors import BadInputError

_PROGRAM = "mc_store_rest_server"
_SYNTAX = CommandSyntax(
    starts=((_PROGRAM,),),
    otherwise=f"the command is not {_PROGRAM}",
    remedy=f"give --engine mooncake the store service: -- {_PROGRAM} ...; a store in an "
    "engine's own process takes regions by hostprep.engines.mooncake.segments",
    values=("--config", "--port"),
    flags=(),
    shortest=len("--config"),
)
_FOLDER = "/dev/shm"  # noqa: S108 - Mooncake searches nowhere else
_OWN_MEMORY = "global_segment_size"
_SIZE_VARIABLE = "MOONCAKE_GLOBAL_SEGMENT_SIZE"


def requirements(start: EngineStart) -> Requirements:
    """Return what the service needs: as many regions as asked for, of any size.

    Raises BadInputError for another program, and for a configuration that has the service bring
    memory of its own besides.
    """
    service = _SYNTAX.read(start.command)
    _port(service)
    _check_own_memory(service, start.environ)
    return Requirements(count=start.options.region_count)


def complete(start: EngineStart, leases: Sequence[Lease]) -> Launch:
    """Return the service's command beside a process that mounts the regions."""
    service = _SYNTAX.read(start.command)
    arguments = [_port(service)]
    links = []
    for index, lease in enumerate(leases):
        name = f"hostprep-{lease.lease_id}-{index}"
        links.append((f"{_FOLDER}/{name}", index))
        arguments += [name, str(lease.region.size_bytes)]
    environ, variables = start.environ, {}
    if _config_path(service, environ) is None and not environ.get(_SIZE_VARIABLE):
        variables[_SIZE_VARIABLE] = "0"
    words = start_beside("mooncake", arguments, start.command)
    notes = release_notes(start.integration, service.program, environ)
    return Launch(words, variables, tuple(links), notes)


def _port(service: ServerCommand) -> str:
    return str(service.number("--port", 8080, least=0, what="port", remedy="give a number"))


def _config_path(service: ServerCommand, environ: Mapping[str, str]) -> str | None:
    return service.last("--config") or environ.get("MOONCAKE_CONFIG_PATH")


def _check_own_memory(service: ServerCommand, environ: Mapping[str, str]) -> None:
    """Refuse a store that would allocate memory besides the regions: that makes its start slow.

    Its default is some GiB (mooncake_config.py), so that a file has to say 0.
    """
    path = _config_path(service, environ)
    if path is None:
        size: object = environ.get(_SIZE_VARIABLE, "0")
        where = _SIZE_VARIABLE
    else:
        config = _read(path)
        if config is None:
            return  # Mooncake reports it
        size, where = config.get(_OWN_MEMORY, "its default"), f"{_OWN_MEMORY} in {path}"
    if str(size).strip() not in {"0", "0gb", "0GB"}:
        raise BadInputError(
            f"{where} is {size}: the store would allocate that as well",
            reason="BadCommand",
            remedy="set it to 0: the store's memory is the regions",
        )


def _read(path: str) -> dict[str, object] | None:
    if not os.path.isfile(path):
        return None
    try:
        with open(path, encoding="utf-8") as file:
            config = json.load(file)
    except (OSError, ValueError):
        return None
    return config if isinstance(config, dict) else None
