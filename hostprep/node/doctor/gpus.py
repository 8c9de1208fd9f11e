"""GPUs: where they sit, the memory beside them, and registering with CUDA."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from hostprep.api.pool_spec import PoolSpec
from hostprep.backing import GIB, MIB
from hostprep.cuda.chunks import ChunkPolicy
from hostprep.cuda.cost import registration_cost
from hostprep.known_issues import known_issues_of, parse_driver_version
from hostprep.node.doctor.finding import NOTHING_TO_DO, Finding, Severity, all_well
from hostprep.node.facts import Facts, NumaNode
from hostprep.node.observe.gpus import CudaFacts, NvidiaFacts
from hostprep.node.plan import plan
from hostprep.units import format_bytes

_SHORT = 0.1
"""Of a node's memory free or reclaimable: below it there is hardly anything to prepare."""
_NAME = "register"
_LARGEST_CALL_BYTES = ChunkPolicy.most_bytes
"""Of our own registrations."""
_OTHER_CHECKS = frozenset({"LongTermPinLimit", "LargeArmPages"})
"""Issues that the checks `kernel` and `base-pages` report."""
_COSTLY_SHARE = 0.25
"""Of the memory that is available now: a cost worth a warning."""


def check_gpus(facts: Facts) -> Iterator[Finding]:
    """Regions per GPU lie on the GPU's node: it has to be known, and to have memory."""
    problems = [*_without_node(facts), *_short_nodes(facts)]
    bare = [gpu.pci_address for gpu in facts.gpus if gpu.driver is None]
    if bare:
        what = f"no driver is bound to GPU {', '.join(bare)}: no engine can register with it"
        remedy = "modprobe nvidia (or amdgpu); in a cluster see the GPU operator's driver pods"
        problems.append(Finding(Severity.WARNING, "gpus", what, remedy))
    yield from problems
    if not facts.gpus:
        yield Finding(
            Severity.INFO,
            "gpus",
            "no GPU of NVIDIA or AMD on the PCI bus: regions: PerGPU is refused",
            "use regions: PerNUMANode, or see: lspci -d 10de:",
        )
    elif not problems:
        nodes = {gpu.numa_node for gpu in facts.gpus if gpu.numa_node is not None}
        where = f"on NUMA node {', '.join(map(str, sorted(nodes)))}" if nodes else "on one node"
        yield all_well("gpus", f"GPUs: {len(facts.gpus)}, {where}")


def _without_node(facts: Facts) -> Iterator[Finding]:
    lost = [gpu.pci_address for gpu in facts.gpus if gpu.numa_node is None]
    if lost and len([node for node in facts.nodes if node.cpus]) > 1:
        what = f"the firmware tells no NUMA node for GPU {', '.join(lost)}: regions interleaved"
        remedy = "update the BIOS, or pass the topology on to the virtual machine (vNUMA)"
        yield Finding(Severity.WARNING, "gpus", what, remedy)


def _short_nodes(facts: Facts) -> Iterator[Finding]:
    for node_id in sorted({gpu.numa_node for gpu in facts.gpus if gpu.numa_node is not None}):
        node = facts.node(node_id)
        count = sum(gpu.numa_node == node_id for gpu in facts.gpus)
        if node is None or not node.total_bytes:
            what = f"node {node_id}, where GPUs sit ({count}), has no memory"
            remedy = f"populate the memory slots of the socket of node {node_id}"
            yield Finding(Severity.WARNING, "gpus", what, remedy)
        elif (left := _left(node)) < node.total_bytes * _SHORT:
            what = (
                f"node {node_id}, where GPUs sit ({count}), has {format_bytes(left)} left of "
                f"{format_bytes(node.total_bytes)}"
            )
            remedy = f"see who took it: numastat -m; cat /sys/devices/system/node/node{node_id}/"
            yield Finding(Severity.WARNING, "gpus", what, f"{remedy}meminfo")


def _left(node: NumaNode) -> int:
    """Return what a node could still give: free, reclaimable, and free huge pages."""
    huge = sum(pool.free * pool.page_bytes for pool in node.huge_pages)
    return node.free_bytes + node.reclaimable_bytes + huge


@dataclass(frozen=True, slots=True)
class _Registered:
    """What would be registered: a pool, or an example."""

    name: str
    size_bytes: int
    page_bytes: int


def check_registering(
    facts: Facts, nvidia: NvidiaFacts, specs: Sequence[PoolSpec] = ()
) -> Iterator[Finding]:
    """Report what engines meet that register the pools with CUDA here. Pure: opens no file."""
    if nvidia.module is None:
        yield _no_driver(facts)
        return
    cuda = nvidia.cuda or CudaFacts()
    yield from _driver(nvidia)
    yield from _devices(cuda)
    if any(device.uses_host_page_tables for device in cuda.devices):
        return  # nothing is locked and no table is made there: no cost, and no limit
    wanted = _wanted(facts, specs)
    for one in wanted or (_Registered("for every 100 GiB", 100 * GIB, 2 * MIB),):
        yield _cost(facts, nvidia, one)
    found = known_issues_of(
        size_bytes=max((one.size_bytes for one in wanted), default=facts.memory.total_bytes),
        chunk_bytes=_LARGEST_CALL_BYTES,
        kernel_release=facts.kernel.release,
        driver_version=nvidia.module,
        arch=facts.kernel.arch,
        base_page_bytes=facts.memory.page_bytes,
    )
    shown = [issue for issue in found if issue.name not in _OTHER_CHECKS]
    for issue in shown:
        yield Finding(Severity(issue.severity), _NAME, issue.what, issue.remedy)
    if not shown:
        chunk = format_bytes(_LARGEST_CALL_BYTES)
        yield all_well(_NAME, f"no known fault meets registrations of {chunk} at a time here")


def _no_driver(facts: Facts) -> Finding:
    if any(gpu.is_nvidia for gpu in facts.gpus):
        why = "no NVIDIA driver is loaded"
        remedy = "modprobe nvidia; in a cluster see the GPU operator's driver pods"
    elif facts.gpus:
        why, remedy = "its GPUs are AMD's", "leave --gpu out; ROCm registers by calls of its own"
    else:
        why, remedy = "there is no NVIDIA GPU and no driver", "leave --gpu out on such a node"
    what = f"nothing can be registered with CUDA on this node: {why}"
    return Finding(Severity.ERROR, _NAME, what, remedy)


def _driver(nvidia: NvidiaFacts) -> Iterator[Finding]:
    version = parse_driver_version(nvidia.module)
    if version is None:
        what = f"the NVIDIA driver's release cannot be told ({nvidia.module}): held for a new one"
        yield Finding(Severity.WARNING, _NAME, what, "see: cat /proc/driver/nvidia/version")
    else:
        kind = {True: ", open kernel module", False: ", proprietary module", None: ""}
        release = ".".join(str(part).zfill(2) for part in version)
        yield all_well(_NAME, f"NVIDIA driver {release}{kind[nvidia.is_open]}")
    if nvidia.translated:
        where = ", ".join(nvidia.translated)
        what = f"an IOMMU translates for GPU {where}: its tables are filled for all that registers"
        remedy = "iommu=pt on the kernel's command line, unless a virtual machine needs it"
        yield Finding(Severity.INFO, _NAME, what, remedy)


def _devices(cuda: CudaFacts) -> Iterator[Finding]:
    if cuda.problem:
        what = f"CUDA could not be asked about its devices from here: {cuda.problem}"
        yield Finding(Severity.INFO, _NAME, what, cuda.remedy)
    for number, device in enumerate(cuda.devices):
        named = f"GPU {number} ({device.name}, {format_bytes(device.total_bytes)})"
        if device.uses_host_page_tables:
            what = f"{named} uses the host's page tables: only huge pages are registered there"
            yield Finding(Severity.INFO, _NAME, what, NOTHING_TO_DO)
        elif not device.host_register_supported:
            what = f"{named} cannot register host memory"
            remedy = "the engine copies through its own buffers there; see: nvidia-smi -q"
            yield Finding(Severity.ERROR, _NAME, what, remedy)
        elif not device.can_use_host_pointer:
            what = f"{named} reaches registered memory by other addresses than the host's (WSL2)"
            remedy = "run engines without a host tier there: they would not register it"
            yield Finding(Severity.ERROR, _NAME, what, remedy)
        else:
            yield all_well(_NAME, f"{named} registers host memory")


def _wanted(facts: Facts, specs: Sequence[PoolSpec]) -> tuple[_Registered, ...]:
    """Return the pools that are asked for, or those that are held."""
    if specs:
        return tuple(
            _Registered(pool.name, pool.planned_bytes, min(b.page_bytes for b in pool.backings))
            for pool in plan(specs, facts).pools
            if pool.planned_bytes and pool.backings
        )
    return tuple(
        _Registered(
            pool.name,
            sum(region.size_bytes for region in pool.regions),
            min(region.backing.page_bytes for region in pool.regions),
        )
        for pool in facts.pools
        if pool.regions
    )


def _cost(facts: Facts, nvidia: NvidiaFacts, wanted: _Registered) -> Finding:
    """Slices are what Hostprep's engines register; all of it is what others do (FlexKV #259)."""
    ranks = max(1, sum(gpu.is_nvidia for gpu in facts.gpus))
    slice_bytes = -(-wanted.size_bytes // ranks // wanted.page_bytes) * wanted.page_bytes
    base = facts.memory.page_bytes
    slices, full = (
        registration_cost(
            size,
            page_bytes=wanted.page_bytes,
            processes=ranks,
            driver_version=nvidia.module,
            base_page_bytes=base,
        )
        for size in (max(slice_bytes, wanted.page_bytes), wanted.size_bytes)
    )
    what = (
        f"{wanted.name}: registering takes {format_bytes(slices.vram_bytes_per_gpu)} of each GPU "
        f"and {format_bytes(slices.kernel_bytes)} of the kernel's memory"
    )
    if ranks > 1:
        what += (
            f" if each of {ranks} ranks registers its slice; "
            f"{format_bytes(full.vram_bytes_per_gpu)} and {format_bytes(full.kernel_bytes)} if "
            "each registers all"
        )
    if full.kernel_bytes > facts.memory.available_bytes * _COSTLY_SHARE:
        remedy = "register slices only, and leave that much unprepared"
        return Finding(Severity.WARNING, _NAME, what, remedy)
    return Finding(Severity.INFO, _NAME, f"{what} (reckoned)", NOTHING_TO_DO)
