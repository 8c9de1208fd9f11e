"""What pages a region has."""

from __future__ import annotations

from enum import Enum
from mmap import PAGESIZE

KIB = 1 << 10
MIB = 1 << 20
GIB = 1 << 30


class Backing(str, Enum):
    """The four kinds of pages, as written in pools and handoffs."""

    HUGETLB_1GI = "HugeTLB1Gi"
    """hugetlbfs, 1 GiB pages: no page-table cost; hard to get once a node has been in use."""
    HUGETLB_2MI = "HugeTLB2Mi"
    """hugetlbfs, 2 MiB pages: the usual choice."""
    THP = "THP"
    """tmpfs mounted huge=always: 2 MiB pages that need no reservation."""
    BASE = "Base"
    """tmpfs, the CPU's base pages (4 KiB on x86): always to be had, dearer to attach."""

    def __str__(self) -> str:
        return self.value

    @property
    def is_hugetlb(self) -> bool:
        """Whether its pages come from a reserved pool (hugetlbfs)."""
        return self in (Backing.HUGETLB_1GI, Backing.HUGETLB_2MI)

    @property
    def page_bytes(self) -> int:
        """Size of one page, and the granule that region sizes are multiples of."""
        return _PAGE_BYTES[self]


_PAGE_BYTES = {
    Backing.HUGETLB_1GI: GIB,
    Backing.HUGETLB_2MI: 2 * MIB,
    Backing.THP: 2 * MIB,
    Backing.BASE: PAGESIZE,
}
