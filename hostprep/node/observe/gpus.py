"""GPUs on the PCI bus, and NVIDIA's driver.

GPUs come from sysfs: no driver or library of the vendor is loaded for them. CUDA is called by
`hostprep doctor --gpu` only.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hostprep.errors import HostprepError
from hostprep.known_issues import VERSION_FILES
from hostprep.node.facts import NVIDIA_VENDOR, Gpu

if TYPE_CHECKING:
    from hostprep.cuda.driver import DeviceTraits, Driver
    from hostprep.node.observe.host import HostRoot

_DEVICES = "/sys/bus/pci/devices"
_VENDORS = frozenset({NVIDIA_VENDOR, 0x1002})
"""NVIDIA and AMD. Servers also have a VGA controller on their management chip (ASPEED)."""
_CLASSES = frozenset({0x0300, 0x0302, 0x0380, 0x1200})
"""VGA, 3D, other display (AMD Instinct MI100 and MI200) and processing accelerators (MI300)."""
_TRANSLATING = frozenset({"DMA", "DMA-FQ"})
"""Kinds of IOMMU domains whose addresses are not the memory's own (sysfs-kernel-iommu_groups)."""


def observe_gpus(host: HostRoot) -> tuple[Gpu, ...]:
    """Return the GPUs by PCI address."""
    gpus = (_gpu(host, address) for address in host.list_dir(_DEVICES))
    return tuple(gpu for gpu in gpus if gpu is not None)


def _gpu(host: HostRoot, address: str) -> Gpu | None:
    folder = f"{_DEVICES}/{address}"
    pci_class = host.read_int(f"{folder}/class")
    if pci_class is None or pci_class >> 8 not in _CLASSES:
        return None
    vendor_id = host.read_int(f"{folder}/vendor")
    # A virtual function is a part of a GPU that is listed itself; inside a virtual machine
    # it is the GPU, and has no such link.
    if vendor_id not in _VENDORS or host.exists(f"{folder}/physfn"):
        return None
    numa_node = host.read_int(f"{folder}/numa_node")
    driver = host.link(f"{folder}/driver")
    return Gpu(
        pci_address=address,
        vendor_id=vendor_id,
        numa_node=numa_node if numa_node is not None and numa_node >= 0 else None,
        driver=driver.rpartition("/")[2] if driver else None,
    )


@dataclass(frozen=True, slots=True)
class CudaFacts:
    """The devices that CUDA shows this process; or why it cannot, and the remedy."""

    devices: tuple[DeviceTraits, ...] = ()
    problem: str = ""
    remedy: str = ""


@dataclass(frozen=True, slots=True)
class NvidiaFacts:
    """NVIDIA's driver on this node."""

    module: str | None
    """The kernel module's version text, with its release; None where none is loaded."""
    is_open: bool | None = None
    """Whether it is the open kernel module; None where that is unknown."""
    translated: tuple[str, ...] = ()
    """PCI addresses of NVIDIA GPUs behind an IOMMU that translates."""
    cuda: CudaFacts | None = None
    """None where it was not queried."""


def observe_nvidia(
    host: HostRoot, gpus: tuple[Gpu, ...], *, query: Callable[[], CudaFacts] | None = None
) -> NvidiaFacts:
    """Return what is known of the driver; CUDA is queried only where a module is loaded."""
    texts = [host.read_text(path) for path in VERSION_FILES]
    module = next((text.partition("\n")[0].strip() for text in texts if text), None)
    if module is None:
        return NvidiaFacts(None)
    return NvidiaFacts(
        module=module,
        is_open="Open Kernel Module" in texts[0] if texts[0] else None,
        translated=tuple(
            gpu.pci_address for gpu in gpus if gpu.is_nvidia and _is_translated(host, gpu)
        ),
        cuda=query() if query is not None else None,
    )


def query_cuda(load: Callable[[], Driver] | None = None) -> CudaFacts:
    """Return the traits of every device that CUDA shows this process. Makes no context."""
    from hostprep.cuda.driver import load_driver

    try:
        driver = (load or load_driver)()
        return CudaFacts(tuple(driver.attributes(n) for n in range(driver.device_count())))
    except HostprepError as error:
        return CudaFacts(problem=error.message, remedy=error.remedy or "see: nvidia-smi")


def _is_translated(host: HostRoot, gpu: Gpu) -> bool:
    kind = host.read_text(f"{_DEVICES}/{gpu.pci_address}/iommu_group/type") or ""
    return kind.strip() in _TRANSLATING
