"""The pool over a leased region: one writer for each."""

from __future__ import annotations

import threading
import weakref

from hostprep.errors import BadInputError, BusyError
from hostprep.layout import Layout
from hostprep.slots.pool import SPARE, SlotPool

TYPE_CHECKING = False
if TYPE_CHECKING:
    from hostprep.client.attachment import Attachment

__all__ = ["over"]

_lock = threading.Lock()
_taken: weakref.WeakValueDictionary[tuple[int, int], SlotPool] = weakref.WeakValueDictionary()
"""By the file's device and inode: what this process has an index over."""


def over(
    attachment: Attachment,
    *,
    layout: Layout | None = None,
    hash_bytes: int = 32,
    partial: bool = False,
    keep_evicted: bool = False,
    spare: float = SPARE,
) -> SlotPool:
    """Return a pool over a region's slots, all empty; see SlotPool for what is named alike.

    `layout` stands in for the handoff's, where the pool was not sized for a model. The process
    that leads the region's lease keeps the one index; those that joined it (other ranks) are told
    slot numbers by it, and have the same layout. The pool holds nothing of the attachment: keep
    that open while slots are used.

    Raises BadInputError: the attachment joined another's lease or only reads, the handoff has no
    layout, or one that does not fit. Raises BusyError where this process has a pool over it.
    """
    region = attachment.region
    if not attachment.is_leader:
        raise BadInputError(
            f"region {region.name} is not this process's to hand out slots of",
            reason="NotTheLeader",
            remedy="make the pool in the process that claimed the region, and send slot numbers",
        )
    if layout is None and region.layout is None:
        raise BadInputError(
            f"region {region.name} has no layout",
            reason="NoLayout",
            remedy="size the pool for the model (`hostprep size`), or give a layout",
        )
    chosen = layout or Layout.parse(region.layout or {}, region.size_bytes)
    chosen.check_fits(region.size_bytes)
    key = (region.st_dev, region.st_ino)
    with _lock:
        if key in _taken:
            raise BusyError(
                f"this process has a pool over region {region.name}",
                reason="PoolExists",
                remedy="use that one, from any thread: two would hand out the same slots",
            )
        pool = SlotPool(
            chosen,
            hash_bytes=hash_bytes,
            partial=partial,
            keep_evicted=keep_evicted,
            spare=spare,
        )
        _taken[key] = pool
    return pool
