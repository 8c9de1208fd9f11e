"""The kernel, this process, the root folder and the pools below it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from hostprep.api.pool_spec import PoolSpec
from hostprep.backing import GIB
from hostprep.node.doctor.finding import NOTHING_TO_DO, Finding, Severity, all_well
from hostprep.node.facts import Facts, PoolFacts
from hostprep.node.plan import plan
from hostprep.node.plan.actions import PoolPlan
from hostprep.node.plan.estimate import held_page_table_bytes
from hostprep.units import format_bytes

_LONG_TERM_PIN_BUG = ((6, 11), (6, 14))
"""From, and below. Fixed by aa6f8b2593b5 and 94efde1d1539 in mm/gup.c."""
_MEMORY_FS = ("tmpfs", "ramfs")
_COSTLY_PAGE_TABLES_BYTES = GIB


def check_kernel(facts: Facts) -> Iterator[Finding]:
    """Linux 5.14 populates, 6.4 keeps tmpfs out of swap, 6.9 maps ids on hugetlbfs."""
    kernel, name = facts.kernel, "kernel"
    if kernel.version == (0, 0):
        yield Finding(
            Severity.WARNING,
            name,
            "the kernel's version is unknown",
            "see: uname -r; it needs 5.14",
        )
        return
    if not kernel.has_populate_write:
        what = f"Linux {kernel.release} has no MADV_POPULATE_WRITE: nothing can be populated"
        yield Finding(Severity.ERROR, name, what, "use Linux 5.14 or newer")
    if _LONG_TERM_PIN_BUG[0] <= kernel.version < _LONG_TERM_PIN_BUG[1]:
        what = (
            f"Linux {kernel.release}: 6.11 to 6.13 may refuse long-term pins of more than 2 GiB "
            "at a time, as registering with CUDA makes them"
        )
        remedy = "use Linux 6.14, or a distribution's kernel with commit aa6f8b2593b5; else let"
        yield Finding(Severity.WARNING, name, what, f"{remedy} engines register 1 GiB at a time")
    if kernel.has_populate_write and not kernel.has_idmapped_hugetlbfs:
        what = f"Linux {kernel.release}: pods with hostUsers: false cannot mount hugetlbfs (6.9)"
        yield Finding(Severity.INFO, name, what, "leave hostUsers unset for engines, or use 6.9")
    if kernel.has_idmapped_hugetlbfs:
        yield all_well(name, f"Linux {kernel.release} can do all that is needed")


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
    """Report what this process may not do, and what root would add."""
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
    """Report what could not be seen: the rest rests on less than it should."""
    for warning in facts.warnings:
        remedy = "run it as root on the host, with /proc and /sys of the host mounted"
        yield Finding(Severity.WARNING, "probes", warning, remedy)
    if not facts.warnings:
        yield all_well("probes", "every probe answered")


def check_pools(facts: Facts) -> Iterator[Finding]:
    """Compare what lies below the root folder with what the handoffs promise."""
    problems = [finding for pool in facts.pools for finding in _of_pool(facts, pool)]
    yield from problems
    if not problems:
        yield all_well("pools", f"pools held: {len(facts.pools)}, none of another boot")


def _of_pool(facts: Facts, pool: PoolFacts) -> Iterator[Finding]:
    again = f"hostprep prepare --name {pool.name}"
    if pool.boot_id not in (None, facts.kernel.boot_id):
        what = f"the handoff of {pool.name} is of another boot: its memory is gone"
        yield Finding(Severity.WARNING, "pools", what, f"{again} ... withdraws and renews it")
        return
    for region in pool.regions:
        if region.finished and region.damage is not None:
            what = f"{pool.name}/{region.name} is damaged: it {region.damage}"
            yield Finding(Severity.ERROR, "pools", what, f"{again} ... rebuilds it once released")
    if pool.regions and not pool.published:
        what = f"{pool.name} holds memory, and no valid handoff says so"
        yield Finding(Severity.WARNING, "pools", what, f"{again} ... completes it")


def check_page_tables(facts: Facts) -> Iterator[Finding]:
    """Report what each process pays that maps a pool of base pages: 8 bytes a page."""
    for pool in facts.pools:
        size = held_page_table_bytes(pool.regions, facts.memory.page_bytes)
        if size:
            yield _page_tables(facts, pool.name, size)


def _page_tables(facts: Facts, name: str, per_process_bytes: int) -> Finding:
    ranks = max(1, len(facts.gpus))
    what = (
        f"{name} is in base pages: each engine process pays {format_bytes(per_process_bytes)} "
        f"of page tables out of its own limit ({format_bytes(per_process_bytes * ranks)} with "
        f"{ranks} ranks)"
    )
    costly = per_process_bytes * ranks >= _COSTLY_PAGE_TABLES_BYTES
    remedy = "ask for HugeTLB2Mi first, or raise the engines' memory limits by that much"
    return Finding(Severity.WARNING if costly else Severity.INFO, "page-tables", what, remedy)


def check_plan(facts: Facts, specs: Sequence[PoolSpec]) -> Iterator[Finding]:
    """Whether the pools could be had here and now. Raises BadInputError for two of one name."""
    for pool in plan(specs, facts).pools:
        yield from _of_plan(facts, pool)


def _of_plan(facts: Facts, pool: PoolPlan) -> Iterator[Finding]:
    name = pool.name
    if pool.unmet is not None:
        what = f"{name} cannot be had: {pool.unmet.why}"
        yield Finding(Severity.ERROR, "plan", what, pool.unmet.remedy)
    for passed in pool.passed_over:
        what = f"{name}: {passed.backing} is passed over: {passed.why}"
        yield Finding(Severity.WARNING, "plan", what, passed.remedy)
    for note in pool.notes:
        yield Finding(Severity.INFO, "plan", f"{name}: {note}", NOTHING_TO_DO)
    if pool.blocked:
        what = f"{name}: {', '.join(pool.blocked)} should change and is leased"
        yield Finding(Severity.WARNING, "plan", what, "end its users: hostprep status")
    if pool.page_table_bytes_per_process:
        yield _page_tables(facts, name, pool.page_table_bytes_per_process)
    if pool.unmet is None and pool.backings:
        size = format_bytes(pool.planned_bytes)
        yield all_well("plan", f"{name}: {size} can be had in {pool.backing_words}")
