"""The running kernel: version, boot, and the page sizes it offers."""

from __future__ import annotations

import os
import re
import struct
from typing import TYPE_CHECKING

from hostprep.linux.procfs import parse_float, parse_huge_folder
from hostprep.node.facts import KernelFacts

if TYPE_CHECKING:
    from hostprep.node.observe.host import HostRoot, Warn

__all__ = ["observe_kernel", "observe_page_bytes", "parse_auxv_page_bytes", "parse_version"]

_VERSION = re.compile(r"(\d{1,4})\.(\d{1,4})(?!\d)", re.ASCII)
_AT_PAGESZ = 6  # include/uapi/linux/auxvec.h
_AUXV_ENTRY = struct.Struct("=QQ")


def observe_kernel(host: HostRoot, warn: Warn) -> KernelFacts:
    """Return what the kernel is; version (0, 0), which can do nothing, where it does not say."""
    release = (host.read_text("/proc/sys/kernel/osrelease") or "").strip()
    version = parse_version(release)
    if version is None:
        warn("the kernel's version is unknown: /proc/sys/kernel/osrelease cannot be read")
    boot_id = (host.read_text("/proc/sys/kernel/random/boot_id") or "").strip()
    if not boot_id:
        warn("the boot is unknown: /proc/sys/kernel/random/boot_id cannot be read")
    uptime = (host.read_text("/proc/uptime") or "").partition(" ")[0].strip()
    folders = host.list_dir("/sys/kernel/mm/hugepages")
    return KernelFacts(
        release=release,
        version=version or (0, 0),
        # The sysctl is there since 6.1. A container shares the host's kernel, so uname is right.
        arch=(host.read_text("/proc/sys/kernel/arch") or os.uname().machine).strip(),
        boot_id=boot_id,
        uptime_s=parse_float(uptime) or 0.0,
        hugepage_sizes=tuple(sorted(size for size in map(parse_huge_folder, folders) if size)),
    )


def parse_version(release: str) -> tuple[int, int] | None:
    """Return major and minor of a release such as `6.18.44-generic`."""
    match = _VERSION.match(release)
    return (int(match[1]), int(match[2])) if match else None


def observe_page_bytes(host: HostRoot) -> int:
    """Return the size in bytes of the kernel's base pages."""
    return parse_auxv_page_bytes(host.read_bytes("/proc/self/auxv") or b"") or os.sysconf(
        "SC_PAGESIZE"
    )


def parse_auxv_page_bytes(auxv: bytes) -> int | None:
    """Return AT_PAGESZ of a 64-bit auxiliary vector, a power of two from 4 KiB to 1 MiB."""
    usable = len(auxv) - len(auxv) % _AUXV_ENTRY.size
    for key, value in _AUXV_ENTRY.iter_unpack(auxv[:usable]):
        if key == _AT_PAGESZ and value in {4096 << shift for shift in range(9)}:
            return int(value)
    return None
