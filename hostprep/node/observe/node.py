"""All probes together, with those of the kernel and of this process: the facts of this node."""

from __future__ import annotations

import os
import re
import struct
from collections.abc import Callable
from typing import TypeVar

from hostprep.linux.processes import HOST_PID_NAMESPACE
from hostprep.linux.procfs import parse_cpu_list, parse_huge_folder, parse_int, parse_keyed
from hostprep.node.facts import (
    CgroupFacts,
    Facts,
    KernelFacts,
    MemoryFacts,
    Mount,
    PoolFacts,
    ProcessFacts,
    RootFacts,
    ThpFacts,
)
from hostprep.node.observe.cgroups import observe_cgroup
from hostprep.node.observe.gpus import observe_gpus
from hostprep.node.observe.host import HostRoot, Warn, below, read_mounts
from hostprep.node.observe.memory import (
    observe_huge_page_totals,
    observe_memory,
    observe_nodes,
    observe_thp,
)
from hostprep.node.observe.root import observe_root

_VERSION = re.compile(r"(\d{1,4})\.(\d{1,4})(?!\d)", re.ASCII)
_AT_PAGESZ = 6  # include/uapi/linux/auxvec.h
_AUXV_ENTRY = struct.Struct("=QQ")
_CAP_SYS_ADMIN = 1 << 21  # include/uapi/linux/capability.h
_MEMLOCK = re.compile(r"^Max locked memory +(unlimited|\d{1,20}) ", re.ASCII | re.MULTILINE)
T = TypeVar("T")


class Probes:
    """Runs probes one by one; what fails becomes a warning and leaves its fallback."""

    def __init__(self) -> None:
        self._warnings: dict[str, None] = {}

    @property
    def warnings(self) -> tuple[str, ...]:
        """The warnings so far, each once, in order."""
        return tuple(self._warnings)

    def warn(self, message: str) -> None:
        """Note what could not be seen."""
        self._warnings[message] = None

    def run(self, name: str, probe: Callable[[], T], fallback: T) -> T:
        """Return the probe's answer, or the fallback if it raises OSError or ValueError."""
        try:
            return probe()
        except (OSError, ValueError) as error:
            self.warn(f"{name}: {error}")
            return fallback


def observe(*, host: HostRoot, root: str, pools: tuple[PoolFacts, ...] = ()) -> Facts:
    """Return the facts of the node below `host`; `root` is the pools' folder, `pools` its content.

    Never raises for what the host shows: what cannot be seen is in the facts' warnings.
    """
    probes = Probes()
    run, warn = probes.run, probes.warn
    page_bytes = run("page size", lambda: observe_page_bytes(host), os.sysconf("SC_PAGESIZE"))
    no_mounts: tuple[Mount, ...] = ()
    mounts = run("mounts", lambda: read_mounts(host, warn), no_mounts)
    process = run("process", lambda: observe_process(host, warn), _NO_PROCESS)
    kernel = run("kernel", lambda: observe_kernel(host, warn), _NO_KERNEL)
    return Facts(
        kernel=kernel,
        memory=run(
            "memory",
            lambda: observe_memory(host, page_bytes, warn),
            MemoryFacts(0, 0, 0, 0, page_bytes),
        ),
        nodes=run("NUMA nodes", lambda: observe_nodes(host, page_bytes, warn), ()),
        huge_pages=run("huge pages", lambda: observe_huge_page_totals(host, warn), ()),
        thp=run("THP", lambda: observe_thp(host), _NO_THP),
        gpus=run("GPUs", lambda: observe_gpus(host), ()),
        cgroup=run("cgroup", lambda: observe_cgroup(host, mounts, process.euid, warn), _NO_CGROUP),
        process=process,
        root=run(
            "root folder",
            lambda: observe_root(root, warn),
            RootFacts(root, exists=False, fs_type="unknown", writable=False, free_bytes=0),
        ),
        pools=pools,
        mounts=tuple(mount for mount in mounts if below(mount.path, root)),
        warnings=probes.warnings,
    )


_NO_KERNEL = KernelFacts("", (0, 0), os.uname().machine, "", ())
_NO_THP = ThpFacts("unknown", "unknown")
_NO_CGROUP = CgroupFacts(version=0, path="", memory_limit_bytes=None)
_NO_PROCESS = ProcessFacts(
    os.geteuid(), can_mount=False, sees_all_processes=False, memlock_limit_bytes=0, cpus=()
)


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
        sees_all_processes=host.link("/proc/self/ns/pid") == f"pid:[{HOST_PID_NAMESPACE}]",
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
