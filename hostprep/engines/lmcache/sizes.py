"""Sizes as LMCache is told them, and what one registration of its can have."""

from __future__ import annotations

import math

from hostprep.backing import GIB
from hostprep.cuda.chunks import ONE_CALL_LIMIT_BYTES
from hostprep.errors import BadInputError
from hostprep.units import format_bytes

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

__all__ = ["bytes_of_gib", "check_one_call"]


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


def check_one_call(size_bytes: int, *, owner: str, remedy: str) -> None:
    """Refuse what CUDA does not register by one call. Raises BadInputError."""
    if size_bytes >= ONE_CALL_LIMIT_BYTES:
        raise BadInputError(
            f"{owner} would have {format_bytes(size_bytes)}, registered with CUDA by one call, "
            f"which fails from {format_bytes(ONE_CALL_LIMIT_BYTES)} on",
            reason="RegionTooLarge",
            remedy=remedy,
        )
