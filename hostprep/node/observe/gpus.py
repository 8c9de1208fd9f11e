"""GPUs on the PCI bus, from sysfs: no driver or library of the vendor is asked."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hostprep.node.facts import Gpu

if TYPE_CHECKING:
    from hostprep.node.observe.host import HostRoot

__all__ = ["observe_gpus"]

_DEVICES = "/sys/bus/pci/devices"
_VENDORS = frozenset({0x10DE, 0x1002})
"""NVIDIA and AMD. Servers also have a VGA controller on their management chip (ASPEED)."""
_CLASSES = frozenset({0x0300, 0x0302, 0x0380, 0x1200})
"""VGA, 3D, other display (AMD Instinct MI100 and MI200) and processing accelerators (MI300)."""


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
        device_id=host.read_int(f"{folder}/device") or 0,
        numa_node=numa_node if numa_node is not None and numa_node >= 0 else None,
        driver=driver.rpartition("/")[2] if driver else None,
    )
