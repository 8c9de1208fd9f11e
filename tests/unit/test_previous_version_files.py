"""Every file that version 0.1.0 left on a node is read, into the values that it was written for.

The files are in tests/fixtures/state_v0_1; README.md there says how they came about. On real
memory, with processes that hold it: tests/kernel/test_adopt_previous_version.py.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path

import pytest

from hostprep.agent.desired import Source, instruction_of, read_saved
from hostprep.api.pool_resource import spec_from_options
from hostprep.api.pool_spec import PoolState, RegionLayout
from hostprep.backing import MIB, Backing
from hostprep.client.claim import has_waiters, left_by_earlier
from hostprep.client.handoff import read_handoff
from hostprep.client.owner import Owner
from hostprep.client.sidecar import (
    is_clean,
    mark_dirty,
    read_bad_mark,
    read_bad_size,
    read_members,
    read_sidecar,
)
from hostprep.cuda.board import RankBoard
from hostprep.cuda.turnstile import Turnstile
from hostprep.linux.processes import ProcessId
from hostprep.node.boot.install import _read_record as read_boot_scripts
from hostprep.node.boot.install import sync_boot_unit
from hostprep.node.facts import LedgerEntry
from hostprep.node.ledger import PendingChange, read_boot_ledger, read_ledger
from hostprep.paths import PoolPaths
from tests.support.previous_version import (
    BOOT_ID,
    FIXTURE,
    GID,
    IDENTITY,
    LEASE_ID,
    TOKEN,
    ZIPAPP,
    copy_state,
    locked,
)

pytestmark = pytest.mark.unit

UNIT = "etc/systemd/system/hostprep-boot.service"
WANTS = "etc/systemd/system/multi-user.target.wants/hostprep-boot.service"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return copy_state(tmp_path / "state")


@pytest.fixture
def kv(root: Path) -> PoolPaths:
    return PoolPaths(str(root), "kv")


def _lease() -> dict[str, int]:
    found: dict[str, int] = json.loads((FIXTURE / "root/kv/state/node0-1/lease").read_text())
    return found


# ---- What the agent and root keep ----


def test_the_record_of_a_pool(root: Path, kv: PoolPaths) -> None:
    record = read_ledger(kv)
    assert record is not None
    assert (record.boot_id, record.pool_uid, record.generation) == (BOOT_ID, "uid-of-kv", 1)
    assert record.taken == (LedgerEntry(0, 2 * MIB, 16),)
    assert record.pending is None
    sized = read_ledger(PoolPaths(str(root), "sized"))
    assert sized is not None
    assert (sized.boot_id, sized.pool_uid, sized.taken) == (BOOT_ID, "", ())


def test_the_record_of_a_change_that_was_cut_short(kv: PoolPaths) -> None:
    shutil.copyfile(FIXTURE / "agent-unfinished.json", kv.ledger)
    record = read_ledger(kv)
    assert record is not None
    assert record.pending == PendingChange(0, 2 * MIB, 16, 24)
    assert record.pending.outcome(21) == 5


def test_the_boot_scripts_ledger_counts_for_its_boot_alone(root: Path) -> None:
    paths = PoolPaths(str(root), "early")
    assert read_boot_ledger(paths, BOOT_ID) == (PendingChange(0, 2 * MIB, 16, 20),)
    assert read_boot_ledger(paths, "another boot") == ()


def test_the_entries_that_the_agent_acts_upon() -> None:
    desire = read_saved(str(FIXTURE / "agent"))
    assert desire is not None
    assert (desire.source, desire.uid, desire.generation) == (Source.SAVED, "uid-of-node", 7)
    assert desire.boot_id == BOOT_ID
    assert [(e.name, e.uid, e.generation, e.absent) for e in desire.entries] == [
        ("kv", "uid-of-kv", 3, False),
        ("old", "uid-of-old", 1, True),
    ]
    instruction = instruction_of(desire)
    assert instruction.withheld == {"old"}
    assert not instruction.refused
    [wanted] = instruction.pools
    spec = wanted.spec
    assert (spec.name, spec.state, spec.size_bytes) == ("kv", PoolState.PRESENT, 32 * MIB)
    assert (spec.backings, spec.layout, spec.region_count) == (
        (Backing.HUGETLB_2MI,),
        RegionLayout.COUNT,
        4,
    )
    assert (spec.gid, spec.mode) == (GID, 0o660)


def test_which_pools_have_a_boot_script() -> None:
    assert read_boot_scripts(str(FIXTURE / "agent")) == {"kv", "early"}


def _host(folder: Path) -> Path:
    """Return a node's root folder with systemd, and the boot unit that was installed there."""
    shutil.copytree(FIXTURE / "host", folder)
    (folder / "run/systemd/system").mkdir(parents=True)
    (folder / WANTS).parent.mkdir()
    (folder / WANTS).symlink_to(f"/{UNIT}")
    return folder


def test_the_boot_unit_is_the_agents_own_to_change(tmp_path: Path) -> None:
    host, state = _host(tmp_path / "host"), tmp_path / "agent"
    shutil.copytree(FIXTURE / "agent", state)
    specs = [
        spec_from_options(name="kv", size="64Mi", backings="HugeTLB2Mi", regions="4"),
        spec_from_options(name="early", size="8Mi", backings="HugeTLB2Mi", regions="1"),
    ]
    kept = sync_boot_unit(specs, (), root="/run/hostprep", host=str(host), state=str(state))
    assert (kept.pools, kept.failures) == (("kv", "early"), ())
    assert "SIZE_KIB=65536" in (host / "etc/hostprep/kv.sh").read_text()


@pytest.mark.parametrize("remembered", [True, False])
def test_the_boot_unit_is_the_agents_own_to_remove(tmp_path: Path, remembered: bool) -> None:
    host, state = _host(tmp_path / "host"), tmp_path / "agent"
    state.mkdir()
    if remembered:
        shutil.copytree(FIXTURE / "agent", state, dirs_exist_ok=True)

    def keep(*unwanted: str) -> tuple[str, ...]:
        kept = sync_boot_unit((), unwanted, root="/r", host=str(host), state=str(state))
        assert kept.failures == ()
        return kept.pools

    assert keep("kv") == ("early",)
    assert not (host / "etc/hostprep/kv.sh").exists()
    assert "early.sh" in (host / UNIT).read_text()
    assert keep("early") == ()
    assert not (host / "etc/hostprep").exists()
    assert not (host / UNIT).exists()
    assert not (host / WANTS).is_symlink()


# ---- What engines read and write ----


def test_the_handoff(kv: PoolPaths) -> None:
    handoff = read_handoff(kv, boot_id=BOOT_ID)
    assert (handoff.pool, handoff.pool_uid, handoff.generation) == ("kv", "uid-of-kv", 1)
    assert handoff.agent_version == "0.1.0"
    assert [region.name for region in handoff.regions] == [f"node0-{n}" for n in range(4)]
    written = json.loads(Path(kv.handoff).read_text())["regions"]
    for region, document in zip(handoff.regions, written, strict=True):
        assert region.path == f"mem/{region.name}"
        assert (region.st_dev, region.st_ino) == (document["st_dev"], document["st_ino"])
        assert (region.size_bytes, region.page_bytes) == (8 * MIB, 2 * MIB)
        assert (region.backing, region.placement) == (Backing.HUGETLB_2MI, "node:0")
        assert (region.numa_node, region.pinned, region.layout) == (0, True, None)
        assert region.attach.register_chunk_bytes == 256 * MIB
        assert region.attach.populate_read_threads == 2
        assert region.attach.skip_register is False


def test_the_handoff_with_layouts(root: Path) -> None:
    handoff = read_handoff(PoolPaths(str(root), "sized"), boot_id=BOOT_ID)
    for region in handoff.regions:
        assert (region.backing, region.size_bytes) == (Backing.BASE, 8 * MIB)
        layout = region.layout
        assert layout is not None
        assert (layout["version"], layout["model"]) == (1, "llama-3.1-8b")
        assert layout["tokens_per_block"] == 32
        assert [(g["name"], g["slots"], g["offset_bytes"]) for g in layout["groups"]] == [
            ("full", 5, 0),
            ("window", 9, 6 * MIB),
        ]


def test_a_leases_sidecar_and_its_members(kv: PoolPaths) -> None:
    sidecar = read_sidecar(kv, "node0-1")
    assert sidecar is not None
    lease = _lease()
    leader = ProcessId(lease["pid"], lease["start_ticks"], lease["pid_namespace"])
    assert (sidecar.lease_id, sidecar.holder, sidecar.owner) == (LEASE_ID, leader, None)
    assert sidecar.command == "python3 /run/hostprep/hostprep.pyz exec"
    assert sidecar.claimed_at_s == lease["claimed_at_s"]
    assert sidecar.links == ("/run/engine/kv-0.bin",)
    first, rank = read_members(kv, "node0-1")
    assert first == leader
    assert rank.pid != leader.pid
    assert rank.namespace == leader.namespace


def test_an_owners_sidecar(kv: PoolPaths) -> None:
    sidecar = read_sidecar(kv, "node0-2")
    assert sidecar is not None
    assert sidecar.holder == ProcessId(0, 0, 0), "it let go in an orderly way"
    assert sidecar.owner is not None
    assert dict(sidecar.owner.identity) == IDENTITY
    assert Owner(TOKEN, IDENTITY).is_same_as(sidecar.owner)
    assert Owner(TOKEN, IDENTITY).difference(sidecar.owner) is None
    other = Owner(TOKEN, IDENTITY | {"kv_dtype": "bf16"})
    assert "kv_dtype" in (other.difference(sidecar.owner) or "")
    assert not Owner(TOKEN + "!", IDENTITY).is_same_as(sidecar.owner)


def test_clean_marks_and_their_absence(kv: PoolPaths) -> None:
    regions = {region.name: region for region in read_handoff(kv, boot_id=BOOT_ID).regions}
    assert [name for name, region in regions.items() if is_clean(kv, region)] == ["node0-0"]
    mark_dirty(kv, "node0-0")
    assert not is_clean(kv, regions["node0-0"])


def test_the_mark_of_a_bad_region(root: Path) -> None:
    paths = PoolPaths(str(root), "sized")
    assert read_bad_mark(paths, "node0-0") is None
    assert read_bad_mark(paths, "node0-1") == "has 1 bad page of 4096 bytes"
    assert read_bad_size(paths, "node0-1") == 8 * MIB


def test_a_waiters_ticket_counts_as_long_as_its_lock_is_held(kv: PoolPaths) -> None:
    regions = frozenset(f"node0-{n}" for n in range(4))
    [ticket] = Path(kv.tickets).iterdir()
    with locked(ticket):
        assert has_waiters(kv)
        assert left_by_earlier(kv, None, regions) == {"node0-0", "node0-3"}
    assert left_by_earlier(kv, None, regions) == regions
    assert not has_waiters(kv)
    assert not list(Path(kv.tickets).iterdir())


def test_the_rank_board(root: Path) -> None:
    view = RankBoard.look(str(root / "kv/state/node0-1/board"))
    assert view.world == 2
    assert view.generation == hashlib.sha256(LEASE_ID.encode()).digest()[:16]
    assert not view.alive
    ready, rank = (found.slot for found in view.ranks)
    assert (ready.state, ready.done_bytes, ready.size_bytes) == ("Ready", 4 * MIB, 4 * MIB)
    assert ready.longest_chunk_s == 0.025
    lease = _lease()
    leader = ProcessId(lease["pid"], lease["start_ticks"], lease["pid_namespace"])
    assert ready.process == leader
    assert (rank.state, rank.done_bytes, rank.longest_chunk_s) == ("Initializing", MIB, 0.05)
    assert view.gate is not None
    assert (view.gate.state, view.gate.process) == ("Degraded", leader)
    assert view.gate.reason.startswith("not open within 5 s: 1 of 2 ranks ready")
    assert view.created_at_s < ready.joined_at_s < rank.joined_at_s


def test_a_later_run_replaces_the_rank_board(root: Path) -> None:
    path = str(root / "kv/state/node0-1/board")
    board = RankBoard.open(path, generation="another lease", world=1, rank=0)
    try:
        view = board.read()
        assert (view.world, [rank.rank for rank in view.ranks], view.gate) == (1, [0], None)
    finally:
        board.close()


def test_the_turnstile_waits_for_a_living_ticket_and_passes_a_dead_one(root: Path) -> None:
    said: list[str] = []
    turnstile = Turnstile(str(root), say=said.append)
    folder = root / "turnstile/node"
    for path in (folder.parent, folder):
        path.chmod(0o1777)
    with locked(folder / "000000000001"), locked(folder / "slot0"):
        with pytest.raises(Exception, match="no turn to register"):
            with turnstile.turn(timeout_s=0.1):
                pass
    with turnstile.turn(timeout_s=30):
        pass
    assert not said
    assert [path.name for path in folder.iterdir()] == ["slot0"]


def test_the_zipapp_is_the_one_that_the_commit_makes() -> None:
    """It is never built again: what runs in engines' images is this very code."""
    digest = hashlib.sha256(ZIPAPP.read_bytes()).hexdigest()
    assert digest == "4c835e0bce0febb0a45a317dcf38d43fa136d7644da83e109cd40295075f5c8c"
