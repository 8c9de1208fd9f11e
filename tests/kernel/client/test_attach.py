"""Attaching as an engine does: what it gets, and what it is never given."""

from __future__ import annotations

import ctypes
import os
import sys
from typing import Any

import pytest

import hostprep
from hostprep.backing import MIB, Backing
from hostprep.client.handoff import read_handoff
from hostprep.errors import BadInputError, BusyError, HostprepError, NotReadyError
from hostprep.linux.memory import address_of
from hostprep.node.apply.service import Node
from hostprep.paths import PoolPaths
from testbed.machine import POOL, pool_of
from tests.support.processes import forked, python, wait_until
from tests.support.processes import hostprep as run_hostprep

pytestmark = pytest.mark.kernel

BACKINGS = (Backing.BASE, Backing.THP, Backing.HUGETLB_2MI)


@pytest.mark.parametrize("backing", BACKINGS)
def test_an_attachment_is_zero_writable_and_of_the_backing(node: Node, backing: Backing) -> None:
    node.prepare([pool_of(backing=backing)])

    with hostprep.attach(POOL, size_bytes=5 * MIB, root=node.root) as memory:
        assert memory.size_bytes == 8 * MIB
        assert memory.page_bytes == backing.page_bytes
        assert memory.numa_node == 0
        assert memory.generation == 1
        assert memory.address % memory.page_bytes == 0
        assert memory.buffer.tobytes() == bytes(8 * MIB)
        ctypes.memset(memory.address, 0x5A, 16)
        assert memory.buffer[:16].tobytes() == b"\x5a" * 16
        assert address_of(memory.buffer) == memory.address


def test_the_next_owner_sees_zeros(node: Node) -> None:
    node.prepare([pool_of()])
    with hostprep.attach(POOL, root=node.root) as memory:
        memory.buffer[:] = b"\xff" * memory.size_bytes

    with hostprep.attach(POOL, root=node.root) as memory:
        assert memory.buffer.tobytes() == bytes(memory.size_bytes)


def test_memory_that_outlives_the_interpreters_names_goes_without_a_word(node: Node) -> None:
    """As what torch's extensions hold: at the interpreter's very end `open` is gone before it."""
    node.prepare([pool_of()])
    # CPython lets go of what was added to `builtins` after it put back those of its very start,
    # among which `open` is not yet: pylifecycle.c, finalize_restore_builtins.
    rank = (sys.executable, "-c", "import builtins, hostprep; builtins.held = hostprep.join()")
    told = run_hostprep("exec", "--root", node.root, "--pool", POOL, "--", *rank)
    assert (told.returncode, told.stderr) == (0, "")
    with hostprep.attach(POOL, root=node.root, wait_timeout_s=5):
        pass


def test_the_next_owner_sees_zeros_after_a_kill(node: Node) -> None:
    node.prepare([pool_of()])
    with forked(lambda ready: _scribble(node, ready)):
        with pytest.raises(BusyError, match="leased"):
            hostprep.attach(POOL, root=node.root)

    with hostprep.attach(POOL, root=node.root, wait_timeout_s=5) as memory:
        assert memory.buffer.tobytes() == bytes(memory.size_bytes)


def _scribble(node: Node, ready: object) -> None:
    memory = hostprep.attach(POOL, root=node.root)
    memory.buffer[:] = b"\xff" * memory.size_bytes
    globals()["_held"] = memory
    assert callable(ready)
    ready()


def test_without_the_scrub_the_next_owner_would_see_the_bytes(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A test of the tests: they must be able to tell."""
    monkeypatch.setattr("hostprep.client.scrub.scrub_file", lambda *_, **__: None)
    node.prepare([pool_of()])
    with hostprep.attach(POOL, root=node.root) as memory:
        memory.buffer[:4] = b"leak"

    with hostprep.attach(POOL, root=node.root) as memory:
        assert memory.buffer[:4].tobytes() == b"leak"


def test_a_forked_child_keeps_the_region_from_being_scrubbed(node: Node) -> None:
    node.prepare([pool_of()])
    memory = hostprep.attach(POOL, root=node.root)
    with forked(lambda ready: ready()):
        memory.close()
        with pytest.raises(BusyError, match="leased"):
            hostprep.attach(POOL, root=node.root)
        assert _state(node) == "Leased"
    hostprep.attach(POOL, root=node.root, wait_timeout_s=5).close()


def test_an_orphaned_grandchild_keeps_the_region_from_being_scrubbed(node: Node) -> None:
    node.prepare([pool_of()])
    read_end, write_end = os.pipe()
    code = (
        "import hostprep, os, sys, time\n"
        f"m = hostprep.attach({POOL!r}, root={node.root!r})\n"
        "os.set_inheritable(m.fd, True)\n"
        "if os.fork() == 0:\n"
        "    if os.fork() == 0:\n"
        f"        os.write({write_end}, str(os.getpid()).encode())\n"
        "        os.execlp('sleep', 'sleep', '60')\n"
        "    os._exit(0)\n"
        "os.wait(); os._exit(0)\n"
    )
    import subprocess

    subprocess.run([sys.executable, "-c", code], pass_fds=[write_end], check=True, timeout=30)
    os.close(write_end)
    orphan = int(os.read(read_end, 20))
    os.close(read_end)
    try:
        with pytest.raises(BusyError):
            hostprep.attach(POOL, root=node.root)
    finally:
        os.kill(orphan, 9)
    hostprep.attach(POOL, root=node.root, wait_timeout_s=5).close()


def test_a_mapping_without_a_descriptor_keeps_the_region(node: Node) -> None:
    node.prepare([pool_of()])
    memory = hostprep.attach(POOL, root=node.root)
    view = memory.buffer[:4]
    memory.close()

    with pytest.raises(BusyError):
        hostprep.attach(POOL, root=node.root)
    assert view.tobytes() == bytes(4)
    view.release()
    hostprep.attach(POOL, root=node.root).close()


def test_a_writer_without_a_lease_keeps_the_region(node: Node) -> None:
    """As with engines that are given the path by their configuration."""
    node.prepare([pool_of()])
    with open(f"{node.root}/{POOL}/mem/node0-0", "r+b"):
        with pytest.raises(BusyError, match="without a lease"):
            hostprep.attach(POOL, root=node.root)
    hostprep.attach(POOL, root=node.root).close()


def test_a_process_that_joined_outlives_its_leader_and_keeps_the_region(node: Node) -> None:
    node.prepare([pool_of()])
    leader = hostprep.attach(POOL, root=node.root)
    leader.buffer[:3] = b"abc"

    def member(ready: object) -> None:
        joined = hostprep.join(POOL, lease_id=leader.lease_id, region="node0-0", root=node.root)
        assert joined.buffer[:3].tobytes() == b"abc"
        os.close(leader.fd)
        globals()["_held"] = joined
        assert callable(ready)
        ready()

    with forked(member):
        leader.close()
        with pytest.raises(BusyError):
            hostprep.attach(POOL, root=node.root)
    with hostprep.attach(POOL, root=node.root, wait_timeout_s=5) as memory:
        assert memory.buffer[:3].tobytes() == bytes(3)


def test_an_ended_lease_cannot_be_joined(node: Node) -> None:
    node.prepare([pool_of()])
    leader = hostprep.attach(POOL, root=node.root)
    leader.close()
    with pytest.raises(NotReadyError, match="has ended"):
        hostprep.join(POOL, lease_id=leader.lease_id, region="node0-0", root=node.root)
    with hostprep.attach(POOL, root=node.root):
        with pytest.raises(NotReadyError, match="has ended"):
            hostprep.join(POOL, lease_id=leader.lease_id, region="node0-0", root=node.root)


def test_a_rank_joins_by_descriptor(node: Node) -> None:
    node.prepare([pool_of()])
    with hostprep.attach(POOL, root=node.root) as leader:
        leader.buffer[:2] = b"hi"
        with hostprep.join(POOL, fd=os.dup(leader.fd), root=node.root) as rank:
            assert rank.buffer[:2].tobytes() == b"hi"


def test_a_batch_is_all_or_nothing(node: Node) -> None:
    node.prepare([pool_of(regions=3)])
    with hostprep.attach(POOL, root=node.root):
        with pytest.raises(BusyError):
            hostprep.attach_many(POOL, count=3, root=node.root)
        batch = hostprep.attach_many(POOL, count=2, root=node.root)
        assert len({memory.path for memory in batch}) == 2
        assert len({memory.lease_id for memory in batch}) == 1
        for memory in batch:
            memory.close()


def test_a_claim_that_fails_leaves_clean_regions_clean(node: Node) -> None:
    node.prepare([pool_of(regions=2)])
    with hostprep.attach(POOL, region="node0-0", root=node.root):
        with pytest.raises(BusyError):
            hostprep.attach_many(POOL, count=2, root=node.root)
    states = {region["name"]: region["clean"] for region in _regions(node)}
    assert states["node0-1"] is True


def test_the_owner_gets_its_bytes_back_and_nobody_else(node: Node) -> None:
    node.prepare([pool_of()])
    mine = hostprep.Owner("a-secret-of-the-engine", {"model": "m", "kv_dtype": "bf16"})
    other = hostprep.Owner("another-engines-secret", {"model": "m", "kv_dtype": "bf16"})
    changed = hostprep.Owner("a-secret-of-the-engine", {"model": "m", "kv_dtype": "fp8"})
    with hostprep.attach(POOL, owner=mine, root=node.root) as memory:
        assert not memory.contents_kept
        memory.buffer[:4] = b"mine"
    node.prepare([pool_of()])  # which scrubs what nobody may come back for

    with hostprep.attach(POOL, owner=mine, root=node.root) as memory:
        assert memory.contents_kept
        assert memory.buffer[:4].tobytes() == b"mine"
    with hostprep.attach(POOL, owner=changed, root=node.root) as memory:
        assert not memory.contents_kept
        assert memory.discarded == "kv_dtype is 'fp8', the region's is 'bf16'"
        assert memory.buffer[:4].tobytes() == bytes(4)
        memory.buffer[:4] = b"mine"
    with hostprep.attach(POOL, owner=other, root=node.root) as memory:
        assert not memory.contents_kept
        assert memory.buffer[:4].tobytes() == bytes(4)


def test_read_only_sees_the_writers_bytes_and_cannot_write(node: Node) -> None:
    node.prepare([pool_of()])
    with hostprep.attach(POOL, root=node.root) as writer:
        writer.buffer[:3] = b"abc"
        with hostprep.attach(POOL, region="node0-0", read_only=True, root=node.root) as reader:
            assert reader.buffer[:3].tobytes() == b"abc"
            assert reader.buffer.readonly
            assert reader.address % reader.page_bytes == 0


@pytest.mark.parametrize("change", ["shrink", "swap", "punch", "remove", "link"])
def test_a_region_changed_after_publishing_is_refused(node: Node, change: str) -> None:
    node.prepare([pool_of()])
    path = f"{node.root}/{POOL}/mem/node0-0"
    if change == "shrink":
        os.truncate(path, 4 * MIB)
    elif change == "punch":
        with open(path, "r+b") as file:
            _punch(file.fileno())
    else:
        os.rename(path, f"{path}.away")
        if change == "swap":
            os.truncate(f"{path}.away", 0)  # the mount has room for one only
            with open(path, "wb") as file:
                file.write(bytes(8 * MIB))
        elif change == "link":
            os.symlink(f"{path}.away", path)

    with pytest.raises(HostprepError) as caught:
        hostprep.attach(POOL, root=node.root)
    assert caught.value.exit_code == 1
    verdict = run_hostprep("verify", POOL, "--root", node.root)
    assert verdict.returncode == 1
    assert "node0-0" in verdict.stdout + verdict.stderr
    if os.path.lexists(f"{path}.away"):
        os.unlink(f"{path}.away")
    if os.path.islink(path):
        os.unlink(path)

    node.prepare([pool_of()])
    with hostprep.attach(POOL, root=node.root) as memory:
        assert memory.buffer.tobytes() == bytes(8 * MIB)


def _punch(fd: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    keep_size_and_punch = 3
    assert libc.fallocate(fd, keep_size_and_punch, ctypes.c_long(MIB), ctypes.c_long(MIB)) == 0


def test_a_region_shrunk_between_verify_and_map_is_refused_not_mapped(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    node.prepare([pool_of()])
    from hostprep.client import claim as claims

    take_all = claims.take_all  # type: ignore[attr-defined]

    def shrink_then_take(*arguments: object, **options: object) -> object:
        taken = take_all(*arguments, **options)  # type: ignore[arg-type]
        os.truncate(f"{node.root}/{POOL}/mem/node0-0", 4096)
        return taken

    monkeypatch.setattr(claims, "take_all", shrink_then_take)
    with pytest.raises(NotReadyError, match="4096 bytes"):
        hostprep.attach(POOL, root=node.root)


def test_waiting_gets_the_region_when_its_holder_ends(node: Node) -> None:
    node.prepare([pool_of()])
    with forked(lambda ready: _scribble(node, ready)) as holder:
        with forked(lambda ready: _wait_and_say(node, ready)) as waiter:
            os.kill(holder, 9)
            wait_until(lambda: _holder(node) == waiter)


def _wait_and_say(node: Node, ready: object) -> None:
    assert callable(ready)
    ready()
    globals()["_held"] = hostprep.attach(POOL, root=node.root, wait_timeout_s=20)


def _holder(node: Node) -> int | None:
    region = _regions(node)[0]
    return region["holder"]["pid"] if region["holder"] else None


def _regions(node: Node) -> list[dict[str, Any]]:
    import json

    shown = run_hostprep("status", "-o", "json", "--root", node.root)
    return json.loads(shown.stdout)["pools"][0]["regions"]  # type: ignore[no-any-return]


def _state(node: Node) -> object:
    return _regions(node)[0]["state"]


def test_wait_returns_once_the_pool_is_prepared(node: Node) -> None:
    with pytest.raises(NotReadyError, match="not prepared|does not exist"):
        hostprep.wait(POOL, timeout_s=0.1, root=node.root)
    node.prepare([pool_of(regions=2)])
    assert len(hostprep.wait(POOL, timeout_s=1, root=node.root).regions) == 2
    with hostprep.attach(POOL, root=node.root):
        hostprep.wait(POOL, timeout_s=1, count=2, root=node.root)
    with pytest.raises(NotReadyError, match="3 are needed"):
        hostprep.wait(POOL, timeout_s=0.1, count=3, root=node.root)


def test_attaching_imports_nothing_beyond_the_standard_library(node: Node) -> None:
    node.prepare([pool_of()])
    code = (
        "import sys, hostprep\n"
        f"hostprep.attach({POOL!r}, root={node.root!r}).close()\n"
        # The interpreter imports sitecustomize by itself, and Debian's has one.
        "own = {'hostprep', '__main__', '__mp_main__', 'sitecustomize'}\n"
        "print(sorted({m.split('.')[0] for m in sys.modules} - set(sys.stdlib_module_names) - own"
        " - {n for n in sys.modules if n.startswith(('_distutils', '__editable'))}))\n"
    )
    done = python("-I", "-c", code)
    assert done.stdout.strip() == "[]", done.stderr


def test_a_handoff_of_another_boot_is_not_ready_and_prepare_replaces_it(node: Node) -> None:
    node.prepare([pool_of()])
    paths = PoolPaths(node.root, POOL)
    boot = read_handoff(paths).boot_id
    for path in (paths.handoff, paths.ledger):
        with open(path, encoding="utf-8") as file:
            text = file.read()
        with open(path, "w", encoding="utf-8") as file:
            file.write(text.replace(boot, "00000000-0000-0000-0000-000000000000"))
    with pytest.raises(NotReadyError, match="another boot"):
        hostprep.attach(POOL, root=node.root)

    node.prepare([pool_of()])
    assert read_handoff(paths).boot_id == boot


def test_bad_owner_and_bad_claims_are_bad_input() -> None:
    with pytest.raises(BadInputError, match="16 characters"):
        hostprep.Owner("short")
    with pytest.raises(BadInputError):
        hostprep.attach("a/b")
    with pytest.raises(BadInputError):
        hostprep.attach_many("kv", count=0)
