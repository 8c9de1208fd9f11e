"""NUMA: memory policy of threads, and the zones of nodes."""

from __future__ import annotations

import ctypes
import os
import platform
import re
from collections.abc import Collection
from dataclasses import dataclass

from hostprep.errors import FailedError

# linux/mempolicy.h, and the syscall tables of the two architectures that engines run on.
_MPOL_BIND = 2
_MPOL_INTERLEAVE = 3
_SYSCALL = {"x86_64": 238, "aarch64": 237}

_libc = ctypes.CDLL(None, use_errno=True)

MOVABLE = "Movable"
"""The zone that long-term pins must first migrate out of (mm/gup.c)."""
_HEAD = re.compile(r"(\d{1,5}), zone +(\w{1,32})", re.ASCII)
_COUNT = re.compile(
    r"^ +(?:pages )?(free|low|present|managed|nr_free_cma) +(\d{1,18}) *$",
    re.ASCII | re.MULTILINE,
)


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
    # The kernel uses one bit less than the given number (mm/mempolicy.c, get_nodes).
    if _libc.syscall(number, policy, ctypes.byref(words), ctypes.c_ulong(bits + 1)) != 0:
        code = ctypes.get_errno()
        raise FailedError(
            f"cannot bind memory to NUMA nodes {sorted(nodes)}: {os.strerror(code)}",
            reason="NumaBindingFailed",
            remedy="in a container, allow set_mempolicy (CAP_SYS_NICE or a seccomp profile)",
        )


@dataclass(frozen=True)
class ZoneCounts:
    """The counts of one zone in /proc/zoneinfo, in base pages."""

    free: int = 0
    low: int = 0
    present: int = 0
    managed: int = 0
    nr_free_cma: int = 0


def parse_zoneinfo(text: str) -> dict[tuple[int, str], ZoneCounts]:
    """Return the counts of every zone, by NUMA node and name. Other lines are skipped.

    What follows `pagesets` is skipped: six lines for each CPU, a megabyte on big machines.
    """
    zones = {}
    for section in f"\n{text}".split("\nNode "):
        head, _, body = section.partition("\n  pagesets\n")[0].partition("\n")
        match = _HEAD.match(head)
        if match is not None:
            counts = {found[1]: int(found[2]) for found in _COUNT.finditer(body)}
            zones[int(match[1]), match[2]] = ZoneCounts(**counts)
    return zones
