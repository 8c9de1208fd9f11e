"""What this process may do, from /proc/self."""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING

from hostprep.linux.procfs import parse_cpu_list, parse_int, parse_keyed
from hostprep.node.facts import ProcessFacts

if TYPE_CHECKING:
    from hostprep.node.observe.host import HostRoot, Warn

__all__ = ["observe_process", "parse_memlock"]

_CAP_SYS_ADMIN = 1 << 21  # include/uapi/linux/capability.h
_HOST_PID_NAMESPACE = "pid:[4026531836]"  # PROC_PID_INIT_INO, include/linux/proc_ns.h
_MEMLOCK = re.compile(r"^Max locked memory +(unlimited|\d{1,20}) ", re.ASCII | re.MULTILINE)


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
