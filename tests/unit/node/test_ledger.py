"""The agent's ledger: what a killed change of huge pages comes to."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hostprep.node.facts import LedgerEntry
from hostprep.node.ledger import Ledger, LedgerWriter, PendingChange, read_boot_ledger, read_ledger
from hostprep.paths import PoolPaths

pytestmark = pytest.mark.unit


def test_a_record_is_read_back(tmp_path: Path) -> None:
    paths = PoolPaths(str(tmp_path), "kv")
    (tmp_path / "kv").mkdir()
    ledger = Ledger(
        "boot", "uid", 3, (LedgerEntry(0, 2 << 20, 7),), PendingChange(0, 2 << 20, 1, 8)
    )
    LedgerWriter(paths, ledger).save(ledger)
    assert read_ledger(paths) == ledger


@pytest.mark.parametrize("text", ["", "{}", "[]", "null", '{"boot_id": 1}', "[" * 9999])
def test_a_broken_record_is_none(tmp_path: Path, text: str) -> None:
    paths = PoolPaths(str(tmp_path), "kv")
    (tmp_path / "kv").mkdir()
    Path(paths.ledger).write_text(text)
    assert read_ledger(paths) is None


@given(st.integers(0, 99), st.integers(0, 99), st.integers(0, 300))
def test_an_interrupted_change_counts_for_nothing_to_all_of_it(
    before: int, after: int, now: int
) -> None:
    change = PendingChange(0, 2 << 20, before, after).outcome(now)
    assert min(0, after - before) <= change <= max(0, after - before)
    if min(before, after) <= now <= max(before, after):
        assert before + change == now


@given(st.lists(st.integers(-50, 50), max_size=20))
def test_the_ledger_never_goes_below_nothing(changes: list[int]) -> None:
    ledger = Ledger("boot")
    for change in changes:
        ledger = ledger.with_taken(0, 2 << 20, change)
    assert all(entry.pages > 0 for entry in ledger.taken)


def test_what_the_boot_script_set_out_to_add_is_read_and_what_is_spoilt_passed_over(
    tmp_path: Path,
) -> None:
    paths = PoolPaths(str(tmp_path), "kv")
    (tmp_path / "kv").mkdir()
    assert read_boot_ledger(paths, "this") == ()
    lines = ["this", "2048 0 5 2 10", "2048 x$(id) 0 9", "", "1048576 1 0 3 2"]
    Path(paths.boot_ledger).write_text("\n".join(lines))
    added = PendingChange(0, 2 << 20, 5, 13)
    assert read_boot_ledger(paths, "this") == (added, PendingChange(1, 1 << 30, 0, 0))
    assert read_boot_ledger(paths, "another") == ()
    # Two of ten were there and free: of the others never more than what came, and than was asked.
    assert [added.outcome(now) for now in (4, 5, 9, 13, 99)] == [0, 0, 4, 8, 8]


@given(st.binary(max_size=200))
def test_any_bytes_may_stand_in_the_boot_scripts_ledger(
    tmp_path_factory: pytest.TempPathFactory, content: bytes
) -> None:
    paths = PoolPaths(str(tmp_path_factory.mktemp("root")), "kv")
    Path(paths.folder).mkdir()
    Path(paths.boot_ledger).write_bytes(content)
    read_boot_ledger(paths, "this")
