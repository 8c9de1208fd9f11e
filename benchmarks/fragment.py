"""A fragmented host, made on purpose: one pinned 4 KiB page in every 2 MiB of free memory.

That is what a long-running node looks like: most memory is free, and no two mebibytes of it lie
together. Pages are pinned by vmsplice(2) into pipes: they can neither be moved nor reclaimed, so
that compaction cannot help, and closing the pipes gives everything back.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
from array import array
from collections.abc import Iterator
from dataclasses import dataclass

from benchmarks.machine import contiguous_free_bytes, free_bytes
from hostprep.backing import GIB, MIB
from hostprep.linux.memory import address_of, advise, populate
from hostprep.linux.threads import run_pieces

_BLOCK_BYTES = 2 * MIB
_PAGE_BYTES = mmap.PAGESIZE
_PIPE_BYTES = (4 * MIB, MIB)  # a slot for each of 1024 pages, where CAP_SYS_RESOURCE allows it
_PIECE_BYTES = 16 * MIB
_BALLAST_PIECE_BYTES = 64 * MIB
_LEFT_BYTES = 2 * GIB
_F_SETPIPE_SZ = 1031  # linux/fcntl.h
_SPLICE_F_NONBLOCK = 2
_MADV_HUGEPAGE = 14
_MADV_NOHUGEPAGE = 15
_PFN_MASK = (1 << 55) - 1  # Documentation/admin-guide/mm/pagemap.rst

_libc = ctypes.CDLL(None, use_errno=True)


class _IoVec(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("size", ctypes.c_size_t))


@dataclass(frozen=True, slots=True)
class Fragmentation:
    """What was done to the machine."""

    blocks: int
    """Blocks of 2 MiB that hold a pinned page."""
    free_bytes: int
    """Free memory afterwards."""
    contiguous_bytes: int
    """Of it, what still lies in blocks of 2 MiB or more."""


@contextlib.contextmanager
def fragmented_memory(
    size_bytes: int | None = None, *, margin_bytes: int = 3 * GIB, spare_contiguous: int = 256 * MIB
) -> Iterator[Fragmentation]:
    """Fragment `size_bytes` of free memory (all but the margin if None) while the block runs.

    While memory is filled, `margin_bytes` stay free, so that nobody is killed for it. What is
    left in whole blocks afterwards is occupied in huge pages down to `spare_contiguous` (None of
    it if negative): there is plenty of other memory by then. Needs root (page frame numbers).
    Raises OSError, and PermissionError without root. Everything is given back at the end.
    """
    fill_bytes = max(0, free_bytes() - margin_bytes)
    fill_bytes = fill_bytes if size_bytes is None else min(fill_bytes, size_bytes)
    fill_bytes -= fill_bytes % _BLOCK_BYTES
    with contextlib.ExitStack() as stack:
        blocks = _pin_one_page_a_block(fill_bytes, stack) if fill_bytes else 0
        if spare_contiguous >= 0:
            _occupy_whole_blocks(stack, spare_contiguous)
        yield Fragmentation(blocks, free_bytes(), contiguous_free_bytes())


def _anonymous(size_bytes: int, advice: int) -> mmap.mmap:
    memory = mmap.mmap(-1, size_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    advise(address_of(memory), size_bytes, advice)
    return memory


def _pin_one_page_a_block(size_bytes: int, stack: contextlib.ExitStack) -> int:
    """Fill, pin one page of each physical block, free the others. Returns the blocks pinned."""
    with _anonymous(size_bytes, _MADV_NOHUGEPAGE) as memory:
        address = address_of(memory)
        run_pieces(
            lambda offset, length: populate(address + offset, length, write=True),
            size_bytes=size_bytes,
            piece_bytes=_PIECE_BYTES,
            threads=len(os.sched_getaffinity(0)),
        )
        pages = _first_page_of_each_block(address, size_bytes)
        pipes = _Pipes()
        stack.callback(pipes.close)
        for page in pages:
            pipes.pin(page)
    return len(pages)


def _first_page_of_each_block(address: int, size_bytes: int) -> list[int]:
    """Return one address for each physical block of 2 MiB that the range has a page of."""
    seen: dict[int, int] = {}
    with open("/proc/self/pagemap", "rb", buffering=0) as pagemap:
        for start in range(address, address + size_bytes, 512 * MIB):
            length = min(512 * MIB, address + size_bytes - start)
            entries = array("Q")
            pagemap.seek(start // _PAGE_BYTES * 8)
            entries.frombytes(pagemap.read(length // _PAGE_BYTES * 8))
            for index, entry in enumerate(entries):
                seen.setdefault((entry & _PFN_MASK) >> 9, start + index * _PAGE_BYTES)
    if 0 in seen and len(seen) == 1:
        raise PermissionError("page frame numbers are shown to root only")
    return list(seen.values())


class _Pipes:
    """Pipes that hold pages: one page a slot."""

    def __init__(self) -> None:
        self._descriptors: list[int] = []
        self._open_one()

    def _open_one(self) -> None:
        reader, writer = os.pipe2(os.O_CLOEXEC)
        self._descriptors += [reader, writer]
        for size_bytes in _PIPE_BYTES:
            with contextlib.suppress(PermissionError):
                fcntl.fcntl(writer, _F_SETPIPE_SZ, size_bytes)
                return

    def pin(self, address: int) -> None:
        """Let the newest pipe hold the page, or a new one when that is full."""
        segment = _IoVec(address, _PAGE_BYTES)
        while (
            _libc.vmsplice(
                self._descriptors[-1], ctypes.byref(segment), ctypes.c_ulong(1), _SPLICE_F_NONBLOCK
            )
            != _PAGE_BYTES
        ):
            code = ctypes.get_errno()
            if code != errno.EAGAIN:
                raise OSError(code, f"vmsplice: {os.strerror(code)}")
            self._open_one()

    def close(self) -> None:
        """Let all pages go."""
        for descriptor in self._descriptors:
            os.close(descriptor)


def _occupy_whole_blocks(stack: contextlib.ExitStack, spare_bytes: int) -> None:
    """Take the free memory that still lies in whole blocks, in huge pages, piece by piece.

    Never all memory: what is free and fragmented stays for everybody else.
    """
    limit_bytes = free_bytes() - _LEFT_BYTES
    limit_bytes -= limit_bytes % _BALLAST_PIECE_BYTES
    if limit_bytes <= 0:
        return
    memory = stack.enter_context(_anonymous(limit_bytes + _BLOCK_BYTES, _MADV_HUGEPAGE))
    address = -(-address_of(memory) // _BLOCK_BYTES) * _BLOCK_BYTES
    for offset in range(0, limit_bytes, _BALLAST_PIECE_BYTES):
        if contiguous_free_bytes() <= spare_bytes:
            return
        populate(address + offset, _BALLAST_PIECE_BYTES, write=True)
