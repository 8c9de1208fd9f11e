"""What is said of LMCache's host memory inside of vLLM's processes, and by whom.

Names and their order: lmcache/v1/config.py and integration/vllm/vllm_v1_adapter.py, 0.5.6. vLLM's
kv_connector_extra_config comes before the environment, and that before LMCache's file.
"""

from __future__ import annotations

from dataclasses import dataclass

from hostprep.engines.config_file import key_in_file
from hostprep.engines.lmcache.sizes import bytes_of_gib
from hostprep.engines.shares import Asker
from hostprep.engines.vllm.offloading_settings import Settings
from hostprep.errors import BadInputError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

__all__ = ["ASKER", "SIZE_KEY", "Asked", "read_settings", "size_asked"]

ASKER = Asker("LMCache", "max_local_cpu_size (GiB a rank)")
SIZE_KEY = "lmcache.max_local_cpu_size"
_FILE = "LMCACHE_CONFIG_FILE"
_SIZE_VARIABLE = "LMCACHE_MAX_LOCAL_CPU_SIZE"
_OF_OTHER_WAYS = {
    "cpu_bytes_to_use": f"LMCache's size is {SIZE_KEY}, in GiB a rank",
    "cpu_bytes_to_use_per_rank": f"LMCache's size is {SIZE_KEY}, in GiB a rank",
    "hostprep.deadline_s": "LMCache takes its memory as it starts, by one call that nothing ends",
}


@dataclass(frozen=True)
class Asked:
    """What one rank is told to take."""

    size_bytes: int
    because: str


def read_settings(extra: Mapping[str, Any]) -> Settings:
    """Read our keys of kv_connector_extra_config.

    Raises BadInputError for unknown ones, and for what LMCache's memory cannot have.
    """
    settings = Settings.read(extra)
    against = [(key, why) for key, why in _OF_OTHER_WAYS.items() if key in extra]
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


def size_asked(extra: Mapping[str, Any], environ: Mapping[str, str]) -> Asked | None:
    """Return what LMCache is told to take, in GiB whatever it calls them; None: nothing.

    Raises BadInputError for what is no size, and for one in LMCache's own file, which ours would
    take the place of.
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
            return Asked(bytes_of_gib(given, name), f"{name} is {given}")
    return None
