"""Memory as one process has it mapped, and what of it is registered."""

from __future__ import annotations

import contextlib
import mmap
import os
import time
from collections.abc import Callable, Generator

from benchmarks.register.cuda import Cuda
from benchmarks.register.memory import populate_all
from hostprep.backing import MIB
from hostprep.cuda.chunks import ChunkPolicy, next_chunk_bytes
from hostprep.linux.memory import address_of, map_shared, populate

_FIRST_BYTES = 256 * MIB
Turn = Callable[[], contextlib.AbstractContextManager[object]]


class Mapping:
    """A mapping, and the calls that registered it."""

    def __init__(self, mapping: mmap.mmap, page_bytes: int = mmap.PAGESIZE) -> None:
        self._mapping = mapping
        self._page_bytes = page_bytes
        self._registered: list[int] = []
        self.address = address_of(mapping)
        self.size_bytes = len(mapping)

    def register(
        self, cuda: Cuda, chunk: int | str, *, turn: Turn = contextlib.nullcontext
    ) -> list[float]:
        """Register all of it; returns the seconds of each call. `turn` is around each of them."""
        size = self.size_bytes
        steered = chunk == "steered"
        lengths = _steered(size, self._page_bytes) if steered else _equal(size, int(chunk))
        took: list[float] = []
        offset = 0
        length = next(lengths)
        try:
            while length:
                with turn():
                    begin_s = time.perf_counter()
                    cuda.register(self.address + offset, length)
                    took.append(time.perf_counter() - begin_s)
                self._registered.append(self.address + offset)
                offset += length
                length = lengths.send(took[-1])
        except BaseException:
            self.unregister(cuda)
            raise
        return took

    def unregister(self, cuda: Cuda) -> list[float]:
        """Undo all calls in reverse; returns the seconds of each."""
        took = []
        while self._registered:
            begin_s = time.perf_counter()
            cuda.unregister(self._registered.pop())
            took.append(time.perf_counter() - begin_s)
        return took

    def close(self) -> None:
        """Unmap."""
        self._mapping.close()


def file_mapping(path: str, offset: int, size_bytes: int) -> Mapping:
    """Map a part of a resident file, every page table entry present."""
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        mapping = map_shared(fd, size_bytes, offset_bytes=offset)
    finally:
        os.close(fd)
    address = address_of(mapping)
    page_bytes = os.statvfs(path).f_bsize
    # Huge pages take a moment; threads would cost more than they save.
    if page_bytes > mmap.PAGESIZE:
        populate(address, size_bytes, write=False)
    else:
        populate_all(address, size_bytes, write=False)
    return Mapping(mapping, page_bytes)


def cold_mapping(size_bytes: int) -> Mapping:
    """Map a fresh memfd of base pages: allocated, zeroed and faulted by whoever touches it."""
    fd = os.memfd_create("hostprep-bench-cold", os.MFD_CLOEXEC)
    try:
        os.ftruncate(fd, size_bytes)
        return Mapping(map_shared(fd, size_bytes))
    finally:
        os.close(fd)


_Lengths = Generator[int, float, None]
"""Yields the length of each call, is sent the seconds that it took, and ends with 0."""


def _equal(size_bytes: int, chunk_bytes: int) -> _Lengths:
    left = size_bytes
    while left:
        length = min(left, chunk_bytes or left)
        left -= length
        yield length
    yield 0


def _steered(size_bytes: int, page_bytes: int) -> _Lengths:
    """Yield what `hostprep.register` would, told how long each call took."""
    policy = ChunkPolicy(first_bytes=_FIRST_BYTES, page_bytes=page_bytes)
    offset, last_bytes, last_s = 0, 0, 0.0
    while offset < size_bytes:
        last_bytes = next_chunk_bytes(
            policy, offset_bytes=offset, end_bytes=size_bytes, last_bytes=last_bytes, last_s=last_s
        )
        last_s = yield last_bytes
        offset += last_bytes
    yield 0
