"""What the node keeps for itself where the pool does not say."""

from __future__ import annotations

from hostprep.backing import GIB, MIB

__all__ = ["DEFAULT_LEAST_BYTES", "DEFAULT_MOST_BYTES", "DEFAULT_PERCENT", "reserve_of"]

DEFAULT_PERCENT = 4
DEFAULT_LEAST_BYTES = 512 * MIB
DEFAULT_MOST_BYTES = 16 * GIB


def reserve_of(asked_bytes: int | None, total_bytes: int) -> int:
    """Return the bytes to keep of a machine with `total_bytes`: as asked, else enough to live on.

    A pool that took all that is available would leave the first page fault to the OOM killer.
    """
    if asked_bytes is not None:
        return asked_bytes
    share = total_bytes * DEFAULT_PERCENT // 100
    return min(max(share, DEFAULT_LEAST_BYTES), DEFAULT_MOST_BYTES)
