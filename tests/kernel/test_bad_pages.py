"""Memory goes bad: the walk names the page. userfaultfd's poison makes one without hardware."""

from __future__ import annotations

import ctypes
import os
import platform

import pytest

from hostprep.apply.service import Node
from hostprep.backing import MIB, Backing
from hostprep.errors import NotReadyError
from hostprep.handoff import open_region, read_handoff
from hostprep.handoff.verify import bad_pages
from hostprep.kernel.memory import address_of, explain, map_shared
from hostprep.paths import PoolPaths
from tests.support.pools import POOL, pool_of

pytestmark = pytest.mark.kernel

_SYSCALL = {"x86_64": 323, "aarch64": 282}
# linux/userfaultfd.h
_API = 0xC018AA3F
_REGISTER = 0xC020AA00
_POISON = 0xC020AA08
_FEATURE_POISON = 1 << 14
_MODE_MISSING = 1


@pytest.mark.parametrize("backing", [Backing.BASE, Backing.HUGETLB_2MI])
def test_a_poisoned_page_is_named(node: Node, backing: Backing) -> None:
    """UFFDIO_POISON (Linux 6.6) makes the kernel answer as it does for a bad page."""
    node.prepare([pool_of(mib=16, backing=backing)])
    paths = PoolPaths(node.root, POOL)
    (region,) = read_handoff(paths).regions
    fd = open_region(paths, region, writable=True)
    with map_shared(fd, region.size_bytes) as mapping:
        address = address_of(mapping)
        uffd = _poison(address, region.size_bytes, 6 * MIB, region.page_bytes)
        assert list(bad_pages(address, region.size_bytes, region.page_bytes)) == [6 * MIB]
        os.close(uffd)
    os.close(fd)


def _poison(address: int, size_bytes: int, offset: int, page_bytes: int) -> int:
    libc = ctypes.CDLL(None, use_errno=True)
    uffd = libc.syscall(_SYSCALL[platform.machine()], os.O_CLOEXEC)
    assert uffd >= 0, os.strerror(ctypes.get_errno())
    for request, words in (
        (_API, (0xAA, _FEATURE_POISON, 0)),
        (_REGISTER, (address, size_bytes, _MODE_MISSING, 0)),
        (_POISON, (address + offset, page_bytes, 0, 0)),
    ):
        argument = (ctypes.c_uint64 * len(words))(*words)
        result = libc.ioctl(uffd, ctypes.c_ulong(request), argument)
        assert result == 0, os.strerror(ctypes.get_errno())
    return int(uffd)


def test_a_bad_page_is_told_from_other_trouble() -> None:
    assert explain(133, "x").reason == "PoisonedPage"
    assert isinstance(explain(133, "x"), NotReadyError)
    assert explain(14, "x").reason == "OutOfPages"
    assert explain(22, "x").reason == "KernelTooOld"
    assert explain(12, "x").reason == "OutOfMemory"
