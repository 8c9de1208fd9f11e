"""Facts of made-up machines."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from hostprep.api.pool_spec import Placement
from hostprep.backing import GIB, MIB, Backing
from hostprep.node.facts import (
    CgroupFacts,
    Facts,
    Gpu,
    HugePages,
    HugePageTotals,
    KernelFacts,
    LedgerEntry,
    MemoryFacts,
    Mount,
    NumaNode,
    PoolFacts,
    ProcessFacts,
    RegionFacts,
    RootFacts,
    ThpFacts,
    Zone,
)

BOOT = "11111111-2222-3333-4444-555555555555"
PAGE = 4096
MAX_ORDER = 10


def blocks(contiguous_bytes: int) -> tuple[int, ...]:
    """Free blocks by order: so much in blocks of 4 MiB, and one odd one of 2 MiB."""
    orders = [0] * (MAX_ORDER + 1)
    orders[MAX_ORDER] = contiguous_bytes // (4 * MIB)
    orders[MAX_ORDER - 1] = contiguous_bytes % (4 * MIB) // (2 * MIB)
    return tuple(orders)


def zone(
    size: int, free: int, *, name: str = "Normal", contiguous: int | None = None, cma: int = 0
) -> Zone:
    return Zone(name, size, free, cma, 0, blocks(free if contiguous is None else contiguous))


def numa_node(
    node_id: int = 0,
    *,
    size: int = 64 * GIB,
    free: int | None = None,
    contiguous: int | None = None,
    cpus: Sequence[int] | None = None,
    huge: Sequence[HugePages] = (),
    movable: int = 0,
    cma: int = 0,
) -> NumaNode:
    free = size if free is None else free
    zones = [zone(size - movable, max(0, free - movable), contiguous=contiguous, cma=cma)]
    if movable:
        zones.append(zone(movable, min(free, movable), name="Movable"))
    own = tuple(range(node_id * 8, node_id * 8 + 8)) if cpus is None else tuple(cpus)
    return NumaNode(node_id, own, size, free, 0, tuple(zones), tuple(huge))


def machine(
    *nodes: NumaNode,
    euid: int = 0,
    can_mount: bool = True,
    sees_all: bool = True,
    kernel: tuple[int, int] = (6, 18),
    hugepage_sizes: tuple[int, ...] = (2 * MIB, GIB),
    swap: int = 0,
    reserved: dict[int, int] | None = None,
    available: int | None = None,
    gpus: Sequence[int | None] = (),
    cgroup: CgroupFacts | None = None,
    root_fs: str = "tmpfs",
    root_free: int | None = None,
    shmem: str = "never",
    defrag: str = "madvise",
    pools: Sequence[PoolFacts] = (),
) -> Facts:
    nodes = nodes or (numa_node(),)
    total = sum(node.total_bytes for node in nodes)
    free = sum(node.free_bytes for node in nodes)
    cpus = tuple(sorted(cpu for node in nodes for cpu in node.cpus))
    sizes = sorted({pool.page_bytes for node in nodes for pool in node.huge_pages})
    return Facts(
        kernel=KernelFacts(f"{kernel[0]}.{kernel[1]}.0", kernel, "x86_64", BOOT, hugepage_sizes),
        memory=MemoryFacts(total, free if available is None else available, free, swap, PAGE),
        nodes=tuple(nodes),
        huge_pages=tuple(
            HugePageTotals(
                page_bytes=size,
                total=sum(node.huge(size).total for node in nodes),
                free=sum(node.huge(size).free for node in nodes),
                reserved=(reserved or {}).get(size, 0),
                surplus=sum(node.huge(size).surplus for node in nodes),
                overcommit=0,
            )
            for size in sizes
        ),
        thp=ThpFacts(defrag, shmem),
        gpus=tuple(
            Gpu(f"0000:{index:02x}:00.0", 0x10DE, node, "nvidia") for index, node in enumerate(gpus)
        ),
        cgroup=cgroup or CgroupFacts(2, "/", None, writable=True),
        process=ProcessFacts(euid, can_mount, sees_all, None, cpus),
        root=RootFacts(
            "/run/hostprep", True, root_fs, True, free if root_free is None else root_free
        ),
        pools=tuple(pools),
    )


def region(
    name: str,
    size: int,
    backing: Backing = Backing.HUGETLB_2MI,
    *,
    leased: bool = False,
    clean: bool = True,
    finished: bool = True,
    damage: str | None = None,
    resident: int | None = None,
    mount_dir: str = "mem",
) -> RegionFacts:
    named = Placement.of_region(name)
    assert named is not None
    return RegionFacts(
        name=name,
        mount_dir=mount_dir,
        backing=backing,
        placement=named[0],
        size_bytes=size,
        resident_bytes=size if resident is None else resident,
        device=1,
        inode=1,
        gid=0,
        mode=0o660,
        finished=finished,
        leased=leased,
        clean=clean,
        damage=damage,
    )


def pool(
    *regions: RegionFacts,
    name: str = "kv",
    published: bool = True,
    taken: Sequence[LedgerEntry] = (),
    boot_id: str | None = BOOT,
    limits: Mapping[str, int] | None = None,
    has_handoff: bool = True,
) -> PoolFacts:
    """A pool with mounts for its regions; `limits` are those of hugetlbfs, by folder."""
    backings = {r.mount_dir: r.backing for r in regions}
    mounts = []
    for folder, backing in backings.items():
        here = [r for r in regions if r.mount_dir == folder]
        limit = (limits or {}).get(folder)
        mounts.append(mount(name, folder, backing, limit=limit, taken=reserved_bytes(here)))
    return PoolFacts(
        name, boot_id, 1, published, regions, tuple(taken), tuple(mounts), has_handoff=has_handoff
    )


def reserved_bytes(regions: Iterable[RegionFacts]) -> int:
    """What the files take of their mount: half-made ones have reserved all of their pages."""
    return sum(r.resident_bytes if r.finished else r.size_bytes for r in regions)


def mount(
    pool_name: str, folder: str, backing: Backing, *, limit: int | None = None, taken: int = 0
) -> Mount:
    path = f"/run/hostprep/{pool_name}/{folder}"
    if backing.is_hugetlb:
        size = "2M" if backing is Backing.HUGETLB_2MI else "1024M"
        options = ("rw", f"pagesize={size}", *([] if limit is None else [f"size={limit}"]))
        free = 0 if limit is None else limit - taken
        return Mount(path, "hugetlbfs", "hostprep", options, (0, 40), free_bytes=free)
    options = ("rw", "huge=always") if backing is Backing.THP else ("rw",)
    return Mount(path, "tmpfs", "hostprep", options, (0, 41))
