"""Settings of LMCache's host memory: its sizes, and those inside of vLLM's processes.

Names and their order: lmcache/v1/config.py and integration/vllm/vllm_v1_adapter.py, 0.5.6. vLLM's
kv_connector_extra_config comes before the environment, and that before LMCache's file.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from hostprep.backing import GIB
from hostprep.engines.allocator import Requester
from hostprep.engines.launching import key_in_file
from hostprep.engines.vllm.settings import Settings
from hostprep.errors import BadInputError

PINNING = "HOSTPREP_LMCACHE"
"""The variable by which a server's process has its regions pinned by us."""

REQUESTER = Requester("LMCache", "max_local_cpu_size (GiB a rank)")
SIZE_KEY = "lmcache.max_local_cpu_size"
_FILE = "LMCACHE_CONFIG_FILE"
_SIZE_VARIABLE = "LMCACHE_MAX_LOCAL_CPU_SIZE"
_WITHOUT_EFFECT = {
    "cpu_bytes_to_use": f"LMCache's size is {SIZE_KEY}, in GiB a rank",
    "cpu_bytes_to_use_per_rank": f"LMCache's size is {SIZE_KEY}, in GiB a rank",
    "hostprep.deadline_s": "LMCache waits for its memory as it starts, however long that takes",
}


def read_settings(extra: Mapping[str, Any]) -> Settings:
    """Read our keys of kv_connector_extra_config.

    Raises BadInputError for unknown ones, and for what LMCache's memory cannot have.
    """
    settings = Settings.read(extra)
    against = [(key, why) for key, why in _WITHOUT_EFFECT.items() if key in extra]
    if extra.get("hostprep.mode", "sync") != "sync":
        against.append(("hostprep.mode background", "LMCache takes its memory as it starts"))
    if against:
        key, why = against[0]
        raise BadInputError(
            f"kv_connector_extra_config has {key}: {why}",
            reason="BadSetting",
            remedy="leave it out, or use --engine vllm-offloading",
        )
    return settings


def requested_size(extra: Mapping[str, Any], environ: Mapping[str, str]) -> tuple[int, str] | None:
    """Return the bytes that one rank is to take, and which setting says so; None where none does.

    Raises BadInputError for what is no size, and for one in LMCache's own file, which ours would
    override.
    """
    if key_in_file(environ.get(_FILE), "max_local_cpu_size"):
        raise BadInputError(
            f"{environ[_FILE]} sets max_local_cpu_size, which has to be seen without that file",
            reason="BadCommand",
            remedy=f"move it to {_SIZE_VARIABLE}, or leave it out to use the whole region",
        )
    for name, given in (
        (SIZE_KEY, extra.get(SIZE_KEY)),
        (_SIZE_VARIABLE, environ.get(_SIZE_VARIABLE)),
    ):
        if given is not None:
            return bytes_of_gib(given, name), f"{name} is {given}"
    return None


def bytes_of_gib(given: Any, name: str) -> int:
    """Return the bytes of a number of GiB, which LMCache calls GB. Raises BadInputError."""
    try:
        size = float(given) * GIB
        size_bytes = int(size) if math.isfinite(size) else 0
    except (TypeError, ValueError):
        size_bytes = 0
    if size_bytes <= 0:
        raise BadInputError(
            f"{name} {given!r} is no size",
            reason="BadCommand",
            remedy="give GiB, such as 64, or leave it out to use the whole region",
        )
    return size_bytes
