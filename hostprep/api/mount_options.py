"""The options of a pool's own mounts: the agent and the boot script must agree on them."""

from __future__ import annotations

from hostprep.backing import Backing

__all__ = ["MOUNT_FLAGS", "MOUNT_SOURCE", "mount_options"]

MOUNT_SOURCE = "hostprep"
"""What the mount table calls our mounts."""
MOUNT_FLAGS = ("nosuid", "nodev", "noexec")
"""Flags of every mount of ours, as mount(8) names them."""


def mount_options(
    backing: Backing,
    *,
    gid: int | None,
    size_bytes: int = 0,
    noswap: bool = False,
    large_folios: bool = False,
) -> str:
    """Return the data string of mount(2) for a pool's memory folder.

    `size_bytes`, `noswap` and `large_folios` concern tmpfs only: hugetlbfs is bounded by its
    pages and never swapped. The folder's mode lets the pool's group in, and lets nobody make
    files of their own.
    """
    options = [f"mode={'0750' if gid is not None else '0755'}"]
    if gid is not None:
        options.append(f"gid={gid}")
    if backing.is_hugetlb:
        return ",".join([*options, f"pagesize={backing.page_bytes}"])
    options.append(f"size={size_bytes}")
    if backing is Backing.THP:
        options.append("huge=always")
    elif large_folios:
        # Not a THP mount (that one says always): base pages in the largest pieces that lie free.
        options.append("huge=within_size")
    if noswap:
        options.append("noswap")
    return ",".join(options)
