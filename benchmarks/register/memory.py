"""Resident files of every kind of page, made without anything but the kernel."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from benchmarks.register.pages_ledger import added_pages
from hostprep.backing import GIB, MIB, Backing
from hostprep.errors import HostprepError
from hostprep.linux.memory import address_of, map_shared, populate
from hostprep.linux.mounts import mount, unmount
from hostprep.linux.threads import run_pieces

_MFD_HUGETLB = 0x4
_MFD_HUGE_SHIFT = 26
_POOLS = Path("/sys/kernel/mm/hugepages")
_PIECE_BYTES = 64 * MIB
_libc = ctypes.CDLL(None)
_libc.memset.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t]


class NotHereError(Exception):
    """This kind of memory cannot be had on this machine now; in words."""


@contextlib.contextmanager
def resident(backing: Backing, size_bytes: int) -> Iterator[str]:
    """Give a path that any process of this user opens: a file of so much, every page resident.

    Huge pages are added to the machine's pool and taken away again, as many as were missing.
    Raises NotHereError.
    """
    with contextlib.ExitStack() as held:
        try:
            fd = held.enter_context(_file(backing, size_bytes))
            os.ftruncate(fd, size_bytes)
            mapping = map_shared(fd, size_bytes)
            populate_all(address_of(mapping), size_bytes, write=True)
        except (OSError, HostprepError) as error:
            raise NotHereError(f"{backing}: {error}") from error
        mapping.close()
        yield f"/proc/{os.getpid()}/fd/{fd}"


def populate_all(address: int, size_bytes: int, *, write: bool) -> None:
    """Make every page present, by as many threads as there are CPUs, at most 16."""

    def piece(offset: int, length: int) -> None:
        make_present(address + offset, length, write=write)

    threads = min(16, len(os.sched_getaffinity(0)))
    run_pieces(piece, size_bytes=size_bytes, piece_bytes=_PIECE_BYTES, threads=threads)


def make_present(address: int, size_bytes: int, *, write: bool) -> None:
    """Make every page present, by touching it where the kernel (or gVisor) cannot populate."""
    try:
        populate(address, size_bytes, write=write)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        if write:
            _libc.memset(address, 0, size_bytes)
        else:
            pages = (ctypes.c_char * size_bytes).from_address(address)
            assert len(memoryview(pages)[:: mmap.PAGESIZE].tobytes()) > 0


def _file(backing: Backing, size_bytes: int) -> contextlib.AbstractContextManager[int]:
    makers: dict[Backing, Callable[[], contextlib.AbstractContextManager[int]]] = {
        Backing.BASE: lambda: _memfd(0),
        Backing.THP: lambda: _on_tmpfs(size_bytes),
        Backing.HUGETLB_2MI: lambda: _huge(size_bytes, 2 * MIB),
        Backing.HUGETLB_1GI: lambda: _huge(size_bytes, GIB),
    }
    return makers[backing]()


@contextlib.contextmanager
def _memfd(flags: int) -> Iterator[int]:
    fd = os.memfd_create("hostprep-bench", flags | os.MFD_CLOEXEC)
    try:
        yield fd
    finally:
        os.close(fd)


@contextlib.contextmanager
def _huge(size_bytes: int, page_bytes: int) -> Iterator[int]:
    folder = _POOLS / f"hugepages-{page_bytes // 1024}kB"
    with _pages(folder, -(-size_bytes // page_bytes)):
        shift = page_bytes.bit_length() - 1
        with _memfd(_MFD_HUGETLB | shift << _MFD_HUGE_SHIFT) as fd:
            yield fd


@contextlib.contextmanager
def _pages(folder: Path, wanted: int) -> Iterator[None]:
    """Have so many free pages in the pool; by difference, since others use it as well."""
    try:
        # Those reserved are others', although nothing lies in them yet.
        free = [int((folder / f"{kind}_hugepages").read_text()) for kind in ("free", "resv")]
        missing = max(0, wanted - (free[0] - free[1]))
    except OSError as error:
        raise NotHereError(f"{folder.name}: this kernel offers no such pages") from error
    if not missing:
        yield
        return
    try:
        with added_pages(folder, missing) as added:
            if added < missing:
                free_pages = wanted - missing + added
                raise NotHereError(f"{folder.name}: only {free_pages} of {wanted} free")
            yield
    except OSError as error:
        raise NotHereError(f"{folder.name}: {missing} pages are missing, and {error}") from error


@contextlib.contextmanager
def _on_tmpfs(size_bytes: int) -> Iterator[int]:
    """Use a tmpfs of our own, since a memfd has large pages only where the node's knob says so."""
    folder = tempfile.mkdtemp(prefix="hostprep-bench-")
    try:
        mount("tmpfs", folder, f"huge=always,size={size_bytes + mmap.PAGESIZE}")
        try:
            path = os.path.join(folder, "memory")
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                yield fd
            finally:
                os.close(fd)
                os.unlink(path)
        finally:
            unmount(folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
