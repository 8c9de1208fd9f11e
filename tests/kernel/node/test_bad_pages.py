"""Memory goes bad: the walk names the page. userfaultfd's poison makes one without hardware."""

from __future__ import annotations

import contextlib
import ctypes
import io
import os
import platform
import subprocess
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hostprep.agent.messages import Done, ReconcileRequest, ReconcileResult, decode
from hostprep.agent.verification import Verification, mark_bad_regions, verify_node
from hostprep.agent.worker import Worker
from hostprep.api.pool_spec import PoolSpec
from hostprep.backing import MIB, Backing
from hostprep.client.attach import attach
from hostprep.client.handoff import Region, bad_pages, open_region, read_handoff, walk_region
from hostprep.client.sidecar import mark_bad, read_bad_mark, read_bad_size
from hostprep.errors import NotReadyError
from hostprep.linux.files import closing_fd
from hostprep.linux.memory import address_of, explain, map_shared
from hostprep.node.apply.service import Node
from hostprep.paths import PoolPaths
from testbed.machine import POOL, pool_of
from testbed.processes import wait_for
from tests.kernel.worker_process import wanted

pytestmark = pytest.mark.kernel

_SYSCALL = {"x86_64": 323, "aarch64": 282}
# linux/userfaultfd.h
_API = 0xC018AA3F
_REGISTER = 0xC020AA00
_POISON = 0xC020AA08
_FEATURE_POISON = 1 << 14
_MODE_MISSING = 1


@pytest.mark.parametrize("backing", [Backing.BASE, Backing.HUGETLB_2MI])
def test_a_poisoned_page_is_named(node: Node, backing: Backing) -> None:
    """UFFDIO_POISON (Linux 6.6) makes the kernel answer as it does for a bad page."""
    node.prepare([pool_of(mib=16, backing=backing)])
    paths = PoolPaths(node.root, POOL)
    (region,) = read_handoff(paths).regions
    fd = open_region(paths, region, writable=True)
    with map_shared(fd, region.size_bytes) as mapping:
        address = address_of(mapping)
        uffd = _poison(address, region.size_bytes, 6 * MIB, region.page_bytes)
        assert list(bad_pages(address, region.size_bytes, region.page_bytes)) == [6 * MIB]
        os.close(uffd)
    os.close(fd)


def _poison(address: int, size_bytes: int, offset: int, page_bytes: int) -> int:
    libc = ctypes.CDLL(None, use_errno=True)
    uffd = libc.syscall(_SYSCALL[platform.machine()], os.O_CLOEXEC)
    assert uffd >= 0, os.strerror(ctypes.get_errno())
    for request, words in (
        (_API, (0xAA, _FEATURE_POISON, 0)),
        (_REGISTER, (address, size_bytes, _MODE_MISSING, 0)),
        (_POISON, (address + offset, page_bytes, 0, 0)),
    ):
        argument = (ctypes.c_uint64 * len(words))(*words)
        result = libc.ioctl(uffd, ctypes.c_ulong(request), argument)
        assert result == 0, os.strerror(ctypes.get_errno())
    return int(uffd)


def test_a_bad_page_is_told_from_other_trouble() -> None:
    assert explain(133, "x").reason == "PoisonedPage"
    assert isinstance(explain(133, "x"), NotReadyError)
    assert explain(14, "x").reason == "OutOfPages"
    assert explain(22, "x").reason == "KernelTooOld"
    assert explain(12, "x").reason == "OutOfMemory"


def test_a_walk_in_several_windows_names_the_offset_in_the_region(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Page tables go with a mapping only: a large region is walked window by window."""
    node.prepare([pool_of(mib=16)])
    (region,) = read_handoff(PoolPaths(node.root, POOL)).regions
    seen: list[int] = []

    def second_of_each(_address: int, size_bytes: int, page_bytes: int) -> list[int]:
        seen.append(size_bytes)
        return [page_bytes] if len(seen) == 3 else []

    monkeypatch.setattr("hostprep.client.handoff._WINDOW_BYTES", 6 * MIB)
    monkeypatch.setattr("hostprep.client.handoff.bad_pages", second_of_each)
    with (
        closing_fd(open_region(PoolPaths(node.root, POOL), region, writable=False)) as fd,
        pytest.raises(NotReadyError, match=f"offset {12 * MIB + region.page_bytes:#x}"),
    ):
        walk_region(region, fd)
    assert seen == [6 * MIB, 6 * MIB, 4 * MIB]


class _Memory:
    """What the kernel would say of bad memory, in whose place a test speaks."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.corrupted_bytes = 0
        self.bad: set[str] = set()
        self.walks = 0
        monkeypatch.setattr("hostprep.agent.worker.verify_node", self._look)
        monkeypatch.setattr("hostprep.agent.verification.walk_region", self._walk)

    def _look(self, root: str, **options: Any) -> Verification:
        seen = verify_node(root, **options)
        memory = replace(seen.facts.memory, corrupted_bytes=self.corrupted_bytes)
        return replace(seen, facts=replace(seen.facts, memory=memory))

    def _walk(self, region: Region, _fd: int) -> None:
        self.walks += 1
        if region.name in self.bad:
            self.bad.remove(region.name)  # the next file has other pages
            raise NotReadyError(f"region {region.name} has 1 bad page", reason="PoisonedPage")


class _Rounds:
    """A worker in this process, asked round by round."""

    def __init__(self, node: Node, *specs: PoolSpec) -> None:
        self._output = io.BytesIO()
        self._worker = Worker(node, self._output)
        self._wanted = wanted(*specs)
        self._number = 0
        self.done = Done()
        """How the last work ended."""

    def one(self) -> ReconcileResult:
        """Return the answer, once all that it began has ended."""
        self._number += 1
        begin = self._output.tell()
        self._worker.reconcile(ReconcileRequest(number=self._number, pools=self._wanted))
        answer = decode(self._said(begin)[0])
        assert isinstance(answer, ReconcileResult)
        if answer.busy:
            wait_for(lambda: isinstance(decode(self._said(begin)[-1]), Done))
            done = decode(self._said(begin)[-1])
            assert isinstance(done, Done)
            self.done = done
        return answer

    def _said(self, begin: int) -> list[bytes]:
        return self._output.getvalue()[begin:].splitlines()


def _states(answer: ReconcileResult) -> list[str]:
    return [region.state for pool in answer.observation.pools for region in pool.regions]


def test_the_rounds_find_a_bad_page_and_replace_that_region_alone(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory, rounds = _Memory(monkeypatch), _Rounds(node, pool_of(regions=2))
    rounds.one()
    before = read_handoff(PoolPaths(node.root, POOL)).regions
    rounds.one()
    assert memory.walks == 0

    memory.corrupted_bytes, memory.bad = 4096, {"node0-1"}
    assert rounds.one().busy

    after = read_handoff(PoolPaths(node.root, POOL)).regions
    assert [a.st_ino == b.st_ino for a, b in zip(before, after, strict=True)] == [True, False]
    answer = rounds.one()
    assert (answer.busy, _states(answer), memory.walks) == (False, ["Free", "Free"], 2)


def test_a_bad_page_under_a_lease_is_shown_and_its_region_replaced_after_the_release(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory, rounds = _Memory(monkeypatch), _Rounds(node, pool_of(regions=2))
    rounds.one()
    with attach(POOL, region="node0-1", root=node.root) as engine:
        memory.corrupted_bytes, memory.bad = 4096, {"node0-1"}
        rounds.one()
        answer = rounds.one()
        assert _states(answer) == ["Free", "Damaged"]
        damaged = answer.observation.pools[0].regions[1]
        assert "has 1 bad page" in damaged.message
        assert str(os.getpid()) in damaged.holder
        engine.buffer[:1] = b"x"
        served = [region.name for region in read_handoff(PoolPaths(node.root, POOL)).regions]
        assert served == ["node0-0"]
    rounds.one()
    assert _states(rounds.one()) == ["Free", "Free"]


def test_a_mark_that_cannot_be_written_is_tried_again_and_stops_no_other(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory, rounds = _Memory(monkeypatch), _Rounds(node, pool_of(regions=2))
    rounds.one()
    paths = PoolPaths(node.root, POOL)
    before = read_handoff(paths).regions
    memory.corrupted_bytes = 4096
    with _read_only(paths.state_of("node0-0")):
        memory.bad = {"node0-0", "node0-1"}
        rounds.one()
        failure = rounds.done.error
        assert failure is not None
        assert (failure.reason, "read-only" in failure.message) == ("NotMarked", True)
        assert _still_served(paths, before) == ["node0-0"]
    memory.bad = {"node0-0"}
    rounds.one()
    assert rounds.done.error is None
    assert _still_served(paths, before) == []
    assert len(read_handoff(paths).regions) == 2
    memory.walks = 0
    rounds.one()
    assert memory.walks == 0


def _still_served(paths: PoolPaths, before: tuple[Region, ...]) -> list[str]:
    inodes = {region.st_ino for region in read_handoff(paths).regions}
    return [region.name for region in before if region.st_ino in inodes]


@contextlib.contextmanager
def _read_only(folder: str) -> Iterator[None]:
    subprocess.run(["mount", "--bind", folder, folder], check=True)
    try:
        subprocess.run(["mount", "-o", "remount,bind,ro", folder], check=True)
        yield
    finally:
        subprocess.run(["umount", folder], check=True)


def test_a_handoff_that_cannot_be_read_is_walked_again_and_none_is_no_failure(node: Node) -> None:
    node.prepare([pool_of(), pool_of(name="batch")])
    handoff = Path(PoolPaths(node.root, POOL).handoff)
    text = handoff.read_text()
    handoff.write_text("{")
    failures = mark_bad_regions(node.root, stop=threading.Event())
    assert [pool for pool, _ in failures] == [POOL]
    handoff.unlink()
    assert mark_bad_regions(node.root, stop=threading.Event()) == ()
    handoff.write_text(text)


@pytest.mark.parametrize(
    ("text", "why", "size_bytes"),
    [
        ("has a bad page\n4096\n", "has a bad page", 4096),
        ("", "a bad page", 0),
        ("only words", "only words", 0),
        ("words\n-1\n", "words", 0),
        ("words\n" + "9" * 30, "words", 0),
        ("\xff\x00" * 9000, "a bad page", 0),
    ],
)
def test_a_mark_is_believed_as_far_as_it_makes_sense(
    tmp_path: Path, text: str, why: str, size_bytes: int
) -> None:
    """The pool's group may write it."""
    paths = PoolPaths(str(tmp_path), POOL)
    mark = Path(paths.bad_mark("node0-0"))
    mark.parent.mkdir(parents=True)
    mark.write_bytes(text.encode("latin-1"))
    assert read_bad_mark(paths, "node0-0") == why
    assert read_bad_size(paths, "node0-0") == size_bytes


def test_a_mark_says_what_was_wrong_in_one_line(tmp_path: Path) -> None:
    paths = PoolPaths(str(tmp_path), POOL)
    os.makedirs(paths.state_of("node0-0"))
    assert read_bad_mark(paths, "node0-0") is None
    mark_bad(paths, "node0-0", "two\nlines", size_bytes=1 << 40)
    assert read_bad_mark(paths, "node0-0") == "two lines"
    assert read_bad_size(paths, "node0-0") == 1 << 40
