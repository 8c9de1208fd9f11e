"""Clearing away an attempt with a backing that turned out short."""

from __future__ import annotations

import os

from hostprep.linux.files import remove_file
from hostprep.node.apply.hugepages import HugePageControl
from hostprep.node.apply.mounts import remove_mount
from hostprep.node.ledger import Recorder, read_record
from hostprep.node.observe.pools import observe_pool
from hostprep.node.plan.actions import Shortfall
from hostprep.paths import PoolPaths

__all__ = ["roll_back"]


def roll_back(paths: PoolPaths, short: Shortfall, huge_pages: HugePageControl) -> None:
    """Remove the pool's unfinished regions of what was short, its mount if it is empty, its pages.

    Finished regions stay, and with them the pages under them: what is given back is never more
    than what this pool added and what lies free on the node. So does what other nodes have of it.
    """
    backing = short.backing
    for region in observe_pool(paths).regions:
        is_there = short.node_id is None or region.placement.node in (None, short.node_id)
        if region.backing is backing and not region.finished and is_there:
            remove_file(paths.part_of(region.mount_dir, region.name))
    pool = observe_pool(paths)
    used = {region.mount_dir for region in pool.regions}
    for mount in pool.mounts:
        mount_dir = os.path.basename(mount.path)
        is_hugetlb = mount.fs_type == "hugetlbfs"
        if mount_dir not in used and is_hugetlb == backing.is_hugetlb:
            remove_mount(paths, mount_dir)
    record = read_record(paths)
    if record is None or not backing.is_hugetlb:
        return
    recorder = Recorder(paths, record)
    for entry in record.taken:
        if entry.page_bytes == backing.page_bytes and short.node_id in (None, entry.node_id):
            free = huge_pages.free_pages(entry.node_id, entry.page_bytes)
            huge_pages.give_back(
                recorder,
                node_id=entry.node_id,
                page_bytes=entry.page_bytes,
                pages=min(entry.pages, free),
            )
