"""What an engine that runs as root leaves in place of the files that a claim begins with."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.kernel.hostile.attackers import ATTACKED, BYSTANDER, REGION, Pools
from tests.support.processes import hostprep as run_hostprep

pytestmark = pytest.mark.kernel


def run(pools: Pools, *arguments: str) -> int:
    done = run_hostprep(arguments[0], "--root", pools.root, *arguments[1:], timeout_s=30)
    assert "Traceback" not in done.stderr, done.stderr
    return done.returncode


def test_a_fifo_in_place_of_the_claim_lock_holds_up_no_other_pool(pools: Pools) -> None:
    os.unlink(pools.attacked.claim_lock)
    os.mkfifo(pools.attacked.claim_lock)

    pools.bystander_works()
    assert run(pools, "release", BYSTANDER) == 0
    os.unlink(pools.attacked.claim_lock)


def test_a_second_name_of_a_foreign_file_as_the_claim_lock_keeps_its_access(pools: Pools) -> None:
    foreign = Path(pools.root, ".foreign")  # no link leads to another file system
    foreign.write_text("years")
    foreign.chmod(0o604)
    os.unlink(pools.attacked.claim_lock)
    os.link(foreign, pools.attacked.claim_lock)
    pools.dirty(BYSTANDER)
    before = foreign.stat()

    # Another group than before: else nothing of the pool's access is set at all.
    assert run(pools, "prepare", ATTACKED, "--size", "16Mi", "--regions", "2", "--gid", "54323") > 0
    assert pools.errors()[BYSTANDER] is None

    after = foreign.stat()
    assert (after.st_mode, after.st_gid) == (before.st_mode, before.st_gid)
    os.unlink(pools.attacked.claim_lock)


def test_root_claims_and_shows_through_no_link_in_place_of_a_regions_state(pools: Pools) -> None:
    foreign = Path(pools.root).parent / "foreign"
    foreign.mkdir(mode=0o755)
    (foreign / "users").symlink_to("kept")
    (foreign / "clean").write_text("kept")
    for region in (REGION, "node0-1"):
        state = pools.attacked.state_of(region)
        os.rename(state, f"{state}.aside")
        os.symlink(foreign, state)

    run(pools, "attach", ATTACKED)
    assert sorted(os.listdir(foreign)) == ["clean", "users"]
    for region in (REGION, "node0-1"):  # root makes it again where it is looked at
        state = pools.attacked.state_of(region)
        if not os.path.islink(state):
            os.rename(state, f"{state}.{os.getpid()}")
            os.symlink(foreign, state)
    run(pools, "prepare", ATTACKED, "--size", "16Mi", "--regions", "2", "--gid", "54321")

    assert sorted(os.listdir(foreign)) == ["clean", "users"]
    assert (foreign / "clean").read_text() == "kept"
    assert os.readlink(foreign / "users") == "kept"
