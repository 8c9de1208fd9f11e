"""The turnstile's folder comes with the first pool, and goes with the last."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from hostprep.cuda.turnstile import Turnstile
from hostprep.linux.mounts import unmount
from hostprep.node.apply.service import Node
from hostprep.paths import TURNSTILE
from testbed.machine import POOL, clean_node, machine_lock, pool_of
from tests.kernel.cuda.users import as_user, expect

pytestmark = [
    pytest.mark.kernel,
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root: mounts"),
]


@pytest.fixture
def node() -> Iterator[Node]:
    with machine_lock(), clean_node() as node:
        Path(node.root).parent.chmod(0o755)
        yield node


def _take(root: str) -> None:
    ours = Turnstile(root, say=lambda text: expect(False, text))
    with ours.turn(30):
        pass


def test_prepare_makes_it_and_release_removes_it(node: Node) -> None:
    node.prepare([pool_of()])
    folder = Path(node.root, TURNSTILE, "node")
    assert folder.stat().st_mode & 0o7777 == 0o1777
    as_user(1000, lambda: _take(node.root))
    node.prepare([pool_of()])
    _take(node.root)
    (folder / "left by an engine").write_text("x")
    node.release([POOL])
    assert not os.path.lexists(node.root)


def test_a_folder_of_that_name_that_is_not_ours_stays(node: Node) -> None:
    node.prepare([pool_of()])
    folder = Path(node.root, TURNSTILE)
    shutil.rmtree(folder / "node")
    unmount(str(folder))
    (folder / "precious").write_text("not yours")
    node.release([POOL])
    assert (folder / "precious").read_text() == "not yours"


def test_a_link_in_its_place_is_not_followed(node: Node, tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("not yours")
    node.prepare([pool_of()])
    folder = Path(node.root, TURNSTILE)
    shutil.rmtree(folder / "node")
    (folder / "node").symlink_to(tmp_path)
    node.prepare([pool_of()])
    assert os.listdir(tmp_path) == ["precious"]
    node.release([POOL])
    assert (tmp_path / "precious").exists()
    assert not os.path.lexists(node.root)
