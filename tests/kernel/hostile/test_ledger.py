"""What an engine that runs as root leaves in a ledger's place costs that pool only."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.kernel.hostile.attackers import BYSTANDER, Pools
from tests.support.processes import hostprep as run_hostprep

pytestmark = pytest.mark.kernel

LEDGER = '{{"boot_id": "b", "pool_uid": "", "generation": 1, "taken": {}, "pending": {}}}'


@pytest.mark.parametrize(
    "leave",
    [
        os.mkfifo,
        os.mkdir,
        lambda path: os.symlink("/dev/zero", path),
        lambda path: os.truncate(os.open(path, os.O_CREAT | os.O_WRONLY), 1 << 40),
        lambda path: Path(path).write_text("[" * 100_000),
        lambda path: Path(path).write_text(LEDGER.format("[[0, 1e300, true]]", "null")),
        lambda path: Path(path).write_text(LEDGER.format("[]", f"[{10**30}, 0, 0, 0]")),
    ],
    ids=["fifo", "folder", "device", "terabyte", "nested", "no numbers", "no node"],
)
@pytest.mark.parametrize("name", ["agent.json", "boot.ledger"])
def test_a_ledger_that_is_none_holds_up_no_other_pool(
    pools: Pools, name: str, leave: Callable[[str], object]
) -> None:
    path = f"{pools.attacked.folder}/{name}"
    if os.path.exists(path):
        os.unlink(path)
    leave(path)

    pools.bystander_works()
    done = run_hostprep("release", BYSTANDER, "--root", pools.root, timeout_s=20)
    assert done.returncode == 0, done.stderr
    if os.path.isdir(path):
        os.rmdir(path)
