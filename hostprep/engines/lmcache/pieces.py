"""LMCache's objects inside of vLLM, each within one registration.

Its connectors copy an object by one call, which fails across two registrations. So free space is
cut into pieces that are never merged, and registrations end where pieces do. A piece is some of
LMCache's chunks, the largest objects there are, and nothing is lost between them.
Imports LMCache (names: 0.5.6).
"""

from __future__ import annotations

import logging
from typing import Any

from lmcache.v1.memory_management import AddressManager, FreeBlock

from hostprep.backing import MIB

_log = logging.getLogger("hostprep.engines")
_LEAST_BYTES = 64 * MIB


def piece_bytes_of(chunk_bytes: int, align_bytes: int) -> int | None:
    """Return the size of a piece, for LMCache's chunks of that size.

    None for chunks that do not fill their space, where it is not known at which of LMCache's
    allocators' places they begin.
    """
    if chunk_bytes <= 0 or chunk_bytes % align_bytes:
        return None
    return max(1, _LEAST_BYTES // chunk_bytes) * chunk_bytes


def keep_within_pieces(allocator: Any, piece_bytes: int) -> None:
    """Have an allocator whose memory is all free keep objects within pieces.

    One with fixed places for chunks, as LMCache has as well, does so by itself.
    """
    pinned: Any = getattr(allocator, "pin_allocator", None)
    manager: Any = getattr(pinned, "address_manager", None)
    if type(manager) is AddressManager:
        pinned.address_manager = PieceAddresses(
            manager.get_heap_size(), manager.compute_aligned_size(1), piece_bytes
        )


class PieceAddresses(AddressManager):  # type: ignore[misc]
    """LMCache's list of free addresses, where none lies in two pieces."""

    def __init__(self, size_bytes: int, align_bytes: int, piece_bytes: int) -> None:
        super().__init__(size_bytes, align_bytes)
        self._piece_bytes = piece_bytes
        self._has_warned = False
        self._explicit_list.clear()
        for start in range(0, size_bytes, piece_bytes):
            self._explicit_list.add(FreeBlock(start, min(piece_bytes, size_bytes - start)))

    def allocate(self, size: int) -> tuple[int, int]:
        """Allocate as LMCache does, and say why what is larger than a piece never fits."""
        self._warn_of(size)
        found: tuple[int, int] = super().allocate(size)
        return found

    def batched_allocate(self, size: int, batch_size: int) -> list[tuple[int, int]]:
        """Allocate several of one size."""
        self._warn_of(size)
        found: list[tuple[int, int]] = super().batched_allocate(size, batch_size)
        return found

    def free(self, address: int, size: int) -> None:
        """Free addresses piece by piece: LMCache frees neighbours together."""
        end = address + size
        while address < end:
            part = min(end, (address // self._piece_bytes + 1) * self._piece_bytes) - address
            super().free(address, part)
            address += part

    def check_consistency(self) -> bool:
        """Tell whether what is free is merged within each piece, and nothing is lost."""
        blocks = list(self._explicit_list)
        is_merged = not any(
            self._can_merge_with_prev(after, before) for before, after in zip(blocks, blocks[1:])
        )
        free_bytes = sum(block.size for block in blocks)
        return is_merged and free_bytes == self.get_free_size()

    def _can_merge_with_prev(self, curr_block: FreeBlock, prev_block: FreeBlock) -> bool:
        begins = curr_block.start % self._piece_bytes == 0
        return not begins and bool(super()._can_merge_with_prev(curr_block, prev_block))

    def _can_merge_with_succ(self, curr_block: FreeBlock, succ_block: FreeBlock) -> bool:
        begins = succ_block.start % self._piece_bytes == 0
        return not begins and bool(super()._can_merge_with_succ(curr_block, succ_block))

    def _warn_of(self, size_bytes: int) -> None:
        if size_bytes > self._piece_bytes and not self._has_warned:
            self._has_warned = True
            _log.warning(
                "LMCache asks for an object of %d bytes, and its memory is in pieces of %d bytes. "
                "Objects of that size are not cached",
                size_bytes,
                self._piece_bytes,
            )
