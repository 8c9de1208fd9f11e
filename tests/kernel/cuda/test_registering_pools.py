"""Registering what a pool hands out, attached by name: huge pages and base ones."""

from __future__ import annotations

import os

import pytest

import hostprep
from hostprep.backing import MIB, Backing
from hostprep.cuda.board import RankBoard, board_path
from hostprep.register import Registration, register
from testbed.machine import POOL, clean_node, machine_lock, pool_of
from testbed.standin.children import Scene, in_child
from tests.kernel.cuda.parts import LONG_S, ONE_MIB

pytestmark = [
    pytest.mark.kernel,
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root: huge pages and mounts"),
]


@in_child()
def test_a_region_of_base_pages(scene: Scene) -> None:
    assert _outcome(scene, Backing.BASE) == "Registered"
    assert _sizes(scene) == [MIB] * 8


@in_child()
def test_chunks_end_inside_huge_pages_too(scene: Scene) -> None:
    """The driver pins base pages: else a chunk of a pool in pages of 1 GiB would be as large."""
    assert _outcome(scene, Backing.HUGETLB_2MI) == "Registered"
    assert _sizes(scene) == [MIB] * 8


@in_child(fail="register:huge:801")
def test_the_standin_tells_huge_pages_from_base_ones(scene: Scene) -> None:
    scene.context()
    Registration(scene.attachment(), policy=ONE_MIB).run().close()
    assert _outcome(scene, Backing.HUGETLB_2MI) == "NotSupported"


def _outcome(scene: Scene, backing: Backing) -> str:
    """Attach to a pool of 8 MiB and register it as an engine does; return how that went.

    Nothing is asserted before the pool is released.
    """
    scene.context()
    with machine_lock(), clean_node() as node:
        node.prepare([pool_of(backing=backing)])
        with hostprep.attach(POOL, root=node.root) as memory:
            board = RankBoard.open(board_path(memory), generation=memory.lease_id, world=1, rank=0)
            with register(memory, board=board, policy=ONE_MIB) as registration:
                ended = registration.wait(LONG_S)
                state, error = registration.state, registration.error
                said = [rank.slot.state for rank in board.read().ranks]
                memory.buffer[:4] = b"used"
            board.close()
    assert ended
    assert said == ["Failed" if error else "Ready"]
    assert sorted(scene.unregistered()) == sorted(scene.registered())
    return error.reason if error else state


def _sizes(scene: Scene) -> list[int]:
    return [args[1] for _, args, _ in scene.calls("register")]
