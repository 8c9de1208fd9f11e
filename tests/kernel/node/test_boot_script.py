"""The boot script on this machine's own kernel, and the agent that comes after it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from hostprep.api.pool_resource import spec_from_options
from hostprep.api.pool_spec import mount_options
from hostprep.backing import MIB, Backing
from hostprep.linux.mounts import detach, mount, unmount
from hostprep.node.apply.service import Node
from hostprep.node.boot import boot_script
from hostprep.node.facts import Mount
from hostprep.node.observe.host import read_mounts
from hostprep.node.plan.actions import MountMemory, ReserveHugePages
from testbed.machine import machine_lock
from tests.support.boot_runs import SHELLS

pytestmark = pytest.mark.kernel

_PAGES = 32
_NODES = Path("/sys/devices/system/node")


@dataclass
class Booting:
    """This machine before an agent, for a pool of 64 MiB in pages of 2 MiB."""

    root: str
    shell: tuple[str, ...]
    pages_before: dict[int, int]

    spec = spec_from_options(name="kv", size="64Mi", backings="HugeTLB2Mi", regions="Single")

    def run(self) -> dict[str, Any]:
        script = boot_script(self.spec, root=self.root)
        shell = shutil.which(self.shell[0])
        assert shell is not None, f"{self.shell[0]} is not installed"
        subprocess.run([shell, *self.shell[1:]], input=script, text=True, timeout=60, check=True)
        document: dict[str, Any] = json.loads(Path(self.root, "kv/boot.json").read_text())
        return document

    def mounts(self) -> list[Mount]:
        return [entry for entry in read_mounts() if entry.path == f"{self.root}/kv/mem"]


def _pool_file(node: int, name: str = "nr_hugepages") -> Path:
    return _NODES / f"node{node}/hugepages/hugepages-2048kB/{name}"


def _pages() -> dict[int, int]:
    """Return the pages of each node's pool that are there for good."""
    nodes = [int(path.name[4:]) for path in _NODES.glob("node[0-9]*")]
    return {
        node: int(_pool_file(node).read_text())
        - int(_pool_file(node, "surplus_hugepages").read_text())
        for node in nodes
    }


@pytest.fixture(params=SHELLS, ids=lambda shell: shell[0])
def booting(request: pytest.FixtureRequest) -> Iterator[Booting]:
    root = tempfile.mkdtemp(prefix="hostprep-boot-", dir="/tmp")
    with machine_lock():  # nobody else counts or changes pages meanwhile
        before = _pages()
        yield Booting(root, request.param, before)
        for path in (f"{root}/kv/mem", root):
            if os.path.ismount(path):
                detach(path)
        for node, pages in before.items():
            _pool_file(node).write_text(str(pages))
        after = _pages()
    shutil.rmtree(root, ignore_errors=True)  # release removes an empty root itself
    assert after == before


def test_pages_are_reserved_and_mounted_for_real(booting: Booting) -> None:
    result = booting.run()
    assert (result["complete"], result["mounted"]) == (True, True)
    assert result["boot_id"] == Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    free = sum(int(_pool_file(node, "free_hugepages").read_text()) for node in _pages())
    assert free >= _PAGES
    path = f"{booting.root}/kv/mem/probe"
    fd = os.open(path, os.O_RDWR | os.O_CREAT)
    os.posix_fallocate(fd, 0, _PAGES * 2 * MIB)
    assert os.fstat(fd).st_blocks * 512 == _PAGES * 2 * MIB
    _pool_file(0).write_text(str(_pages()[0] + 4))  # free for anybody, but not by this mount
    with pytest.raises(OSError, match="No space left"):
        os.posix_fallocate(fd, 0, (_PAGES + 1) * 2 * MIB)
    os.close(fd)
    os.remove(path)


def test_running_it_again_adds_neither_pages_nor_mounts(booting: Booting) -> None:
    first = booting.run()
    pages = _pages()
    assert booting.run() == first
    assert _pages() == pages
    assert len(booting.mounts()) == 1
    assert os.path.ismount(booting.root)


def test_the_mount_is_the_one_that_the_agent_would_make(booting: Booting) -> None:
    booting.run()
    (ours,) = booting.mounts()
    target = f"{booting.root}/agents"
    os.mkdir(target)
    mount(
        "hugetlbfs",
        target,
        mount_options(Backing.HUGETLB_2MI, gid=None, size_bytes=_PAGES * 2 * MIB),
    )
    try:
        (agents,) = [entry for entry in read_mounts() if entry.path == target]
    finally:
        unmount(target)
    assert (ours.fs_type, ours.source, ours.options) == (
        agents.fs_type,
        agents.source,
        agents.options,
    )


def test_the_agent_adopts_it_and_release_gives_it_back(booting: Booting) -> None:
    booting.run()
    reserved = _pages()
    node = Node(booting.root)
    planned = node.plan([booting.spec]).actions
    assert not any(isinstance(action, ReserveHugePages) for action in planned)
    assert [a.mount_dir for a in planned if isinstance(a, MountMemory)] == ["mem"]
    node.prepare([booting.spec])
    assert _pages() == reserved
    booting.run()
    assert _pages() == reserved, "the script counts the agent's pages as missing"
    node.release(["kv"])
    assert _pages() == booting.pages_before
    assert booting.mounts() == []
