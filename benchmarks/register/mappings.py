"""Memory as one process has it mapped, and what of it is registered."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import threading
import time
from collections.abc import Callable, Generator

from benchmarks.register.cuda import Cuda, CudaError
from benchmarks.register.memory import make_present, populate_all
from hostprep.backing import MIB
from hostprep.cuda.chunks import ChunkPolicy, next_chunk_bytes
from hostprep.linux.memory import address_of, map_shared

_FIRST_BYTES = 256 * MIB
_MAP_FIXED = 0x10
_FAILED = ctypes.c_void_p(-1).value
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
Turn = Callable[[], contextlib.AbstractContextManager[object]]

GAPS = ("none", "1 ms", "one call")
"""What may lie between two calls."""


class Mapping:
    """A mapping, and the calls that registered it."""

    def __init__(self, mapping: mmap.mmap) -> None:
        self._mapping = mapping
        self._registered: list[int] = []
        self.address = address_of(mapping)
        self.size_bytes = len(mapping)

    def register(
        self,
        cuda: Cuda,
        chunk: int | str,
        *,
        gap: str = "none",
        turn: Turn = contextlib.nullcontext,
    ) -> list[float]:
        """Register all of it; returns the seconds of each call. `turn` is around each of them."""
        size = self.size_bytes
        steered = chunk == "steered"
        lengths = _steered(size) if steered else _equal(size, int(chunk))
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
                if length and gap != "none":
                    time.sleep(0.001 if gap == "1 ms" else took[-1])
        except BaseException:
            self.unregister(cuda)
            raise
        return took

    def register_by_threads(self, cuda: Cuda, chunk: int, threads: int) -> list[float]:
        """Register all of it by chunks that several threads take; returns the seconds of each."""
        offsets = iter(range(0, self.size_bytes, chunk))
        lock = threading.Lock()
        took: list[float] = []
        refused: list[CudaError] = []

        def work() -> None:
            try:
                cuda.call("cuCtxSetCurrent", cuda.context)
                with cuda.relaxed():
                    while not refused:
                        with lock:
                            offset = next(offsets, None)
                        if offset is None:
                            return
                        begin_s = time.perf_counter()
                        cuda.register(self.address + offset, min(chunk, self.size_bytes - offset))
                        took.append(time.perf_counter() - begin_s)
                        self._registered.append(self.address + offset)
            except CudaError as error:
                refused.append(error)

        workers = [threading.Thread(target=work) for _ in range(threads)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        if refused:
            self.unregister(cuda)
            raise refused[0]
        return took

    def unregister(self, cuda: Cuda) -> list[float]:
        """Undo all calls in reverse; returns the seconds of each."""
        took = []
        while self._registered:
            begin_s = time.perf_counter()
            cuda.unregister(self._registered.pop())
            took.append(time.perf_counter() - begin_s)
        return took

    def populate(self, *, by_all_cpus: bool) -> None:
        """Make every page present, by one thread or by all CPUs."""
        if by_all_cpus:
            populate_all(self.address, self.size_bytes, write=True)
        else:
            make_present(self.address, self.size_bytes, write=True)

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
    # Huge pages take a moment; threads would cost more than they save.
    if os.statvfs(path).f_bsize > mmap.PAGESIZE:
        make_present(address, size_bytes, write=False)
    else:
        populate_all(address, size_bytes, write=False)
    return Mapping(mapping)


def cold_mapping(size_bytes: int, segments: int = 1) -> Mapping:
    """Map fresh memfds of base pages: allocated, zeroed and faulted by whoever touches them.

    Several of them are glued to one range, as vLLM 0.33 does (research: engines, section 1.1).
    """
    mapping = mmap.mmap(-1, size_bytes, mmap.MAP_SHARED | mmap.MAP_ANONYMOUS)
    address = address_of(mapping)
    part = -(-size_bytes // segments // mmap.PAGESIZE) * mmap.PAGESIZE
    for offset in range(0, size_bytes, part):
        _glue(address + offset, min(part, size_bytes - offset))
    return Mapping(mapping)


def _glue(address: int, size_bytes: int) -> None:
    """Put a fresh memfd in place of what is mapped there. Raises OSError."""
    fd = os.memfd_create("hostprep-bench-cold", os.MFD_CLOEXEC)
    try:
        os.ftruncate(fd, size_bytes)
        protection = mmap.PROT_READ | mmap.PROT_WRITE
        flags = mmap.MAP_SHARED | _MAP_FIXED
        if _libc.mmap(address, size_bytes, protection, flags, fd, 0) == _FAILED:
            raise OSError(ctypes.get_errno(), "mmap of a segment")
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


def _steered(size_bytes: int) -> _Lengths:
    """Yield what `hostprep.register` would, told how long each call took."""
    policy = ChunkPolicy(first_bytes=_FIRST_BYTES)
    offset, last_bytes, last_s = 0, 0, 0.0
    while offset < size_bytes:
        last_bytes = next_chunk_bytes(
            policy, offset_bytes=offset, end_bytes=size_bytes, last_bytes=last_bytes, last_s=last_s
        )
        last_s = yield last_bytes
        offset += last_bytes
    yield 0
