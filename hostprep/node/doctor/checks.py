"""What the doctor checks: the kernel, this process, the pools, memory and the node's settings."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

from hostprep.api.pool_spec import MOUNT_SOURCE, PoolSpec
from hostprep.backing import GIB, KIB, MIB
from hostprep.known_issues import LONG_TERM_PIN_BUG, known_issues_of
from hostprep.node.doctor.finding import NOTHING_TO_DO, Finding, Severity, all_well, worst_first
from hostprep.node.doctor.gpus import check_gpus
from hostprep.node.facts import Facts, HugePageTotals, NumaNode, PoolFacts
from hostprep.node.plan import plan
from hostprep.node.plan.actions import PoolPlan
from hostprep.node.plan.estimate import page_table_bytes
from hostprep.paths import TURNSTILE
from hostprep.units import format_bytes

_FRAGMENTED_SHARE = 0.5
"""Below it the planner passes huge pages over; above, one compaction is worth trying."""
_UNEVEN = 0.9
_CMA_WORTH_SAYING_BYTES = 256 * MIB
_THP_FOLDER = "/sys/kernel/mm/transparent_hugepage"
_MEMORY_FS = ("tmpfs", "ramfs")
_ROOT_FREE_BYTES = 64 * KIB
"""A claim or a handoff takes some pages."""
_COSTLY_PAGE_TABLES_BYTES = GIB


def diagnose(facts: Facts, specs: Sequence[PoolSpec] = ()) -> tuple[Finding, ...]:
    """Return what every check finds, and whether the pools could be had, worst first.

    Pure: opens no file. Raises BadInputError when two specs have one name.
    """
    findings = [
        finding
        for pool in (plan(specs, facts).pools if specs else ())
        for finding in _of_plan(facts, pool)
    ]
    for check in CHECKS:
        findings += check(facts)
    return worst_first(findings)


def _check_kernel(facts: Facts) -> Iterator[Finding]:
    """Linux 5.14 populates, 6.4 keeps tmpfs out of swap, 6.9 maps ids on hugetlbfs."""
    kernel, name = facts.kernel, "kernel"
    if kernel.version == (0, 0):
        what = "the kernel's version is unknown"
        yield Finding(Severity.WARNING, name, what, "see: uname -r; it needs 5.14")
        return
    if not kernel.has_populate_write:
        what = f"Linux {kernel.release} has no MADV_POPULATE_WRITE: nothing can be populated"
        yield Finding(Severity.ERROR, name, what, "use Linux 5.14 or newer")
    if LONG_TERM_PIN_BUG[0] <= kernel.version < LONG_TERM_PIN_BUG[1]:
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


def _check_memlock(facts: Facts) -> Iterator[Finding]:
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


def _check_cgroup(facts: Facts) -> Iterator[Finding]:
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
    elif cgroup.version == 2 and cgroup.writable:
        yield all_well(name, "cgroup v2; a host-level cgroup can be made")
    elif cgroup.version == 2 and not (cgroup.memory_limit_bytes or cgroup.hugetlb_limit_bytes):
        yield all_well(name, "cgroup v2; nothing limits this process")


def _limits(facts: Facts) -> Iterator[Finding]:
    cgroup, leaves = facts.cgroup, facts.cgroup.writable
    here = "a host-level cgroup is used instead" if leaves else "populating here ends there"
    for page_bytes, limit in cgroup.hugetlb_limit_bytes:
        what = f"this cgroup may use {format_bytes(limit)} of pages of {format_bytes(page_bytes)}"
        remedy = (
            "nothing to do: the populating worker leaves this cgroup"
            if leaves
            else "run it as root outside the container, or privileged with the host's "
            "/sys/fs/cgroup; kubelet sets 0 where it started before the pages were there"
        )
        severity = Severity.INFO if leaves else Severity.ERROR if limit == 0 else Severity.WARNING
        yield Finding(severity, "cgroup", f"{what}: {here}", remedy)
    limit_bytes = cgroup.memory_limit_bytes
    if limit_bytes is not None and limit_bytes < facts.memory.total_bytes:
        what = f"this cgroup is limited to {format_bytes(limit_bytes)} of memory"
        remedy = NOTHING_TO_DO if leaves else "run it as root outside the container or session"
        severity = Severity.INFO if leaves else Severity.WARNING
        yield Finding(severity, "cgroup", f"{what}: {here}", remedy)


def _check_privileges(facts: Facts) -> Iterator[Finding]:
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


def _check_root(facts: Facts) -> Iterator[Finding]:
    """Check that the folder of all pools is one that prepare accepts, gone after a reboot."""
    root, name = facts.root, "root-folder"
    if root.refused:
        yield Finding(Severity.ERROR, name, root.refused, root.remedy or NOTHING_TO_DO)
    elif not root.writable:
        where = root.path if root.exists else f"{root.nearest_path or '/'} ({root.path} is missing)"
        what = f"cannot write {where}"
        remedy = "run it as root, or give --root a folder of your own below /dev/shm"
        yield Finding(Severity.ERROR, name, what, remedy)
    elif not root.exists and facts.process.euid == 0 and facts.process.can_mount:
        yield all_well(name, f"{root.path} will be made, on a small tmpfs of its own")
    elif root.exists and root.free_bytes < _ROOT_FREE_BYTES:
        what = f"{root.path} is full: nothing is claimed or published in any pool"
        remedy = f"see who fills it (du -s {root.path}/*/*), clear that, or release that pool"
        yield Finding(Severity.ERROR, name, what, remedy)
    elif root.fs_type not in _MEMORY_FS:
        what = f"{root.path} is on {root.fs_type}: it outlives a reboot, the memory does not"
        remedy = f"mount -t tmpfs -o mode=755 hostprep {root.path} at every boot, or another --root"
        yield Finding(Severity.WARNING, name, what, remedy)
    else:
        yield all_well(name, f"{root.path} is on {root.fs_type} and can be written")


def _check_selinux(facts: Facts) -> Iterator[Finding]:
    """Report labels with which a confined container may not read what lies below the root."""
    root, name = facts.root, "selinux"
    if root.unshared and root.is_enforcing is not False:
        what = f"SELinux keeps engines in containers from {root.unshared}"
        remedy = (
            f"chcon -R -t container_file_t -l s0 {root.path}; agents do it at every round, and"
            " prepare does, where the policy lets them relabel (docs/selinux.md)"
        )
        severity = Severity.ERROR if root.is_enforcing else Severity.WARNING
        yield Finding(severity, name, what, remedy)
    elif root.unshared:
        what = f"were SELinux enforcing, it would keep engines in containers from {root.unshared}"
        yield Finding(Severity.INFO, name, what, f"chcon -R -t container_file_t -l s0 {root.path}")
    else:
        yield all_well(name, "no label keeps containers from the root folder")


def _check_probes(facts: Facts) -> Iterator[Finding]:
    """Report what could not be seen: the rest rests on less than it should."""
    for warning in facts.warnings:
        remedy = "run it as root on the host, with /proc and /sys of the host mounted"
        yield Finding(Severity.WARNING, "probes", warning, remedy)
    if not facts.warnings:
        yield all_well("probes", "every probe answered")


def _check_pools(facts: Facts) -> Iterator[Finding]:
    """Compare what lies below the root folder with what the handoffs promise."""
    problems = [finding for pool in facts.pools for finding in _of_pool(facts, pool)]
    problems += _orphaned_mounts(facts)
    yield from problems
    if not problems:
        yield all_well("pools", f"pools held: {len(facts.pools)}, none of another boot")


def _orphaned_mounts(facts: Facts) -> Iterator[Finding]:
    """Report mounts below the root that no pool knows: somebody removed the files around them."""
    known = {pool.name for pool in facts.pools}
    for mount in facts.mounts:
        pool, _, folder = mount.path.removeprefix(f"{facts.root.path}/").partition("/")
        # The turnstile serves all pools, and goes with the last one.
        is_turnstile = (pool, folder) == (TURNSTILE, "") and not known
        is_pools = folder.startswith("mem") and pool not in known
        is_below = mount.path.startswith(f"{facts.root.path}/")
        if is_below and (is_turnstile or is_pools) and mount.fs_type in ("hugetlbfs", "tmpfs"):
            whose = f"pool {pool}" if is_pools else "pool"
            what = f"{mount.path} is mounted ({mount.fs_type}), and there is no {whose}"
            yield Finding(Severity.WARNING, "pools", what, f"umount {mount.path}")
        elif mount.path == facts.root.path and mount.source == MOUNT_SOURCE and not known:
            what = f"{mount.path} is mounted ({mount.fs_type}), and there is no pool"
            remedy = f"keep it for an agent, or: umount {mount.path}"
            yield Finding(Severity.INFO, "pools", what, remedy)


def _of_pool(facts: Facts, pool: PoolFacts) -> Iterator[Finding]:
    if pool.failure:
        what = f"{pool.name} cannot be looked at: {pool.failure}"
        yield Finding(Severity.ERROR, "pools", what, "see who writes below its folder")
        return
    again = f"hostprep prepare {pool.name}"
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


def _check_page_tables(facts: Facts) -> Iterator[Finding]:
    """Report what each process pays that maps a pool of base pages: 8 bytes a page."""
    page = facts.memory.page_bytes
    for pool in facts.pools:
        size = sum(page_table_bytes(r.size_bytes, r.backing, page) for r in pool.regions)
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


def _fragmented_nodes(facts: Facts) -> tuple[NumaNode, ...]:
    """Return nodes with CPUs where less than half of what is free is in blocks of 2 MiB."""
    return tuple(
        node
        for node in facts.nodes
        if node.cpus and _grantable(facts, node) < node.free_fixed_bytes * _FRAGMENTED_SHARE
    )


def _check_bad_memory(facts: Facts) -> Iterator[Finding]:
    """Report hardware errors: such a page kills the process that touches it, and its region."""
    name, bad = "bad-memory", facts.memory.corrupted_bytes
    if bad:
        what = f"the kernel took {format_bytes(bad)} with hardware errors out of use since the boot"
        remedy = "hostprep verify --pages (agents do it by themselves); dmesg names the module"
        yield Finding(Severity.WARNING, name, what, remedy)
    else:
        yield all_well(name, "no page was reported bad since the boot")


def _check_fragmentation(facts: Facts) -> Iterator[Finding]:
    """How much could be had as pages of 2 MiB at once, without moving anything."""
    name, crumbled = "fragmentation", _fragmented_nodes(facts)
    for node in crumbled:
        free, grantable = node.free_fixed_bytes, _grantable(facts, node)
        what = (
            f"node {node.node_id} is fragmented: {format_bytes(grantable)} of the "
            f"{format_bytes(free)} free ({grantable * 100 // free} %) in blocks of 2 MiB or more"
        )
        remedy = (
            "prepare at boot (hostprep boot --script); now: "
            f"echo 1 > /sys/devices/system/node/node{node.node_id}/compact"
        )
        yield Finding(Severity.WARNING, name, what, remedy)
    nodes = [node for node in facts.nodes if node.cpus]
    total = sum(_grantable(facts, node) for node in nodes)
    each = ", ".join(f"node {n.node_id}: {format_bytes(_grantable(facts, n))}" for n in nodes)
    what = f"{format_bytes(total)} could be had in pages of 2 MiB now ({each})"
    if crumbled:
        yield Finding(Severity.INFO, name, what, "ask for less than that, or allow Base as well")
    else:
        yield all_well(name, what)


def _grantable(facts: Facts, node: NumaNode) -> int:
    return node.contiguous_fixed_bytes(facts.memory.page_bytes)


def _check_huge_pages(facts: Facts) -> Iterator[Finding]:
    """Report huge pages that others use, or that cannot be counted on."""
    name = "huge-pages"
    findings = [
        Finding(severity, name, f"pages of {format_bytes(pool.page_bytes)}: {what}", remedy)
        for pool in facts.huge_pages
        for what, remedy, severity in _others(facts, pool)
    ]
    yield from findings
    if facts.huge_pages and not findings:
        idle = sum(pool.free * pool.page_bytes for pool in facts.huge_pages)
        yield all_well(name, f"no huge page is in others' use; {format_bytes(idle)} lie ready")


def _others(facts: Facts, pool: HugePageTotals) -> Iterator[tuple[str, str, Severity]]:
    folder = f"/sys/kernel/mm/hugepages/hugepages-{pool.page_bytes // 1024}kB"
    who = "grep -l huge /proc/*/numa_maps shows who; the plan leaves them alone"
    ours = sum(held.huge_pages(pool.page_bytes) for held in facts.pools)
    used = pool.total - pool.free - ours
    if used > 0:
        yield f"{used} are in use by others", who, Severity.INFO
    accounted = sum(
        entry.pages
        for held in facts.pools
        for entry in held.taken
        if entry.page_bytes == pool.page_bytes
    )
    idle = pool.free - pool.reserved - max(0, accounted - ours)
    if idle > 0:
        what = f"{idle} are free and no pool's: reserved by others, or left by a removed root"
        remedy = f"if nobody needs them: echo {pool.total - idle} > {folder}/nr_hugepages"
        yield what, remedy, Severity.WARNING if any(_orphaned_mounts(facts)) else Severity.INFO
    if pool.reserved:
        yield f"{pool.reserved} of those free are reserved by others", who, Severity.INFO
    if pool.surplus:
        what = f"{pool.surplus} are surplus: they vanish when whoever uses them lets go"
        yield what, f"cat {folder}/nr_overcommit_hugepages shows who may make them", Severity.INFO
    if pool.overcommit:
        what = f"{pool.overcommit} more may be taken from memory at any time (overcommit)"
        yield what, f"echo 0 > {folder}/nr_overcommit_hugepages", Severity.WARNING


def _check_movable(facts: Facts) -> Iterator[Finding]:
    """FOLL_LONGTERM migrates pages out of ZONE_MOVABLE (mm/gup.c): no place for regions."""
    nodes = [node for node in facts.nodes if node.cpus]
    for node in nodes:
        if node.movable_bytes:
            what = (
                f"node {node.node_id} has {format_bytes(node.movable_bytes)} of ZONE_MOVABLE: "
                "registering would migrate every page; only HugeTLB1Gi is not taken from there"
            )
            remedy = (
                "boot without movablecore= and kernelcore=; online memory as online_kernel "
                "(/sys/devices/system/memory/auto_online_blocks)"
            )
            yield Finding(Severity.WARNING, "movable", what, remedy)
    if nodes and not any(node.movable_bytes for node in nodes):
        yield all_well("movable", "no node with CPUs has a ZONE_MOVABLE")


def _check_cma(facts: Facts) -> Iterator[Finding]:
    """CMA memory too is migrated out of by every long-term pin."""
    size = sum(node.free_cma_bytes for node in facts.nodes)
    if size >= _CMA_WORTH_SAYING_BYTES:
        what = f"{format_bytes(size)} free are CMA's: counted as not to be had"
        remedy = "boot with a smaller cma=, and without hugetlb_cma="
        yield Finding(Severity.INFO, "cma", what, remedy)
    else:
        yield all_well("cma", f"{format_bytes(size)} free are CMA's")


def _check_numa(facts: Facts) -> Iterator[Finding]:
    """Memory without CPUs is left out; equal regions end where the smallest node does."""
    with_cpus = [node for node in facts.nodes if node.cpus]
    without = [node for node in facts.nodes if not node.cpus and node.total_bytes]
    if without:
        ids = ", ".join(str(node.node_id) for node in without)
        what = f"nodes without CPUs ({ids}) are memory of GPUs or CXL expanders: left out"
        remedy = "nothing to do; keep others' memory off them with numactl or cpuset.mems"
        yield Finding(Severity.INFO, "numa", what, remedy)
    sizes = {node.node_id: node.total_bytes for node in with_cpus}
    if not sizes:
        remedy = "see: numactl --hardware; boot without maxcpus= and with all memory"
        yield Finding(Severity.ERROR, "numa", "no node has both CPUs and memory", remedy)
    elif min(sizes.values()) < max(sizes.values()) * _UNEVEN:
        each = ", ".join(f"node {n}: {format_bytes(size)}" for n, size in sizes.items())
        what = f"memory is uneven ({each}): equal regions end where the smallest node does"
        remedy = "populate the sockets' memory slots evenly, or ask for regions: Single"
        yield Finding(Severity.WARNING, "numa", what, remedy)
    else:
        each = format_bytes(min(sizes.values()) // GIB * GIB or min(sizes.values()))
        yield all_well("numa", f"nodes with CPUs: {len(sizes)}, of {each} or more")


def _check_swap(facts: Facts) -> Iterator[Finding]:
    """Tmpfs stays out of swap with noswap (6.4, by a mount of our own), or where there is none."""
    size = format_bytes(facts.memory.swap_total_bytes)
    if facts.memory.swap_total_bytes == 0:
        yield all_well("swap", "no swap is on: tmpfs stays in memory")
    elif not facts.kernel.has_tmpfs_noswap:
        what = f"{size} of swap is on, and tmpfs has no noswap before Linux 6.4"
        remedy = "swapoff -a, or ask for HugeTLB2Mi: huge pages are never swapped"
        yield Finding(Severity.WARNING, "swap", f"{what}: THP and Base are refused", remedy)
    elif not facts.process.can_mount:
        what = f"{size} of swap is on, and noswap needs the right to mount: Base is refused"
        yield Finding(Severity.WARNING, "swap", what, "run it as root, or swapoff -a")
    else:
        yield all_well("swap", f"{size} of swap is on; our mounts are made noswap")


def _check_thp(facts: Facts) -> Iterator[Finding]:
    """Direct compaction in page faults stalls for minutes where memory is fragmented.

    Populating a THP region does it with `always` alone (hostprep.node.plan.backings).
    """
    defrag = facts.thp.defrag
    crumbled = _fragmented_nodes(facts)
    remedy = f"echo defer > {_THP_FOLDER}/defrag"
    if defrag == "always":
        what = (
            "THP defrag=always: every page fault may compact memory, and stall its process; "
            "the backing THP is taken only where no other can be had"
        )
        yield Finding(Severity.WARNING, "thp", what, remedy)
    elif defrag in ("madvise", "defer+madvise"):
        what = f"THP defrag={defrag}: engines that use MADV_HUGEPAGE compact memory in page faults"
        severity = Severity.WARNING if crumbled else Severity.INFO
        if crumbled:
            nodes = ", ".join(str(node.node_id) for node in crumbled)
            what += f"; with node {nodes} fragmented their start may take minutes"
        yield Finding(severity, "thp", what, remedy)
    else:
        yield all_well("thp", f"THP defrag={defrag}: page faults do not compact memory")


def _check_shmem(facts: Facts) -> Iterator[Finding]:
    """`deny` overrides the huge= option of every tmpfs mount (transhuge.rst)."""
    knob = facts.thp.shmem_enabled
    if knob == "deny":
        what = "shmem_enabled=deny: the backing THP is refused"
        remedy = f"echo never > {_THP_FOLDER}/shmem_enabled (own mounts ask for themselves)"
        yield Finding(Severity.WARNING, "shmem", what, remedy)
    elif knob == "unknown":
        what = "this kernel has no transparent huge pages for tmpfs: the backing THP is refused"
        yield Finding(Severity.INFO, "shmem", what, "ask for HugeTLB2Mi or Base")
    else:
        yield all_well("shmem", f"shmem_enabled={knob}: our tmpfs mounts may have huge pages")


def _check_huge_page_sizes(facts: Facts) -> Iterator[Finding]:
    """Report what hugetlbfs can be mounted with here."""
    name, sizes = "huge-page-sizes", facts.kernel.hugepage_sizes
    shown = ", ".join(format_bytes(size) for size in sizes) or "none"
    if 2 * MIB not in sizes:
        what = f"hugetlbfs has no pages of 2 MiB here (it has: {shown})"
        remedy = "use a kernel with CONFIG_HUGETLBFS (and, on arm64, base pages of 4 KiB)"
        yield Finding(Severity.WARNING, name, what, remedy)
    elif GIB not in sizes:
        what = f"no pages of 1 GiB (it has: {shown}): HugeTLB1Gi is refused"
        remedy = "give a virtual machine a CPU model with pdpe1gb, or ask for HugeTLB2Mi"
        yield Finding(Severity.INFO, name, what, remedy)
    else:
        yield all_well(name, f"hugetlbfs offers {shown}")


def _check_base_pages(facts: Facts) -> Iterator[Finding]:
    """Report NVIDIA's driver on arm64 with 64 KiB pages, whichever release it is of."""
    memory, name = facts.memory, "base-pages"
    issues = known_issues_of(
        size_bytes=4 * GIB,  # from there on
        arch=facts.kernel.arch,
        base_page_bytes=memory.page_bytes,
    )
    issue = next((issue for issue in issues if issue.name == "LargeArmPages"), None)
    if issue and any(gpu.is_nvidia for gpu in facts.gpus):
        yield Finding(Severity.WARNING, name, issue.what, issue.remedy)
    else:
        yield all_well(name, f"base pages of {format_bytes(memory.page_bytes)}")


CHECKS: tuple[Callable[[Facts], Iterable[Finding]], ...] = (
    _check_kernel,
    _check_privileges,
    _check_root,
    _check_selinux,
    _check_pools,
    _check_cgroup,
    _check_fragmentation,
    _check_huge_page_sizes,
    _check_huge_pages,
    _check_movable,
    _check_cma,
    _check_numa,
    _check_bad_memory,
    check_gpus,
    _check_swap,
    _check_thp,
    _check_shmem,
    _check_memlock,
    _check_base_pages,
    _check_page_tables,
    _check_probes,
)
"""Each checks one thing, and yields nothing only where there is nothing to check."""
