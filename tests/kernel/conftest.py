"""Real memory for the kernel tier, and the machine left as it was found."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from hostprep.apply.service import Node
from hostprep.observe.pools import observe_pools, read_mounts
from tests.support.kill_harness import huge_pages_total


@pytest.fixture(scope="session")
def machine() -> Iterator[None]:
    """The machine's huge pages for this session alone: counts are compared before and after."""
    with open("/tmp/hostprep-machine.lock", "w", encoding="ascii") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@pytest.fixture
def node(machine: None) -> Iterator[Node]:
    """This machine with a root of its own. Fails the test that leaves pages or mounts behind."""
    if os.geteuid() != 0:
        pytest.skip("needs root: huge pages and mounts")
    before = huge_pages_total()
    folder = tempfile.mkdtemp(prefix="hostprep-test-", dir="/dev/shm")
    node = Node(f"{folder}/root")
    try:
        yield node
        pools = [pool.name for pool in observe_pools(node.root)]
        if pools:
            node.release(pools, force=True)
        assert huge_pages_total() == before, "huge pages were left"
        left = [entry.path for entry in read_mounts() if entry.path.startswith(folder)]
        assert not left, "mounts were left"
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def root(node: Node) -> Path:
    """The node's root folder; made by the first prepare."""
    return Path(node.root)
