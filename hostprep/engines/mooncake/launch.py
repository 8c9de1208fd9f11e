"""Mooncake's store service over leased regions: mounted by its REST interface as it starts."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence

from hostprep.engines.catalogue import way_of
from hostprep.engines.helper_process import beside
from hostprep.engines.installed import installed_version, untried
from hostprep.engines.launching import Launch, Options, Wanted
from hostprep.errors import BadInputError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from hostprep.client.lease import Lease

__all__ = ["arranged", "wanted"]

_PROGRAM = "mc_store_rest_server"
_PACKAGES = ("mooncake_transfer_engine", "mooncake_transfer_engine_non_cuda")
_DEFAULT_PORT = 8080
_FOLDER = "/dev/shm"  # noqa: S108 - Mooncake looks nowhere else
_OWN_MEMORY = "global_segment_size"


def wanted(command: tuple[str, ...], environ: Mapping[str, str], options: Options) -> Wanted:
    """Return what the service needs: as many regions as asked for, of any size.

    Raises BadInputError for another program, and for a configuration that has the service bring
    memory of its own besides.
    """
    words = _words(command)
    _port(words)
    _check_own_memory(words, environ)
    return Wanted(count=len(options.regions) or options.count or 1)


def arranged(
    command: tuple[str, ...], environ: Mapping[str, str], leases: Sequence[Lease]
) -> Launch:
    """Return the service's command beside a process that mounts the regions."""
    words = _words(command)
    arguments = [str(_port(words))]
    links = []
    for index, lease in enumerate(leases):
        name = f"hostprep-{lease.lease_id}-{index}"
        links.append((f"{_FOLDER}/{name}", index))
        arguments += [name, str(lease.region.size_bytes)]
    variables = {}
    if _config_path(words, environ) is None and not environ.get("MOONCAKE_GLOBAL_SEGMENT_SIZE"):
        variables["MOONCAKE_GLOBAL_SEGMENT_SIZE"] = "0"
    version = installed_version(command[0], _PACKAGES, environ)
    notes = untried("Mooncake", version, way_of("mooncake").versions)
    start = beside("hostprep.engines.mooncake.add_memory", arguments, command)
    return Launch(start, variables, tuple(links), notes)


def _words(command: Sequence[str]) -> tuple[str, ...]:
    """Return the service's own words."""
    for index, word in enumerate(command):
        if word.rpartition("/")[2] == _PROGRAM:
            return tuple(command[index + 1 :])
    raise BadInputError(
        f"the command is not {_PROGRAM}",
        reason="BadCommand",
        remedy=f"give --engine mooncake the store service: -- {_PROGRAM} ...; a store in an "
        "engine's own process takes regions by hostprep.engines.mooncake.segments",
    )


def _last(words: Sequence[str], name: str) -> str | None:
    found = None
    for index, word in enumerate(words):
        option, equals, text = word.partition("=")
        if option == name:
            found = text if equals else (words[index + 1] if index + 1 < len(words) else None)
    return found


def _port(words: Sequence[str]) -> int:
    text = _last(words, "--port") or str(_DEFAULT_PORT)
    if not text.isascii() or not text.isdigit():
        raise BadInputError(
            f"--port {text!r} is no port", reason="BadCommand", remedy="give a number"
        )
    return int(text)


def _config_path(words: Sequence[str], environ: Mapping[str, str]) -> str | None:
    return _last(words, "--config") or environ.get("MOONCAKE_CONFIG_PATH")


def _check_own_memory(words: Sequence[str], environ: Mapping[str, str]) -> None:
    """Refuse a store that would allocate memory besides the regions: that is today's slow start.

    Its default is some GiB (mooncake_config.py), so that a file has to say 0.
    """
    path = _config_path(words, environ)
    if path is None:
        size: object = environ.get("MOONCAKE_GLOBAL_SEGMENT_SIZE", "0")
        where = "MOONCAKE_GLOBAL_SEGMENT_SIZE"
    else:
        config = _read(path)
        if config is None:
            return  # Mooncake says it better
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
