"""This machine's memory for one test run at a time, and left as it was found.

Counts of huge pages and mounts are compared before and after: whoever uses them holds the lock.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

from hostprep.node.apply.service import Node
from hostprep.node.observe.pools import observe_pools, read_mounts
from tests.support.kill_harness import huge_pages_total

__all__ = ["clean_node", "machine_lock"]


_LOCK = "/tmp/hostprep-machine.lock"
_HELD = "HOSTPREP_TEST_MACHINE_LOCK"
"""Set while it is held, for this process and those that it starts: they have it as well."""


@contextmanager
def machine_lock() -> Iterator[None]:
    """Be alone with the machine's huge pages. Whoever has to wait says so, and for whom."""
    if os.environ.get(_HELD):
        yield
        return
    with open(_LOCK, "a+", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            print(f"waiting for {_LOCK}, held by {file.read()}", file=sys.stderr, flush=True)
            fcntl.flock(file, fcntl.LOCK_EX)
        file.truncate(0)
        print(os.getpid(), *sys.argv, end="", file=file, flush=True)
        os.environ[_HELD] = "1"
        try:
            yield
        finally:
            del os.environ[_HELD]


@contextmanager
def clean_node() -> Iterator[Node]:
    """Yield this machine with a root of its own; while holding the lock.

    Releases whatever is left, and fails where pages or mounts remain.
    """
    before = huge_pages_total()
    folder = tempfile.mkdtemp(prefix="hostprep-test-", dir="/dev/shm")
    node = Node(f"{folder}/root")
    try:
        yield node
    finally:
        pools = [pool.name for pool in observe_pools(node.root)]
        if pools:
            node.release(pools, force=True)
        left = [entry.path for entry in read_mounts() if entry.path.startswith(folder)]
        shutil.rmtree(folder, ignore_errors=True)
    assert huge_pages_total() == before, "huge pages were left"
    assert not left, "mounts were left"
