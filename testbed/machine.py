"""This machine's memory for one test run at a time, left as it was found; and small pools on it.

Counts of huge pages and mounts are compared before and after: whoever uses them holds the lock.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from hostprep.api.pool_spec import PoolSpec, RegionLayout
from hostprep.backing import MIB, Backing
from hostprep.errors import HostprepError
from hostprep.linux.mounts import unmount
from hostprep.node.apply.service import Node
from hostprep.node.observe.host import read_mounts
from hostprep.node.observe.pools import observe_pools

_LOCK = "/tmp/hostprep-machine.lock"
_HELD = "HOSTPREP_TEST_MACHINE_LOCK"
"""Set while it is held, for this process and those that it starts: they have it as well."""
_ROOT_PREFIX = "hostprep-test-node-"
"""Of folders of `clean_node` in /dev/shm: whoever holds the lock knows that their run has ended."""


def _find_old_python() -> str | None:
    named = ("python3.9", *map(str, Path.home().glob(".pyenv/versions/3.9*/bin/python")))
    for found in filter(None, map(shutil.which, named)):
        # pyenv's shim of that name is there for versions that are not chosen, and fails.
        if not subprocess.run([found, "-c", ""], capture_output=True, check=False).returncode:
            return found
    return None


OLD_PYTHON = _find_old_python()
"""The oldest Python that engines bring, where this machine has one that runs."""


def huge_pages_total() -> int:
    """Return this machine's number of 2 MiB pages."""
    with open("/sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages", encoding="ascii") as file:
        return int(file.read())


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
            if os.geteuid() != 0:
                yield
                return
            _release_what_killed_runs_left()
            with _without_free_huge_pages():
                yield
        finally:
            del os.environ[_HELD]


def _release_what_killed_runs_left() -> None:
    for folder in Path("/dev/shm").glob(f"{_ROOT_PREFIX}*"):
        print(f"releasing {folder}, left by a run that was killed", file=sys.stderr, flush=True)
        node = Node(f"{folder}/root")
        pools = [pool.name for pool in observe_pools(node.root)]
        try:
            if pools:
                node.release(pools, force=True)
        except HostprepError as error:  # still in use: the next run tries again
            print(f"{folder} stays: {error}", file=sys.stderr, flush=True)
            continue
        # What a test had damaged on purpose is no pool any more, and its mounts are left.
        mounts = [entry.path for entry in read_mounts() if entry.path.startswith(f"{folder}/")]
        for path in sorted(mounts, reverse=True):
            with suppress(HostprepError):
                unmount(path)
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _without_free_huge_pages() -> Iterator[None]:
    """Give free 2 MiB pages to the kernel, and take as many back afterwards.

    A plan takes free pages before it adds any, and tests count what is added: with a few that an
    administrator reserved, or that a killed process left, they would count less.
    """
    taken: dict[Path, int] = {}
    try:
        for folder in _HUGE_PAGE_POOLS:
            if (pages := _unused_pages(folder)) > 0:
                taken[folder] = _take_pages(folder, pages)
        yield
    finally:
        for folder, pages in taken.items():
            _add_pages(folder, pages)


_HUGE_PAGE_POOLS = sorted(
    Path("/sys/devices/system/node").glob("node[0-9]*/hugepages/hugepages-2048kB")
)


def _unused_pages(folder: Path) -> int:
    """Return a node's free pages, less those that a mapping has reserved on any node."""
    reserved = Path("/sys/kernel/mm/hugepages/hugepages-2048kB/resv_hugepages").read_text()
    return int((folder / "free_hugepages").read_text()) - int(reserved)


def _take_pages(folder: Path, pages: int) -> int:
    """Take pages away; return how many went: others, such as surplus ones, may be going already."""
    before = int((folder / "nr_hugepages").read_text())
    with suppress(OSError):  # EINVAL: fewer are left than are to be taken
        _add_pages(folder, -pages)
    after = int((folder / "nr_hugepages").read_text())
    return min(pages, max(0, before - after))


def _add_pages(folder: Path, pages: int) -> None:
    before = int((folder / "nr_hugepages").read_text())
    surplus = int((folder / "surplus_hugepages").read_text())
    (folder / "nr_hugepages").write_text(str(before - surplus + pages))


@contextmanager
def clean_node() -> Iterator[Node]:
    """Yield this machine with a root of its own, alone with its huge pages.

    Releases whatever is left, and fails where pages or mounts remain.
    """
    with machine_lock():
        before = huge_pages_total()
        folder = tempfile.mkdtemp(prefix=_ROOT_PREFIX, dir="/dev/shm")
        node = Node(f"{folder}/root")
        try:
            yield node
        finally:
            _tidy(node)
            left = [entry.path for entry in read_mounts() if entry.path.startswith(folder)]
            shutil.rmtree(folder, ignore_errors=True)
        assert huge_pages_total() == before, "huge pages were left"
        assert not left, "mounts were left"


def _tidy(node: Node) -> None:
    pools = [pool.name for pool in observe_pools(node.root)]
    if pools:
        node.release(pools, force=True)
    elif os.path.isdir(node.root):  # a worker that was stopped before it made a pool
        with suppress(HostprepError):  # some tests make a root that nobody can use
            node.clear_if_empty(wait_timeout_s=10)
    shutil.rmtree(node.root, ignore_errors=True)
    if os.path.ismount(node.root):  # kept for files that are not ours, or that a test left
        unmount(node.root)


POOL = "kv"


def pool_of(
    *, regions: int = 1, mib: int = 8, backing: Backing = Backing.BASE, **changes: Any
) -> PoolSpec:
    """Return a pool of that many regions of `mib` MiB each."""
    fields: dict[str, Any] = {
        "name": POOL,
        "size_bytes": regions * mib * MIB,
        "backings": (backing,),
        "layout": RegionLayout.COUNT,
        "region_count": regions,
    }
    return PoolSpec(**(fields | changes))


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
