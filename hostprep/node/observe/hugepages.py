"""Huge-page pools: one folder for each page size, per node and machine-wide."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hostprep.linux.procfs import parse_huge_folder
from hostprep.node.facts import HugePages, HugePageTotals

if TYPE_CHECKING:
    from hostprep.node.observe.host import HostRoot, Warn

__all__ = ["observe_huge_page_totals", "observe_node_huge_pages"]

MACHINE_FOLDER = "/sys/kernel/mm/hugepages"


def observe_node_huge_pages(host: HostRoot, folder: str, warn: Warn) -> tuple[HugePages, ...]:
    """Return the pools in a node's `hugepages` folder, smallest page first."""
    return tuple(
        HugePages(
            page_bytes=page_bytes,
            total=_count(host, f"{path}/nr_hugepages", warn),
            free=_count(host, f"{path}/free_hugepages", warn),
            surplus=_count(host, f"{path}/surplus_hugepages", warn),
        )
        for page_bytes, path in _folders(host, folder)
    )


def observe_huge_page_totals(host: HostRoot, warn: Warn) -> tuple[HugePageTotals, ...]:
    """Return the machine's pools, smallest page first."""
    return tuple(
        HugePageTotals(
            page_bytes=page_bytes,
            total=_count(host, f"{path}/nr_hugepages", warn),
            free=_count(host, f"{path}/free_hugepages", warn),
            reserved=_count(host, f"{path}/resv_hugepages", warn),
            surplus=_count(host, f"{path}/surplus_hugepages", warn),
            overcommit=_count(host, f"{path}/nr_overcommit_hugepages", warn),
        )
        for page_bytes, path in _folders(host, MACHINE_FOLDER)
    )


def _folders(host: HostRoot, folder: str) -> list[tuple[int, str]]:
    sizes = ((parse_huge_folder(name), name) for name in host.list_dir(folder))
    return sorted((size, f"{folder}/{name}") for size, name in sizes if size)


def _count(host: HostRoot, path: str, warn: Warn) -> int:
    value = host.read_int(path)
    if value is None or value < 0:
        warn(f"{path} cannot be read: taken as 0")
        return 0
    return value
