"""What registering with CUDA takes and meets here, told by `hostprep attach` before it is paid."""

from __future__ import annotations

from hostprep.cuda.cost import registration_cost
from hostprep.cuda.local_issues import driver_words, faults_of
from hostprep.units import format_bytes

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from typing import Any

    from hostprep.client.handoff import Region

__all__ = ["registering", "registering_lines"]


def registering(regions: Sequence[Region]) -> dict[str, Any] | None:
    """Return cost and known faults of one process that registers all of these regions.

    None where nothing is registered: no NVIDIA driver can be seen from here, or its GPUs use the
    host's page tables. Sizes in bytes; reckoned, not measured (hostprep.register.cost).
    """
    words = driver_words()
    if words is None or not regions or all(region.attach.skip_register for region in regions):
        return None
    cost = registration_cost(
        sum(region.size_bytes for region in regions),
        page_bytes=min(region.page_bytes for region in regions),
        driver_version=words,
    )
    faults = {fault.name: fault for region in regions for fault in faults_of(region)}
    return {
        "vram_bytes_per_gpu": cost.vram_bytes_per_gpu,
        "kernel_bytes": cost.kernel_bytes,
        "page_table_bytes": cost.page_table_bytes,
        "faults": [
            {
                "severity": fault.severity,
                "name": fault.name,
                "what": fault.what,
                "remedy": fault.remedy,
            }
            for fault in faults.values()
        ],
    }


def registering_lines(told: dict[str, Any] | None) -> Iterator[str]:
    """Yield the same for people; nothing where nothing is registered."""
    if told is None:
        return
    yield (
        f"registering it takes {format_bytes(told['vram_bytes_per_gpu'])} of each GPU and "
        f"{format_bytes(told['kernel_bytes'])} of the kernel's memory (reckoned)"
    )
    for fault in told["faults"]:
        word = "note" if fault["severity"] == "info" else fault["severity"]
        yield f"{word}: {fault['what']}; {fault['remedy']}"
