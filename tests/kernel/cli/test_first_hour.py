"""What a newcomer meets in the first hour is said with the remedy that helps this very user."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

import hostprep
from hostprep.backing import Backing
from hostprep.node.apply.service import Node
from hostprep.paths import PoolPaths
from testbed.machine import POOL, huge_pages_total, pool_of
from tests.support.processes import hostprep as run_hostprep
from tests.support.processes import hostprep_as, python

pytestmark = pytest.mark.kernel

MEMBER, STRANGER = 54321, 1234


@pytest.fixture
def shared(node: Node) -> Node:
    """A pool with a group, below folders that everybody may pass."""
    Path(node.root).parent.chmod(0o755)
    node.prepare([pool_of(regions=2, gid=MEMBER)])
    return node


def _refused(group: int, *arguments: str) -> str:
    done = hostprep_as(4321, group, *arguments)
    assert done.returncode in (1, 2), done.stdout + done.stderr
    assert done.stderr.count("\n") == 1, done.stderr
    return done.stderr


def _without_rights(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run as a user without any capability, who may not even read this checkout: loaded before."""
    code = (
        "import encodings.ascii, os, sys\n"
        "import hostprep.cli.status, hostprep.cli.prepare, hostprep.engines.attach\n"
        "from hostprep.__main__ import main\n"
        f"os.setgroups([]); os.setgid({STRANGER}); os.setuid(4321)\n"
        "sys.exit(main())\n"
    )
    return python("-c", code, *arguments)


@pytest.mark.parametrize("command", [("release", POOL), ("prepare", POOL, "--size", "8Mi")])
def test_a_member_of_the_group_is_not_sent_to_the_group(
    shared: Node, command: tuple[str, ...]
) -> None:
    told = _refused(MEMBER, *command, "--root", shared.root)
    assert "only its owner prepares and releases" in told
    assert "run it as root" in told
    assert "--root $(mktemp -d -p /dev/shm)" in told
    assert "group" not in told


def test_a_stranger_is_told_the_group_of_the_pool(shared: Node) -> None:
    where = ("--root", shared.root)
    for command in (("attach", POOL), ("status", POOL), ("verify", POOL)):
        refused = _without_rights(*command, *where)
        assert refused.returncode == 2, refused.stdout
        assert f"the pool's group (gid {MEMBER})" in refused.stderr, command
    refused = _without_rights("release", POOL, *where)  # members may not do that either
    assert refused.stderr.endswith("no permission; run it as root\n"), refused.stderr
    seen = _without_rights("status", *where)
    assert f"not shown, for want of permission: {POOL}" in seen.stderr
    assert "no pools that can be seen" in seen.stdout


def test_a_pool_without_a_group_is_told_to_get_one(node: Node) -> None:
    Path(node.root).parent.chmod(0o755)
    node.prepare([pool_of()])
    told = _refused(MEMBER, "attach", POOL, "--root", node.root)
    assert f"pool {POOL} has no group" in told
    assert "--gid" in told


def test_a_region_that_cannot_be_opened_is_not_shown_as_leased(node: Node) -> None:
    Path(node.root).parent.chmod(0o755)
    node.prepare([pool_of()])
    done = hostprep_as(4321, MEMBER, "status", "-o", "json", "--root", node.root)
    (region,) = json.loads(done.stdout)["pools"][0]["regions"]
    assert (region["state"], region["leased"], region["holder"]) == ("Unknown", None, None)


def test_a_members_second_attach_says_who_cleans_the_region_and_what_to_do(shared: Node) -> None:
    command = ("attach", POOL, "--root", shared.root, "--region", "node0-0")
    assert hostprep_as(4321, MEMBER, *command).returncode == 0
    told = _refused(MEMBER, *command)
    assert "node0-0" in told
    assert "bytes of its last owner" in told
    assert "--wait 60" in told
    assert "root repeat its `hostprep prepare`" in told


def test_a_region_in_use_is_said_to_be_and_nothing_of_scrubbing(node: Node) -> None:
    node.prepare([pool_of()])
    with hostprep.attach(POOL, root=node.root):
        refused = run_hostprep("attach", POOL, "--root", node.root)
    assert f"no region of pool {POOL} is free (node0-0: leased by " in refused.stderr
    assert "--wait" in refused.stderr
    assert "scrub" not in refused.stderr


def test_without_root_prepare_says_where_it_would_work() -> None:
    for size, remedy in (("64Mi", "--root $(mktemp -d -p /dev/shm)"), ("300Ti", "ask for less")):
        told = _refused(MEMBER, "prepare", POOL, "--size", size, "--root", "/run/hp-none")
        assert told.rstrip().endswith(remedy), told


def test_what_root_holds_is_not_offered_to_others(shared: Node) -> None:
    told = _refused(MEMBER, "prepare", POOL, "--size", "300Ti", "--root", shared.root)
    assert "which" not in told.partition(";")[2]
    told = _refused(MEMBER, "prepare", POOL, "--size", "2Gi", "--root", shared.root)
    assert "8Mi" not in told
    assert "run it as root" in told


def test_attach_says_how_much_of_its_time_went_to_zeroing(node: Node) -> None:
    node.prepare([pool_of()])
    command = ("attach", POOL, "--root", node.root)
    clean = json.loads(run_hostprep(*command, "-o", "json").stdout)
    assert clean["zeroed_s"] == 0
    dirty = json.loads(run_hostprep(*command, "-o", "json").stdout)
    assert 0 < dirty["zeroed_s"] < dirty["attach_s"]
    assert "to zero what the last owner left" in run_hostprep(*command).stdout
    with hostprep.attach(POOL, root=node.root) as memory:
        assert memory.zeroed_s > 0


def test_a_forced_release_names_who_still_holds_memory(node: Node) -> None:
    node.prepare([pool_of()])
    where = ("--root", node.root)
    with hostprep.attach(POOL, root=node.root):
        refused = run_hostprep("release", POOL, *where)
        assert refused.returncode == 1
        done = run_hostprep("release", POOL, "--force", *where)
    assert done.returncode == 0, done.stderr
    assert f"still held: 8 MiB of {POOL}/node0-0 by process {os.getpid()} (" in done.stdout


def test_growing_says_that_an_engine_gets_one_region(node: Node) -> None:
    node.prepare([pool_of()])
    grown = run_hostprep("prepare", POOL, "--size", "16Mi", "--root", node.root)
    assert grown.returncode == 0, grown.stderr
    assert f"`hostprep release {POOL}` first" in grown.stdout


def test_the_doctor_finds_what_a_removed_root_left(node: Node) -> None:
    before = huge_pages_total()
    node.prepare([pool_of(backing=Backing.HUGETLB_2MI)])
    mem = f"{PoolPaths(node.root, POOL).folder}/mem"
    turnstile = f"{node.root}/turnstile"
    subprocess.run(["rm", "-rf", node.root], check=False, stderr=subprocess.DEVNULL)
    try:
        found = json.loads(run_hostprep("doctor", "--root", node.root, "-o", "json").stdout)
        remedies = [each["remedy"] for each in found["findings"]]
        assert f"umount {mem}" in remedies
        assert f"umount {turnstile}" in remedies
        assert f"keep it for an agent, or: umount {node.root}" in remedies
        (give_back,) = (each for each in remedies if each.startswith("if nobody needs them: echo "))
        left, _, knob = give_back.removeprefix("if nobody needs them: echo ").partition(" > ")
        assert int(left) <= before
        assert os.path.exists(knob)
    finally:
        for mount in (mem, turnstile, node.root):
            subprocess.run(["umount", mount], check=True)
        Path("/proc/sys/vm/nr_hugepages").write_text(str(before))
    assert huge_pages_total() == before


def test_what_an_interrupted_prepare_left_is_shown_as_unfinished(node: Node) -> None:
    Path(node.root).parent.chmod(0o755)
    node.prepare([pool_of(gid=MEMBER)])
    folder = Path(node.root, POOL)
    (folder / "mem/node0-0").rename(folder / "mem/.node0-0.part")
    (folder / "handoff.json").unlink()
    for done in (
        run_hostprep("status", "-o", "json", "--root", node.root),
        hostprep_as(4321, MEMBER, "status", "-o", "json", "--root", node.root),
    ):
        (region,) = json.loads(done.stdout)["pools"][0]["regions"]
        assert region["state"] == "Unfinished", done.stdout
    told = run_hostprep("verify", POOL, "--root", node.root)
    assert told.returncode == 1
    assert "a prepare is at work or was interrupted; run `hostprep prepare` again" in told.stdout
    assert "0 B" not in told.stdout
