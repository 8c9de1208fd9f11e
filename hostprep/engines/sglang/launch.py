"""Launching SGLang's server over leased regions: its plugin found, its hierarchical cache on.

Names and defaults: sglang/srt/arg_groups/fields/{memory,parallel}.py and server_args.py, 0.5.23.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from hostprep.client.lease import Lease
from hostprep.engines.installation import offers_plugin, python_path, release_notes
from hostprep.engines.launching import (
    CommandSyntax,
    EngineStart,
    Launch,
    Requirements,
    ServerCommand,
    refuse_in_file,
)
from hostprep.engines.sglang.plugin import ENABLED, LocalRank, split_ranks
from hostprep.errors import BadInputError, NotReadyError
from hostprep.zipapp import STABLE_NAME

_MODULE = "sglang.launch_server"
_SYNTAX = CommandSyntax(
    starts=(("-m", _MODULE), ("sglang", "serve")),
    otherwise="the command starts no server of SGLang's",
    remedy=f"give --engine sglang one: -- python3 -m {_MODULE} ..., or -- sglang serve ...; "
    "for a program of your own see docs/engines/sglang.md",
    values=(
        "--config",
        "--disaggregation-mode",
        "--dp-size",
        "--hicache-host-memory-fraction",
        "--hicache-host-memory-mode",
        "--hicache-io-backend",
        "--hicache-mem-layout",
        "--hicache-ratio",
        "--hicache-size",
        "--hicache-storage-backend",
        "--hicache-storage-backend-extra-config",
        "--hicache-storage-prefetch-policy",
        "--hicache-write-policy",
        "--nnodes",
        "--pp-size",
        "--tp-size",
    ),
    flags=(
        "--disable-radix-cache",
        "--disaggregation-decode-enable-offload-kvcache",
        "--enable-dp-attention",
        "--enable-hierarchical-cache",
        "--enable-lmcache",
        "--enable-unified-cache-external-linker",
        "--use-ray",
    ),
    aliases={
        "--dp": "--dp-size",
        "--pp": "--pp-size",
        "--tp": "--tp-size",
        "--enable-hicache": "--enable-hierarchical-cache",
        "--tensor-parallel-size": "--tp-size",
        "--pipeline-parallel-size": "--pp-size",
        "--data-parallel-size": "--dp-size",
    },
    shortest=len("--enable-"),
)
_KEYS_IN_FILE = (
    r"(?:hicache|enable[-_]hi)[-_\w]*|(?:tp|pp|dp)[-_]size|"
    r"(?:tensor|pipeline|data)[-_]parallel[-_]size|nnodes"
)
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
_GROUP = "sglang.srt.plugins"
_NO_EFFECT = ("SGLANG_HUGEPAGE_SIZE", "SGLANG_HICACHE_HOST_PARALLEL_ALLOC_THREADS")


def requirements(start: EngineStart) -> Requirements:
    """Return what the server needs of the pool. Raises BadInputError where its options forbid it.

    One region for all its ranks, unless several are asked for. `--hicache-size` (GB a rank) is
    the least that each rank's part must have; what a ratio comes to, SGLang only knows later.
    """
    server = _SYNTAX.read(start.command)
    server.refuse(_ELSEWHERE)
    refuse_in_file(server.last("--config"), _KEYS_IN_FILE, engine="sglang")
    _check_storage(server, start.environ)
    count = start.options.region_count
    _, sharing = split_ranks(count, LocalRank(0, _local_ranks(server)))
    size_gb = server.number(
        "--hicache-size",
        0,
        least=0,
        what="size",
        remedy="give whole GB for each rank, such as 64",
    )
    if size_gb == 0:
        return Requirements(count=count)
    because = f"--hicache-size is {size_gb} for each rank"
    if sharing.count > 1:
        because += f", and {sharing.count} share a region"
    return Requirements(count=count, size_bytes=size_gb * _GB * sharing.count, because=because)


def complete(start: EngineStart, leases: Sequence[Lease]) -> Launch:
    """Return the server's command over these leases, and the variables that enable the plugin.

    Raises NotReadyError where the plugin cannot be found: SGLang would start without it.
    """
    server, environ = _SYNTAX.read(start.command), start.environ
    root = leases[0].paths.root
    variables = {ENABLED: "1", **python_path(root, server.program, environ)}
    if not offers_plugin(_GROUP, server.program, environ, variables):
        raise NotReadyError(
            f"SGLang would not find our plugin: there is no {root}/{STABLE_NAME}, or an older one",
            reason="NoPlugin",
            remedy=f"have the agent or `hostprep prepare` write {STABLE_NAME}, or install hostprep "
            "beside SGLang",
        )
    chosen = environ.get(_CHOSEN, "")
    if chosen and _PLUGIN not in (name.strip() for name in chosen.split(",")):
        variables[_CHOSEN] = f"{chosen},{_PLUGIN}"
    words = start.command
    # A decode server makes host pools for other ends.
    if server.last(_ENABLE) is None and server.last("--disaggregation-mode") != "decode":
        words += (_ENABLE,)
    if all(server.last(option) is None for option in _SIZES):
        # Of what is left of our memory: SGLang's 0.8 is for memory that others use as well.
        words += ("--hicache-host-memory-fraction", "1.0")
    notes = [
        f"{name} has no effect: the host pools are in prepared memory"
        for name in _NO_EFFECT
        if environ.get(name)
    ]
    notes[:0] = release_notes(start.integration, server.program, environ)
    return Launch(words, variables, notes=tuple(notes))


def _local_ranks(server: ServerCommand) -> int:
    """Return how many processes with a GPU it starts on this node."""
    ranks = _count(server, "--tp-size") * _count(server, "--pp-size")
    if server.last("--enable-dp-attention") is None:  # whose groups are ranks of one world
        ranks *= _count(server, "--dp-size")
    return max(1, ranks // _count(server, "--nnodes"))


def _count(server: ServerCommand, name: str) -> int:
    remedy = "give a whole number from 1 on"
    return server.number(name, 1, least=1, what="number of anything", remedy=remedy)


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
        return {}  # a file (@...), or SGLang reports it
    return config if isinstance(config, dict) else {}
