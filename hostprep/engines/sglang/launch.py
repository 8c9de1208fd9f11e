"""SGLang's server over leased regions: its plugin found, its hierarchical cache on."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence

from hostprep.engines.catalogue import way_of
from hostprep.engines.importable import python_path
from hostprep.engines.installed import installed_version, site_folders, untried
from hostprep.engines.launching import Launch, Options, Wanted
from hostprep.engines.sglang.command_line import ServerCommand, read_command
from hostprep.engines.sglang.place import Place, place_in
from hostprep.engines.sglang.plugin import ASKED
from hostprep.errors import BadInputError, NotReadyError
from hostprep.zipapp import STABLE_NAME

TYPE_CHECKING = False
if TYPE_CHECKING:
    from hostprep.client.lease import Lease

__all__ = ["arranged", "wanted"]

_GB = 10**9
"""What --hicache-size counts in (pool_host/base.py)."""
_PLUGIN = "hostprep"
"""The name of our entry point."""
_CHOSEN = "SGLANG_PLUGINS"
_STANDALONE = "MOONCAKE_STANDALONE_STORAGE"
_ENABLE = "--enable-hierarchical-cache"
_SIZES = ("--hicache-size", "--hicache-ratio", "--hicache-host-memory-fraction")
_ELSEWHERE = {
    "--disable-radix-cache": "leaves nothing to be kept in host memory",
    "--enable-lmcache": "gives the host tier to LMCache: use --engine lmcache for its server",
    "--enable-unified-cache-external-linker": "puts another store in the place of the host pools",
    "--use-ray": "has Ray start the ranks, outside of this command and its lease",
}
_OWN_MEMORY = ("mori", "shm", "tensorcast")
"""Storage backends that bring the host pools' memory (get_allocator_from_storage)."""
_POINTS = "entry_points.txt"
_ENTRY = re.compile(rf"hostprep-[^/]+\.dist-info/{_POINTS}")
_NO_EFFECT = ("SGLANG_HUGEPAGE_SIZE", "SGLANG_HICACHE_HOST_PARALLEL_ALLOC_THREADS")


def wanted(command: tuple[str, ...], environ: Mapping[str, str], options: Options) -> Wanted:
    """Return what the server needs of the pool. Raises BadInputError where its options forbid it.

    One region for all its ranks, unless several are asked for. `--hicache-size` (GB a rank) is
    the least that each rank's part must have; what a ratio comes to, SGLang only knows later.
    """
    server = read_command(command)
    _check(server, environ)
    count = len(options.regions) or options.count or 1
    ranks = server.ranks_here
    _, place = place_in(count, Place(0, ranks))
    size = _size_gb(server)
    if size == 0:
        return Wanted(count=count)
    because = f"--hicache-size is {size} for each rank"
    if place.count > 1:
        because += f", and {place.count} share a region"
    return Wanted(count=count, size_bytes=size * _GB * place.count, because=because)


def arranged(
    command: tuple[str, ...], environ: Mapping[str, str], leases: Sequence[Lease]
) -> Launch:
    """Return the server's command over these leases, and what leads it to the plugin.

    Raises NotReadyError where the plugin cannot be found: SGLang would start without it.
    """
    server = read_command(command)
    root = leases[0].paths.root
    variables = {ASKED: "1", **python_path(root, server.program, environ)}
    paths = variables.get("PYTHONPATH", environ.get("PYTHONPATH", "")).split(":")
    _check_found((*paths, *site_folders(server.program, environ)), root)
    chosen = environ.get(_CHOSEN, "")
    if chosen and _PLUGIN not in (name.strip() for name in chosen.split(",")):
        variables[_CHOSEN] = f"{chosen},{_PLUGIN}"
    words = list(server.words)
    version = installed_version(server.program, ("sglang",), environ)
    notes = list(untried("SGLang", version, way_of("sglang").versions))
    if not _has_pools(server):
        words.append(_ENABLE)
    if all(server.last(option) is None for option in _SIZES):
        # Of what is left of our memory: SGLang's 0.8 is for memory that others use as well.
        words += ["--hicache-host-memory-fraction", "1.0"]
    notes += [
        f"{name} has no effect: the host pools are in prepared memory"
        for name in _NO_EFFECT
        if environ.get(name)
    ]
    return Launch(tuple(words), variables, (), tuple(notes))


def _has_pools(server: ServerCommand) -> bool:
    """Tell whether SGLang makes host pools by itself: a decode server has some for other ends."""
    return server.last(_ENABLE) is not None or server.last("--disaggregation-mode") == "decode"


def _check(server: ServerCommand, environ: Mapping[str, str]) -> None:
    for option, why in _ELSEWHERE.items():
        if server.last(option) is not None:
            raise BadInputError(
                f"{option} {why}", reason="BadCommand", remedy=f"leave {option} out"
            )
    key = server.key_in_file
    if key is not None:
        raise BadInputError(
            f"{server.last('--config')} sets {key}, which --engine sglang has to see",
            reason="BadCommand",
            remedy="move it from the file to the command line",
        )
    _check_storage(server, environ)


def _check_storage(server: ServerCommand, environ: Mapping[str, str]) -> None:
    """Refuse storage backends that bring the memory of the host pools themselves."""
    backend = server.last("--hicache-storage-backend")
    extra = _extra_config(server)
    brings = backend in _OWN_MEMORY or (backend == "dynamic" and extra.get("allocator") == "shm")
    if backend == "mooncake":
        alone = extra.get("standalone_storage", environ.get(_STANDALONE, ""))
        brings = str(alone).lower() in {"1", "true", "yes", "y"}
    if brings:
        raise BadInputError(
            f"--hicache-storage-backend {backend}, as it is configured, allocates the host pools "
            "itself, outside of the region",
            reason="BadCommand",
            remedy="use another one (file, nixl, hf3fs, mooncake without standalone_storage), or "
            "leave it out",
        )


def _extra_config(server: ServerCommand) -> dict[str, object]:
    """Return the backend's configuration; {} where it is in a file, or cannot be read."""
    try:
        config = json.loads(server.last("--hicache-storage-backend-extra-config") or "{}")
    except ValueError:
        return {}  # a file (@...), or SGLang says it better
    return config if isinstance(config, dict) else {}


def _size_gb(server: ServerCommand) -> int:
    text = server.last("--hicache-size")
    if text is None:
        return 0
    if not text.isascii() or not text.isdigit():
        raise BadInputError(
            f"--hicache-size {text!r} is no size",
            reason="BadCommand",
            remedy="give whole GB for each rank, such as 64",
        )
    return int(text)


def _check_found(paths: Sequence[str], root: str) -> None:
    """Refuse a start that SGLang would make without the plugin, in memory of its own.

    Entry points are found by what lies beside a package: our zipapp has it, and where we are
    installed; a folder of sources has not.
    """
    if not any(_offers(path) for path in paths if path):
        raise NotReadyError(
            f"SGLang would not find our plugin: there is no {root}/{STABLE_NAME}, or an older one",
            reason="NoPlugin",
            remedy=f"have the agent or `hostprep prepare` write {STABLE_NAME}, or install hostprep "
            "beside SGLang",
        )


def _offers(path: str) -> bool:
    """Tell whether a folder or a zip file on Python's path has our entry point."""
    try:
        if os.path.isfile(path):
            return any(map(_ENTRY.fullmatch, _names(path)))
        folders = [name for name in os.listdir(path) if _ENTRY.fullmatch(f"{name}/{_POINTS}")]
        return any(_says_sglang(f"{path}/{name}/{_POINTS}") for name in folders)
    except OSError:
        return False


def _names(path: str) -> list[str]:
    import zipfile

    try:
        with zipfile.ZipFile(path) as archive:
            return archive.namelist()
    except zipfile.BadZipFile:
        return []


def _says_sglang(path: str) -> bool:
    if not os.path.isfile(path):
        return False
    with open(path, encoding="utf-8") as file:
        return "[sglang.srt.plugins]" in file.read()
