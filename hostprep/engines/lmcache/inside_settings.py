"""How much host memory LMCache takes inside of vLLM's processes, and by whose word.

Names and their order: lmcache/v1/config.py and integration/vllm/vllm_v1_adapter.py, 0.5.6. vLLM's
kv_connector_extra_config comes before the environment, and that before LMCache's file.
"""

from __future__ import annotations

import math
import re

from hostprep.errors import BadInputError
from hostprep.values import value

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

__all__ = ["FILE", "SIZE_KEY", "Asked", "key_in_file", "size_asked"]

SIZE_KEY = "lmcache.max_local_cpu_size"
FILE = "LMCACHE_CONFIG_FILE"
_SIZE_VARIABLE = "LMCACHE_MAX_LOCAL_CPU_SIZE"
_GIB = 1 << 30
_IN_A_FILE = re.compile(r"^[ \t]*['\"]?max_local_cpu_size['\"]?[ \t]*:", re.MULTILINE)
_FILE_LIMIT = 1 << 20


@value
class Asked:
    """What one rank is told to take."""

    size_bytes: int
    because: str


def size_asked(extra: Mapping[str, Any], environ: Mapping[str, str]) -> Asked | None:
    """Return what LMCache is told to take, in GiB whatever it calls them; None: nothing.

    Raises BadInputError for what is no size.
    """
    for name, given in (
        (SIZE_KEY, extra.get(SIZE_KEY)),
        (_SIZE_VARIABLE, environ.get(_SIZE_VARIABLE)),
    ):
        if given is None:
            continue
        try:
            size = float(given) * _GIB
            size_bytes = int(size) if math.isfinite(size) else 0
        except (TypeError, ValueError):
            size_bytes = 0
        if size_bytes <= 0:
            raise BadInputError(
                f"{name} {given!r} is no size",
                reason="BadCommand",
                remedy="give GiB, such as 64, or leave it out to use the whole region",
            )
        return Asked(size_bytes, f"{name} is {given}")
    return None


def key_in_file(environ: Mapping[str, str]) -> bool:
    """Tell whether LMCache's own file sets the size; a file that cannot be read does not."""
    path = environ.get(FILE)
    if not path:
        return False
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return _IN_A_FILE.search(file.read(_FILE_LIMIT)) is not None
    except OSError:
        return False  # LMCache says it better
