"""Checksums of slots' contents: CRC-32, for a directory that has them (docs/directory.md)."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from zlib import crc32

from hostprep.layout import Layout

_MOST_THREADS = 16

Checksum = Callable[[int, int], int]
"""Returns the checksum of a group's slot, read now."""


def checksum_in(buffer: memoryview, layout: Layout) -> Checksum:
    """Return the checksum of slots in a region's bytes."""

    def checksum(group: int, slot: int) -> int:
        at = layout.offset_bytes(group, slot)
        return crc32(buffer[at : at + layout.groups[group].slot_bytes])

    return checksum


def checksums_of(checksum: Checksum, group: int, slots: Sequence[int]) -> list[int]:
    """Return the slots' checksums, read by as many threads as there are processors."""
    from concurrent.futures import ThreadPoolExecutor

    threads = min(len(os.sched_getaffinity(0)), _MOST_THREADS)
    if threads == 1 or len(slots) < threads:
        return [checksum(group, slot) for slot in slots]
    step = -(-len(slots) // threads)
    parts = [slots[at : at + step] for at in range(0, len(slots), step)]
    with ThreadPoolExecutor(threads) as executor:
        found = executor.map(lambda part: [checksum(group, slot) for slot in part], parts)
        return [each for part in found for each in part]
