"""Pools of base pages: they touch no huge pages, so that nobody has to wait for the machine."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

from hostprep.node.apply.service import Node
from tests.support.pools import POOL, pool_of

__all__ = ["base_pool"]


@contextmanager
def base_pool(*, regions: int, mib: int) -> Iterator[str]:
    """Yield the root of a prepared pool, which is released afterwards."""
    folder = tempfile.mkdtemp(prefix="hostprep-test-", dir="/dev/shm")
    node = Node(f"{folder}/root")
    try:
        node.prepare([pool_of(regions=regions, mib=mib)])
        yield node.root
    finally:
        node.release([POOL], force=True)
        shutil.rmtree(folder, ignore_errors=True)
