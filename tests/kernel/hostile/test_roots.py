"""A root below a folder that others may write to could be replaced under root's hands."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from hostprep.errors import BadInputError
from hostprep.node.apply.service import Node
from testbed.machine import pool_of
from tests.support.processes import hostprep as run_hostprep

pytestmark = pytest.mark.kernel


@pytest.mark.parametrize(
    ("owner", "group", "mode"),
    [(0, 0, 0o777), (1001, 0, 0o755), (0, 1001, 0o775), (1001, 0, 0o1777)],
    ids=["everybody's", "another user's", "another group's", "another user's, sticky"],
)
def test_a_root_below_a_folder_of_others_is_refused(
    node: Node, owner: int, group: int, mode: int
) -> None:
    parent = Path(node.root).parent
    (parent / "x").mkdir()
    os.chown(parent / "x", owner, group)
    (parent / "x").chmod(mode)
    root = parent / "x" / "sub" / "root"
    done = run_hostprep("prepare", "kv", "--size", "8Mi", "--backing", "Base", "--root", str(root))
    assert done.returncode == 2, done.stderr
    assert f"{parent}/x " in done.stderr
    assert "chmod go-w" in done.stderr
    assert not list((parent / "x").iterdir()), "something was made"


def test_it_is_refused_once_its_parent_is_opened_to_others(node: Node) -> None:
    node.prepare([pool_of()])
    parent = Path(node.root).parent
    parent.chmod(0o777)
    with pytest.raises(BadInputError, match="written by other users"):
        node.prepare([pool_of()])
    parent.chmod(0o1777)  # as /tmp: only the root's owner may rename it
    node.prepare([pool_of()])


def test_folders_on_the_way_are_closed_to_others_whatever_the_umask(node: Node) -> None:
    below = Node(f"{node.root}/a/b")
    before = os.umask(0)
    try:
        below.prepare([pool_of()])
        below.release(["kv"])
    finally:
        os.umask(before)
    assert Path(node.root, "a").stat().st_mode & 0o777 == 0o755


def test_every_command_refuses_a_root_in_which_others_may_replace_what_it_runs(node: Node) -> None:
    node.prepare([pool_of()])
    root = Path(node.root)
    commands = [
        ("exec", "kv", "--", "true"),
        ("attach", "kv"),
        ("wait", "kv", "--wait", "0"),
        ("verify", "kv"),
        ("status",),
        ("prepare", "kv", "--size", "8Mi"),
    ]
    for owner, mode, why in ((1001, 0o755, "belongs to user 1001"), (0, 0o777, "by other users")):
        os.chown(root, owner, 0)
        root.chmod(mode)
        for command in commands:
            done = run_hostprep(command[0], "--root", node.root, *command[1:])
            assert done.returncode == 2, (command, done.stdout)
            assert why in done.stderr, command
            assert len(done.stderr.splitlines()) == 1, done.stderr
        done = run_hostprep("doctor", "--root", node.root, "-o", "json")
        assert done.returncode == 1
        findings = json.loads(done.stdout)["findings"]
        (found,) = [finding for finding in findings if finding["check"] == "root-folder"]
        assert found["severity"] == "error"
        assert why in found["what"]
    os.chown(root, 0, 0)
    root.chmod(0o755)
    assert run_hostprep("exec", "--root", node.root, "kv", "--", "true").returncode == 0


def test_an_owner_without_a_number_in_a_user_namespace_is_accepted(node: Node) -> None:
    """As a pod's with `hostUsers: false`, which sees the node's root so."""
    Path(node.root).parent.chmod(0o755)
    node.prepare([pool_of()])
    command = ["python3", f"{node.root}/hostprep.pyz", "wait", "kv", "--root", node.root]
    done = subprocess.run(
        ["unshare", "--user", "--map-user=1000", *command, "--wait", "0", "--handoff-only"],
        capture_output=True, text=True, timeout=60, check=False, user=4321, group=4321,
        extra_groups=[],
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
