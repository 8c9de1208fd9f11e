"""Binding a thread's memory to NUMA nodes: set_mempolicy(2), which glibc does not wrap."""

from __future__ import annotations

import ctypes
import os
import platform
from collections.abc import Collection

from hostprep.errors import FailedError

__all__ = ["bind_memory", "interleave_memory"]

# linux/mempolicy.h, and the syscall tables of the two architectures that engines run on.
_MPOL_BIND = 2
_MPOL_INTERLEAVE = 3
_SYSCALL = {"x86_64": 238, "aarch64": 237}

_libc = ctypes.CDLL(None, use_errno=True)


def bind_memory(nodes: Collection[int]) -> None:
    """Let the calling thread's later page faults take memory of these nodes only."""
    _set_policy(_MPOL_BIND, nodes)


def interleave_memory(nodes: Collection[int]) -> None:
    """Let the calling thread's later page faults take memory of these nodes in turn."""
    _set_policy(_MPOL_INTERLEAVE, nodes)


def _set_policy(policy: int, nodes: Collection[int]) -> None:
    """Set the thread's policy: shmem and hugetlbfs take the faulting thread's. Raises FailedError.

    A shared policy by mbind would stay with a tmpfs file, but hugetlbfs has none that works
    (admin-guide/mm/numa_memory_policy.rst); the thread's serves both, since all pages are
    faulted here and none is ever faulted again.
    """
    number = _SYSCALL.get(platform.machine())
    if number is None:
        raise FailedError(f"NUMA binding is not known on {platform.machine()}")
    bits = max(nodes) + 1
    words = (ctypes.c_ulong * (bits // 64 + 1))()
    for node in nodes:
        words[node // 64] |= 1 << (node % 64)
    # The kernel takes one bit less than it is told (mm/mempolicy.c, get_nodes).
    if _libc.syscall(number, policy, ctypes.byref(words), ctypes.c_ulong(bits + 1)) != 0:
        code = ctypes.get_errno()
        raise FailedError(
            f"cannot bind memory to NUMA nodes {sorted(nodes)}: {os.strerror(code)}",
            reason="NumaBindingFailed",
            remedy="in a container, allow set_mempolicy (CAP_SYS_NICE or a seccomp profile)",
        )
