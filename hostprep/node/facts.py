"""The facts that observe gathers and plan works from: the node as plain, frozen values.

Sizes are bytes. Where the kernel offers no answer the field is None, never a guess.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from hostprep.api.pool_spec import Placement
from hostprep.backing import GIB, KIB, MIB, Backing

NVIDIA_VENDOR = 0x10DE
WITHOUT_ROOT = (
    "run it as root; without root, give --root a folder of your own below /dev/shm, "
    "such as --root $(mktemp -d -p /dev/shm)"
)
"""What to do where only root may prepare or release; whom the pool's group lets in may not."""
_SUFFIXES = {"K": KIB, "M": MIB, "G": GIB}


@dataclass(frozen=True, slots=True)
class KernelFacts:
    """The running kernel. Versions from mainline history: see docs/architecture.md."""

    release: str
    version: tuple[int, int]
    arch: str
    boot_id: str
    hugepage_sizes: tuple[int, ...]
    """Page sizes in bytes that this CPU and kernel offer to hugetlbfs."""

    @property
    def has_populate_write(self) -> bool:
        """MADV_POPULATE_WRITE and _READ, since 5.14."""
        return self.version >= (5, 14)

    @property
    def has_tmpfs_noswap(self) -> bool:
        """The tmpfs mount option noswap, since 6.4."""
        return self.version >= (6, 4)

    @property
    def has_tmpfs_large_folios(self) -> bool:
        """Files on tmpfs in folios of any order, since 6.14 (mm/shmem.c)."""
        return self.version >= (6, 14)

    @property
    def has_idmapped_hugetlbfs(self) -> bool:
        """Idmapped mounts of hugetlbfs (pods with hostUsers: false), since 6.9."""
        return self.version >= (6, 9)


@dataclass(frozen=True, slots=True)
class Zone:
    """One zone of one NUMA node, from /proc/zoneinfo and /proc/buddyinfo."""

    name: str
    managed_bytes: int
    free_bytes: int
    free_cma_bytes: int
    low_watermark_bytes: int
    free_blocks: tuple[int, ...]
    """Free blocks of each order: index n counts blocks of 2**n base pages."""

    @property
    def is_movable(self) -> bool:
        """Long-term pins must first migrate out of ZONE_MOVABLE: the wrong place for us."""
        return self.name == "Movable"


@dataclass(frozen=True, slots=True)
class HugePages:
    """One huge-page pool of one NUMA node, from its sysfs folder. Counts are pages."""

    page_bytes: int
    total: int
    free: int
    surplus: int


@dataclass(frozen=True, slots=True)
class HugePageTotals(HugePages):
    """One huge-page pool of the whole machine. Counts are pages.

    Reservations (mmap without a fault yet) exist machine-wide only: the kernel does not say on
    which node they will be met.
    """

    reserved: int
    overcommit: int


@dataclass(frozen=True, slots=True)
class NumaNode:
    """One NUMA node: its CPUs, its memory, its zones and its huge pages."""

    node_id: int
    cpus: tuple[int, ...]
    total_bytes: int
    free_bytes: int
    reclaimable_bytes: int
    """File cache and reclaimable slab that the kernel could drop for us: an estimate."""
    zones: tuple[Zone, ...]
    huge_pages: tuple[HugePages, ...]
    deferred_bytes: int = 0
    """Memory that the kernel counts but initialises on demand only: part of total and free, in
    no zone yet, and in one piece. Zero but for some small virtual machines."""

    @property
    def movable_bytes(self) -> int:
        """Memory in ZONE_MOVABLE."""
        return sum(zone.managed_bytes for zone in self.zones if zone.is_movable)

    @property
    def free_cma_bytes(self) -> int:
        """Free memory that belongs to CMA areas outside ZONE_MOVABLE."""
        return sum(zone.free_cma_bytes for zone in self.zones if not zone.is_movable)

    def huge(self, page_bytes: int) -> HugePages:
        """Return the pool of that page size; an empty one where there is none."""
        for pool in self.huge_pages:
            if pool.page_bytes == page_bytes:
                return pool
        return HugePages(page_bytes=page_bytes, total=0, free=0, surplus=0)

    @property
    def free_fixed_bytes(self) -> int:
        """Free memory outside ZONE_MOVABLE and CMA, from where pinned pages would migrate."""
        movable = sum(zone.free_bytes for zone in self.zones if zone.is_movable)
        return self.free_bytes - movable - self.free_cma_bytes

    def contiguous_fixed_bytes(self, base_page_bytes: int, block_bytes: int = 2 * MIB) -> int:
        """Return `contiguous_bytes` less all free CMA memory: buddyinfo counts it in any block."""
        return max(0, self.contiguous_bytes(base_page_bytes, block_bytes) - self.free_cma_bytes)

    def contiguous_bytes(self, base_page_bytes: int, block_bytes: int = 2 * MIB) -> int:
        """Return the free bytes in blocks of at least `block_bytes` outside ZONE_MOVABLE.

        That is what can be had as huge pages at once, with no compaction.
        """
        return self.deferred_bytes + sum(
            count * (base_page_bytes << order)
            for zone in self.zones
            if not zone.is_movable
            for order, count in enumerate(zone.free_blocks)
            if base_page_bytes << order >= block_bytes
        )


@dataclass(frozen=True, slots=True)
class MemoryFacts:
    """The whole machine's /proc/meminfo, as far as it matters."""

    total_bytes: int
    available_bytes: int
    free_bytes: int
    swap_total_bytes: int
    page_bytes: int
    corrupted_bytes: int = 0
    """HardwareCorrupted: what the kernel took out of use since the boot, for errors in it."""


@dataclass(frozen=True, slots=True)
class ThpFacts:
    """The active choice of each knob below /sys/kernel/mm/transparent_hugepage."""

    defrag: str
    shmem_enabled: str


@dataclass(frozen=True, slots=True)
class Mount:
    """One line of /proc/self/mountinfo that concerns memory or the root folder."""

    path: str
    fs_type: str
    source: str
    options: tuple[str, ...]
    device: tuple[int, int]
    fs_root: str = "/"
    """The folder of its file system that is mounted here."""
    free_bytes: int = 0
    """Of one with `limit_bytes`: how much of that is neither in use nor reserved."""

    @property
    def limit_bytes(self) -> int | None:
        """What all files of a hugetlbfs may hold; None without a limit, and for other mounts.

        It is for good: a remount with another size succeeds and changes nothing (Linux 6.18).
        """
        text = self.option("size") or ""
        return int(text) if self.fs_type == "hugetlbfs" and text.isdecimal() else None

    @property
    def backing(self) -> Backing | None:
        """The backing that files on this mount have; None for another page size or file system."""
        if self.fs_type == "tmpfs":
            return Backing.THP if self.option("huge") == "always" else Backing.BASE
        if self.fs_type != "hugetlbfs":
            return None
        text = self.option("pagesize") or ""
        size = int(text[:-1]) * _SUFFIXES.get(text[-1], 0) if text[:-1].isdecimal() else 0
        return next((b for b in Backing if b.is_hugetlb and b.page_bytes == size), None)

    def option(self, name: str) -> str | None:
        """Return an option's value, '' for a bare one, None where it is absent."""
        for option in self.options:
            key, _, value = option.partition("=")
            if key == name:
                return value
        return None


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU on the PCI bus."""

    pci_address: str
    vendor_id: int
    numa_node: int | None
    """None where the firmware does not say (-1 in sysfs)."""
    driver: str | None

    @property
    def is_nvidia(self) -> bool:
        """Whether it is NVIDIA's."""
        return self.vendor_id == NVIDIA_VENDOR


@dataclass(frozen=True, slots=True)
class CgroupFacts:
    """Where this process is charged, and whether it can be charged elsewhere."""

    version: int
    """2 where the memory controller is in the unified hierarchy, 1 where it is not, 0 unknown."""
    path: str
    """This process's folder in the hierarchy of the memory controller."""
    memory_limit_bytes: int | None
    """The tightest memory limit from here to the top; None where there is none."""
    hugetlb_limit_bytes: tuple[tuple[int, int], ...] = ()
    """(page_bytes, limit) for every huge-page size that is limited here."""
    writable: bool = False
    """Whether a host-level cgroup can be made and entered."""
    namespaced: bool = False
    """In a cgroup namespace that it may not leave: `path` is relative to it, `/` not the top."""

    @property
    def is_shut_in(self) -> bool:
        """Whether no cgroup but its own, and those below, can be named from here."""
        return self.namespaced and self.path == "/"

    @property
    def in_kubepods(self) -> bool:
        """Whether kubelet's pods live here too."""
        return "kubepods" in self.path

    @property
    def is_top(self) -> bool:
        """Whether nothing above or here charges this process."""
        return self.path in ("", "/") and not self.namespaced


@dataclass(frozen=True, slots=True)
class ProcessFacts:
    """What this process may do."""

    euid: int
    can_mount: bool
    """CAP_SYS_ADMIN."""
    sees_all_processes: bool
    """In the host's PID namespace."""
    memlock_limit_bytes: int | None
    """RLIMIT_MEMLOCK; None is unlimited."""
    cpus: tuple[int, ...]
    """CPUs this process may run on."""


@dataclass(frozen=True, slots=True)
class RootFacts:
    """The folder that all pools live in, or the nearest parent that exists."""

    path: str
    exists: bool
    fs_type: str
    writable: bool
    free_bytes: int
    nearest_path: str = ""
    refused: str = ""
    """Why nothing is prepared below it, as far as its owner, mode and parents go; '' if it is."""
    remedy: str = ""
    """For `refused`."""
    unshared: str = ""
    """The first path in it that SELinux keeps containers from, with its label; '' if there is none,
    or no SELinux."""
    is_enforcing: bool | None = None
    """Whether SELinux enforces; None where that cannot be seen, as in most containers."""


@dataclass(frozen=True, slots=True)
class RegionFacts:
    """One region file as it is on disk, whatever the handoff has."""

    name: str
    mount_dir: str
    """Folder of the file, relative to the pool's: `mem`, or `mem-...` beside it for regions of
    other pages, and for huge pages that were added later."""
    backing: Backing
    placement: Placement
    size_bytes: int
    resident_bytes: int
    device: int
    inode: int
    gid: int
    mode: int
    finished: bool
    """False for one that a killed run left half made, under its temporary name."""
    leased: bool
    clean: bool
    scrubbable: bool = True
    """Whether this process can see that it is not in use, and may zero it."""
    retained: bool = False
    """Dirty with the bytes of an owner who may come back for them, and need not give way."""
    kept_s: float | None = None
    """Seconds since it was first seen without a holder, kept for its owner; None for others."""
    kept_is_over: bool = False
    """Kept for longer than the pool's retention allows, as far as that is noted beside it."""
    claimed_at_s: float = 0.0
    """Of one that is kept: when it was last claimed, by the clock."""

    @property
    def kept_order(self) -> tuple[float, float]:
        """Sorts regions that are kept: the one that was kept longest first."""
        return -(self.kept_s or 0.0), self.claimed_at_s

    damage: str | None = None
    """Why it may not be handed out, if it may not."""
    has_bad_pages: bool = False
    """Pages that the hardware reported do not come back to its mount when the file goes."""
    place_bytes: int = 0
    """Of a damaged one: the size that it was published with, and has the place of."""
    layout: str = ""
    """The `layout` that it is published with, as text; empty without one."""


@dataclass(frozen=True, slots=True)
class LedgerEntry:
    """Huge pages of one size that a pool adds to one node, and will give back."""

    node_id: int
    page_bytes: int
    pages: int

    def is_of(self, other: LedgerEntry) -> bool:
        """Tell whether both are of the same node and page size."""
        return (self.node_id, self.page_bytes) == (other.node_id, other.page_bytes)


def without_held(
    taken: tuple[LedgerEntry, ...], held: tuple[LedgerEntry, ...]
) -> tuple[LedgerEntry, ...]:
    """Return the entries less those pages; none below zero."""
    return tuple(
        LedgerEntry(
            entry.node_id,
            entry.page_bytes,
            max(0, entry.pages - sum(kept.pages for kept in held if kept.is_of(entry))),
        )
        for entry in taken
    )


@dataclass(frozen=True, slots=True)
class PoolFacts:
    """What a pool's folder holds now."""

    name: str
    boot_id: str | None
    """The boot its record is of; None where there is no readable record."""
    generation: int
    published: bool
    """Whether a handoff of this boot stands and matches the regions."""
    regions: tuple[RegionFacts, ...]
    taken: tuple[LedgerEntry, ...]
    mounts: tuple[Mount, ...]
    held: tuple[LedgerEntry, ...] = ()
    """Huge pages of removed regions that processes still have open or mapped: an upper bound for
    each node, since it is not known where an interleaved region's pages are."""
    held_in: tuple[str, ...] = ()
    """Folders with files of removed regions that processes still have open or mapped."""
    failure: str = ""
    """Why it could not be observed, if so: nothing is known of its regions, and nothing is done."""
    has_handoff: bool = True
    """Whether a handoff is there, of whatever boot and regions."""
    waiters: int | None = None
    """Claims that wait for a lease; None where the claim lock could not be had to look."""

    @property
    def returnable(self) -> tuple[LedgerEntry, ...]:
        """What the pool has added, less what processes keep of its removed regions."""
        return without_held(self.taken, self.held)

    def huge_pages(self, page_bytes: int) -> int:
        """Return how many huge pages of that size the regions are in."""
        return sum(
            region.resident_bytes // page_bytes
            for region in self.regions
            if region.backing.is_hugetlb and region.backing.page_bytes == page_bytes
        )

    def state_of(self, region: RegionFacts) -> str:
        """Return a region's state in one word, for people."""
        if not region.finished:
            return "Unfinished"
        if region.damage:
            return "Damaged"
        if region.leased:
            return "Leased"
        if not self.published:
            return "Unpublished"
        if region.retained:
            return "Retained"
        return "Free" if region.clean else "Dirty"


@dataclass(frozen=True, slots=True)
class Facts:
    """Everything that a plan may rest on."""

    kernel: KernelFacts
    memory: MemoryFacts
    nodes: tuple[NumaNode, ...]
    huge_pages: tuple[HugePageTotals, ...]
    thp: ThpFacts
    gpus: tuple[Gpu, ...]
    cgroup: CgroupFacts
    process: ProcessFacts
    root: RootFacts
    pools: tuple[PoolFacts, ...] = ()
    mounts: tuple[Mount, ...] = ()
    """Those below the root folder, whoever made them."""
    warnings: tuple[str, ...] = field(default=())
    """Probes that failed; the rest of the facts stand."""

    @property
    def may_have_engines(self) -> bool:
        """Whether a region of any pool is leased, or a pool cannot be observed: it may be."""
        return any(
            pool.failure or any(region.leased for region in pool.regions) for pool in self.pools
        )

    def pool(self, name: str) -> PoolFacts | None:
        """Return what there is of that pool."""
        return next((pool for pool in self.pools if pool.name == name), None)

    def node(self, node_id: int) -> NumaNode | None:
        """Return that NUMA node."""
        return next((node for node in self.nodes if node.node_id == node_id), None)

    def huge(self, page_bytes: int) -> HugePageTotals:
        """Return the machine's pool of that page size; an empty one where there is none."""
        for pool in self.huge_pages:
            if pool.page_bytes == page_bytes:
                return pool
        return HugePageTotals(page_bytes, total=0, free=0, reserved=0, surplus=0, overcommit=0)
