"""NVIDIA's driver: what the kernel shows of it, and what CUDA says where it can be asked.

Asked for only by `hostprep doctor --gpu`: no other command loads a library of the vendor.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hostprep.cuda.local_issues import VERSION_FILES
from hostprep.errors import HostprepError
from hostprep.node.facts import Gpu

if TYPE_CHECKING:
    from hostprep.cuda.driver import DeviceTraits, Driver
    from hostprep.node.observe.host import HostRoot

__all__ = ["CudaFacts", "NvidiaFacts", "ask_cuda", "observe_nvidia"]

_VENDOR = 0x10DE
_TRANSLATING = frozenset({"DMA", "DMA-FQ"})
"""Kinds of IOMMU domains whose addresses are not the memory's own (sysfs-kernel-iommu_groups)."""


@dataclass(frozen=True, slots=True)
class CudaFacts:
    """What CUDA says in this process; or why it says nothing, and what would help."""

    devices: tuple[DeviceTraits, ...] = ()
    problem: str = ""
    remedy: str = ""


@dataclass(frozen=True, slots=True)
class NvidiaFacts:
    """NVIDIA's driver on this node."""

    module: str | None
    """What the kernel module says of itself, with its release in it; None where none is loaded."""
    is_open: bool | None = None
    """Whether it is the open kernel module; None where it does not say."""
    translated: tuple[str, ...] = ()
    """PCI addresses of NVIDIA GPUs behind an IOMMU that translates."""
    cuda: CudaFacts | None = None
    """None where it was not asked."""


def observe_nvidia(
    host: HostRoot, gpus: tuple[Gpu, ...], *, ask: Callable[[], CudaFacts] | None = None
) -> NvidiaFacts:
    """Return what is known of the driver; CUDA is asked only where a module is loaded."""
    texts = [host.read_text(path) for path in VERSION_FILES]
    module = next((text.partition("\n")[0].strip() for text in texts if text), None)
    if module is None:
        return NvidiaFacts(None)
    return NvidiaFacts(
        module=module,
        is_open="Open Kernel Module" in texts[0] if texts[0] else None,
        translated=tuple(gpu.pci_address for gpu in gpus if _is_translated(host, gpu)),
        cuda=ask() if ask is not None else None,
    )


def ask_cuda(load: Callable[[], Driver] | None = None) -> CudaFacts:
    """Return the traits of every device that CUDA shows this process. Makes no context."""
    from hostprep.cuda.driver import load_driver

    try:
        driver = (load or load_driver)()
        return CudaFacts(tuple(driver.attributes(n) for n in range(driver.device_count())))
    except HostprepError as error:
        return CudaFacts(problem=error.message, remedy=error.remedy or "see: nvidia-smi")


def _is_translated(host: HostRoot, gpu: Gpu) -> bool:
    kind = host.read_text(f"/sys/bus/pci/devices/{gpu.pci_address}/iommu_group/type")
    return gpu.vendor_id == _VENDOR and (kind or "").strip() in _TRANSLATING
