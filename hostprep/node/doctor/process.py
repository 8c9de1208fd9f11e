"""This process and its place: rights, limits, cgroup, the root folder, probes that failed."""

from __future__ import annotations

from collections.abc import Iterator

from hostprep.node.doctor.finding import NOTHING_TO_DO, Finding, Severity, all_well
from hostprep.node.facts import Facts
from hostprep.units import format_bytes

__all__ = ["check_cgroup", "check_memlock", "check_privileges", "check_probes", "check_root"]

_MEMORY_FS = ("tmpfs", "ramfs")


def check_memlock(facts: Facts) -> Iterator[Finding]:
    """Engines inherit RLIMIT_MEMLOCK; mlock and RDMA registration count against it."""
    limit = facts.process.memlock_limit_bytes
    if limit is None:
        yield all_well("memlock", "locked memory is not limited")
        return
    what = (
        f"locked memory is limited to {format_bytes(limit)}: engines started from here cannot "
        "mlock, or register with CUDA or RDMA where that is counted, more than that"
    )
    remedy = "ulimit -l unlimited; LimitMEMLOCK=infinity in the unit of containerd or the engine"
    yield Finding(Severity.WARNING if facts.gpus else Severity.INFO, "memlock", what, remedy)


def check_cgroup(facts: Facts) -> Iterator[Finding]:
    """Whoever touches memory first is charged, and limited: a host-level cgroup, or the caller."""
    cgroup, name = facts.cgroup, "cgroup"
    if cgroup.version == 0:
        remedy = "mount cgroup2 at /sys/fs/cgroup"
        yield Finding(Severity.WARNING, name, "the memory cgroup cannot be found", remedy)
        return
    if cgroup.version == 1:
        what = "cgroup v1: works for the command line, is refused in a cluster"
        remedy = "boot with systemd.unified_cgroup_hierarchy=1"
        yield Finding(Severity.WARNING, name, what, remedy)
    yield from _limits(facts)
    if (cgroup.in_kubepods or cgroup.is_shut_in) and not cgroup.writable:
        who = "a pod" if cgroup.in_kubepods else "a container with a cgroup namespace of its own,"
        what = f"this is {who} that cannot leave its cgroup: what it populates is charged to it"
        remedy = (
            "hostPID: true and securityContext.privileged: true, with /sys/fs/cgroup of the host "
            "mounted"
        )
        yield Finding(Severity.WARNING, name, what, remedy)
    elif cgroup.version == 2:
        way = (
            "a host-level cgroup can be made" if cgroup.writable else "nothing limits this process"
        )
        if cgroup.writable or not (cgroup.memory_limit_bytes or cgroup.hugetlb_limit_bytes):
            yield all_well(name, f"cgroup v2; {way}")


def _limits(facts: Facts) -> Iterator[Finding]:
    cgroup, leaves = facts.cgroup, facts.cgroup.writable
    here = "a host-level cgroup is used instead" if leaves else "populating here ends there"
    for page_bytes, limit in cgroup.hugetlb_limit_bytes:
        what = f"this cgroup may use {format_bytes(limit)} of pages of {format_bytes(page_bytes)}"
        if leaves:
            remedy = "nothing to do: the populating worker leaves this cgroup"
        else:
            remedy = (
                "run it as root outside the container, or privileged with the host's "
                "/sys/fs/cgroup; kubelet sets 0 where it started before the pages were there"
            )
        severity = Severity.INFO if leaves else Severity.ERROR if limit == 0 else Severity.WARNING
        yield Finding(severity, "cgroup", f"{what}: {here}", remedy)
    if cgroup.memory_limit_bytes is not None and cgroup.memory_limit_bytes < (
        facts.memory.total_bytes
    ):
        what = f"this cgroup is limited to {format_bytes(cgroup.memory_limit_bytes)} of memory"
        remedy = NOTHING_TO_DO if leaves else "run it as root outside the container or session"
        severity = Severity.INFO if leaves else Severity.WARNING
        yield Finding(severity, "cgroup", f"{what}: {here}", remedy)


def check_privileges(facts: Facts) -> Iterator[Finding]:
    """Tell what this process may not do, and what root would add."""
    process, name = facts.process, "privileges"
    if process.euid != 0:
        what = (
            "not root: only Base on a tmpfs of one's own can be had; root adds huge pages, own "
            "mounts with noswap, a cgroup outside this session, and scrubbing"
        )
        yield Finding(Severity.WARNING, name, what, "sudo hostprep doctor")
    elif not process.can_mount:
        what = "root without CAP_SYS_ADMIN: no mounts of our own, so neither huge pages nor noswap"
        remedy = "add the capability SYS_ADMIN, or securityContext.privileged: true"
        yield Finding(Severity.WARNING, name, what, remedy)
    elif not process.sees_all_processes:
        what = "not in the host's PID namespace: regions cannot be scrubbed from here"
        yield Finding(Severity.WARNING, name, what, "hostPID: true, or docker run --pid=host")
    else:
        yield all_well(name, "root, may mount, sees all processes")


def check_root(facts: Facts) -> Iterator[Finding]:
    """Check that the folder of all pools is a real one, writable, gone after a reboot."""
    root, name = facts.root, "root-folder"
    if root.is_symlink:
        what = f"{root.path} is a symbolic link: refused, for it could be turned elsewhere"
        yield Finding(Severity.ERROR, name, what, f"rm {root.path}, or name its target as --root")
    elif not root.writable:
        where = root.path if root.exists else f"{root.nearest_path or '/'} ({root.path} is missing)"
        what = f"cannot write {where}"
        remedy = "run it as root, or give --root a folder of your own below /dev/shm"
        yield Finding(Severity.ERROR, name, what, remedy)
    elif root.fs_type not in _MEMORY_FS:
        what = f"{root.path} is on {root.fs_type}: it outlives a reboot, the memory does not"
        remedy = f"mount -t tmpfs -o mode=755 hostprep {root.path} at every boot, or another --root"
        yield Finding(Severity.WARNING, name, what, remedy)
    else:
        yield all_well(name, f"{root.path} is on {root.fs_type} and can be written")


def check_probes(facts: Facts) -> Iterator[Finding]:
    """Tell what could not be seen: the rest rests on less than it should."""
    for warning in facts.warnings:
        remedy = "run it as root on the host, with /proc and /sys of the host mounted"
        yield Finding(Severity.WARNING, "probes", warning, remedy)
    if not facts.warnings:
        yield all_well("probes", "every probe answered")
