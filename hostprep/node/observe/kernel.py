"""The running kernel, and what this process may do on it."""

from __future__ import annotations

import os
import re
import struct

from hostprep.linux.procfs import (
    parse_cpu_list,
    parse_huge_folder,
    parse_int,
    parse_keyed,
)
from hostprep.node.facts import KernelFacts, ProcessFacts
from hostprep.node.observe.host import HostRoot, Warn

_VERSION = re.compile(r"(\d{1,4})\.(\d{1,4})(?!\d)", re.ASCII)
_AT_PAGESZ = 6  # include/uapi/linux/auxvec.h
_AUXV_ENTRY = struct.Struct("=QQ")
_CAP_SYS_ADMIN = 1 << 21  # include/uapi/linux/capability.h
_HOST_PID_NAMESPACE = "pid:[4026531836]"  # PROC_PID_INIT_INO, include/linux/proc_ns.h
_MEMLOCK = re.compile(r"^Max locked memory +(unlimited|\d{1,20}) ", re.ASCII | re.MULTILINE)


def observe_kernel(host: HostRoot, warn: Warn) -> KernelFacts:
    """Return what the kernel is; version (0, 0), which can do nothing, where it does not say."""
    release = (host.read_text("/proc/sys/kernel/osrelease") or "").strip()
    version = parse_version(release)
    if version is None:
        warn("the kernel's version is unknown: /proc/sys/kernel/osrelease cannot be read")
    boot_id = (host.read_text("/proc/sys/kernel/random/boot_id") or "").strip()
    if not boot_id:
        warn("the boot is unknown: /proc/sys/kernel/random/boot_id cannot be read")
    folders = host.list_dir("/sys/kernel/mm/hugepages")
    return KernelFacts(
        release=release,
        version=version or (0, 0),
        # The sysctl is there since 6.1. A container shares the host's kernel, so uname is right.
        arch=(host.read_text("/proc/sys/kernel/arch") or os.uname().machine).strip(),
        boot_id=boot_id,
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


def observe_process(host: HostRoot, warn: Warn) -> ProcessFacts:
    """Return the process's rights; the fewest where the kernel does not say."""
    status = parse_keyed(host.read_text("/proc/self/status") or "")
    limits = host.read_text("/proc/self/limits") or ""
    if "CapEff" not in status:
        warn("/proc/self/status cannot be read: taken as a process without privileges")
    known, memlock_bytes = parse_memlock(limits)
    if not known:
        warn("/proc/self/limits cannot be read: the limit of locked memory is taken as 0")
    capabilities = parse_int("0x" + status.get("CapEff", "")) or 0
    return ProcessFacts(
        euid=_effective_uid(status.get("Uid", "")),
        can_mount=bool(capabilities & _CAP_SYS_ADMIN),
        sees_all_processes=host.link("/proc/self/ns/pid") == _HOST_PID_NAMESPACE,
        memlock_limit_bytes=memlock_bytes,
        cpus=parse_cpu_list(status.get("Cpus_allowed_list", "")) or (),
    )


def parse_memlock(limits: str) -> tuple[bool, int | None]:
    """Return whether RLIMIT_MEMLOCK is there, and its soft value in bytes (None: unlimited)."""
    match = _MEMLOCK.search(limits)
    if match is None:
        return False, 0
    return True, parse_int(match[1])


def _effective_uid(field: str) -> int:
    ids = field.split()
    euid = parse_int(ids[1]) if len(ids) > 1 else None
    return os.geteuid() if euid is None else euid
