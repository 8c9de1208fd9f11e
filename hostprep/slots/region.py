"""A pool over an attached region: its layout, its directory, and one index for each region."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Mapping, Sequence

from hostprep.errors import BadInputError, BusyError
from hostprep.layout import Layout
from hostprep.slots.checksums import checksum_in
from hostprep.slots.directory import Directory, void_any
from hostprep.slots.pool import SPARE, SlotPool

TYPE_CHECKING = False
if TYPE_CHECKING:
    from hostprep.client.attach import Attachment

_lock = threading.Lock()
_pools: weakref.WeakKeyDictionary[Attachment, weakref.ref[SlotPool]] = weakref.WeakKeyDictionary()
"""By attachment, not by the file's inode: a pool that outlives its attachment is no reason to
refuse the next, and a file system mounted anew starts its inodes again."""


def over(
    attachment: Attachment,
    *,
    layout: Layout | None = None,
    hash_bytes: int = 32,
    partial: bool = False,
    keep_evicted: bool = False,
    spare: float = SPARE,
    usable: Sequence[int] | None = None,
    keep: Mapping[str, str] | None = None,
    checksum: bool = False,
) -> SlotPool:
    """Return a pool over a region's slots, all empty; see SlotPool for what is named alike.

    With `keep`, the identity of what will be stored (model, weights, types: all that the bytes
    depend on beside the hashes), blocks are recorded in the region's last bytes, and those that an
    earlier process recorded under an equal identity are there from the start. The bytes outlive the
    process where the region was claimed with an `Owner`. The pool then keeps the mapping open.
    With `checksum` too, `commit` reads the bytes that were written and records their CRC-32, and
    those of an earlier process are read again, all of them, before this returns: what differs is
    not there (`SlotPool.damaged_blocks`). It is for bytes of this region alone. Without `keep`,
    records that an earlier process left there are void.

    `layout` stands in for the handoff's, where the pool was not sized for a model. The process
    that leads the region's lease keeps the one index; those that joined it (other ranks) receive
    slot numbers from it, and have the same layout. The pool holds nothing of the attachment: keep
    that open while slots are used.

    Raises BadInputError: the attachment joined another's lease or only reads, the handoff has no
    layout, or one that does not fit; `checksum` without `keep`. Raises BusyError where this process
    has a pool over it.
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
    if checksum and keep is None:
        raise BadInputError(
            "checksum without keep: there is no record to hold it", remedy="give keep, or neither"
        )
    directory = None if keep is None else _directory(attachment, chosen, hash_bytes, checksum)
    with _lock:
        earlier = _pools.get(attachment)
        if earlier is not None and earlier() is not None:
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
            usable=usable,
            directory=directory,
            checksum=checksum_in(attachment.buffer, chosen) if checksum else None,
        )
        if directory is None:
            void_any(attachment.buffer)
        elif keep is not None:
            if directory.identity != keep:
                directory.reset(keep)
            pool.recover()
        _pools[attachment] = weakref.ref(pool)
    return pool


def _directory(
    attachment: Attachment, layout: Layout, hash_bytes: int, checksum: bool
) -> Directory:
    """Return the directory in a region's last bytes. Raises BadInputError where slots lie there."""
    slots = sum(group.slots for group in layout.groups)
    size_bytes = Directory.size_bytes_for(slots, hash_bytes)
    room_bytes = attachment.region.size_bytes - max(group.end_bytes for group in layout.groups)
    if room_bytes < size_bytes:
        raise BadInputError(
            f"the directory of {slots} slots takes the last {size_bytes} bytes of region "
            f"{attachment.region.name}, and its layout leaves {room_bytes}",
            reason="NoRoomForDirectory",
            remedy="give a layout of fewer slots, or a larger region",
        )
    end = attachment.buffer[-size_bytes:]
    return Directory(end, layout, key_bytes=hash_bytes, checksums=checksum)
