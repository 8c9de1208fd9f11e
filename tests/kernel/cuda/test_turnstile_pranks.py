"""What anybody may leave in a turnstile's folder, and what is done about it."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from hostprep.cuda import turnstile_files as tickets
from hostprep.cuda.turnstile import Turnstile
from hostprep.cuda.turnstile_files import make_turnstiles
from hostprep.errors import BusyError
from hostprep.linux.locks import try_lock
from hostprep.paths import TURNSTILE
from tests.kernel.cuda.turns import HANG_S
from tests.kernel.cuda.users import as_user, become, expect
from tests.support.processes import forked

pytestmark = [
    pytest.mark.kernel,
    pytest.mark.parallel,
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root: users"),
]

SQUATTER = 1000


@pytest.fixture
def folder(root: Path) -> Path:
    return root / TURNSTILE / "node"


def without(root: Path, *, width: int = 1) -> str | None:
    """Take a turn; return what was said of it, if it was none."""
    ours = Turnstile(str(root), width=width, patience_s=1e9, say=lambda _: None)
    with ours.turn(HANG_S):
        pass
    return ours.without


def held(path: Path) -> Callable[[Callable[[], None]], None]:
    """Return what a child of the squatter's does: make a file, and keep it locked."""

    def child(ready: Callable[[], None]) -> None:
        become(SQUATTER)
        fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        os.fchmod(fd, 0o666)
        expect(try_lock(fd, exclusive=True))
        ready()

    return child


@pytest.mark.parametrize("name", ["9" * 30, "9" * 13, "1", "0000000000001"])
def test_a_number_of_any_other_length_is_no_ticket(root: Path, folder: Path, name: str) -> None:
    with forked(held(folder / name)):
        opened = os.open(folder, os.O_RDONLY)
        ticket = tickets.draw(opened)
        assert (ticket.number, ticket.name) == (1, "000000000001")
        ticket.give_up(opened)
        os.close(opened)
        assert without(root) is None


def test_behind_the_last_ticket_it_goes_on_without(root: Path, folder: Path) -> None:
    with forked(held(folder / ("9" * 12))):
        assert "the last ticket" in str(without(root))
    assert without(root) is None


def test_the_first_slot_is_whoever_prepared_the_nodes(root: Path, folder: Path) -> None:
    def replace() -> None:
        for take_away in (os.unlink, lambda path: os.rename(path, folder / "mine")):
            with pytest.raises(PermissionError):
                take_away(folder / "slot0")

    as_user(SQUATTER, replace)
    assert (folder / "slot0").stat().st_uid == 0
    assert without(root) is None


@pytest.mark.parametrize("kind", ["link", "folder", "fifo", "closed", "theirs"])
def test_what_is_in_a_slots_place_is_cleared_away(
    root: Path, folder: Path, tmp_path: Path, kind: str
) -> None:
    slot, precious = folder / "slot0", tmp_path / "precious"
    precious.write_text("not yours")
    slot.unlink()

    def squat() -> None:
        if kind == "link":
            slot.symlink_to(precious)
        elif kind == "folder":
            (slot / "full").mkdir(parents=True)
        elif kind == "fifo":
            os.mkfifo(slot)
        else:
            slot.touch()
            slot.chmod(0o600 if kind == "closed" else 0o666)

    as_user(SQUATTER, squat)
    make_turnstiles(str(root))
    assert (slot.lstat().st_uid, slot.lstat().st_mode) == (0, 0o100666)
    as_user(1001, lambda: expect((why := without(root)) is None, why))
    assert precious.read_text() == "not yours"


def test_a_slot_in_which_somebody_has_its_turn_stays(root: Path, folder: Path) -> None:
    (folder / "slot0").unlink()
    with forked(held(folder / "slot0")):
        make_turnstiles(str(root))
        assert (folder / "slot0").stat().st_uid == SQUATTER
        with pytest.raises(BusyError), Turnstile(str(root), patience_s=1e9).turn(0.2):
            pass
    make_turnstiles(str(root))
    assert (folder / "slot0").stat().st_uid == 0


def test_who_waits_for_a_slot_that_is_replaced_goes_to_the_new_one(
    root: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "slot0").unlink()
    (folder / "slot0").touch(0o666)
    os.chown(folder / "slot0", SQUATTER, SQUATTER)
    opened = os.open(folder, os.O_RDONLY)
    real = tickets.open_plain

    def open_and_be_overtaken(folder: int, name: str, flags: int) -> int:
        fd = real(folder, name, flags)
        monkeypatch.setattr(tickets, "open_plain", real)
        make_turnstiles(str(root))
        return fd

    monkeypatch.setattr(tickets, "open_plain", open_and_be_overtaken)
    assert tickets.try_slots(opened, 1) is None, "the lock of a file that nobody else finds"
    slot = tickets.try_slots(opened, 1)
    assert slot is not None
    assert os.path.samestat(os.fstat(slot), (folder / "slot0").stat())
    tickets.release_slot(slot)
    os.close(opened)


def test_a_slot_that_takes_no_bytes_is_not_kept(
    root: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The turnstile's file system is full: others must not wait for who goes without."""
    opened = os.open(folder, os.O_RDONLY)

    def full(fd: int, data: bytes, at: int) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("os.pwrite", full)
        with pytest.raises(OSError, match="No space"):
            tickets.try_slots(opened, 1, b"x" * 16)
    slot = tickets.try_slots(opened, 1)
    assert slot is not None
    tickets.release_slot(slot)
    os.close(opened)


def test_a_slot_that_cannot_be_opened_does_not_close_the_others(root: Path, folder: Path) -> None:
    as_user(SQUATTER, lambda: (folder / "slot1").symlink_to("/etc/passwd"))
    assert without(root, width=2) is None


def test_a_heap_of_files_is_not_looked_through_and_is_cleared_away(
    root: Path, folder: Path
) -> None:
    def heap() -> None:
        for number in range(5000):
            (folder / f"{number:012d}").touch()

    as_user(SQUATTER, heap)
    as_user(1001, lambda: expect("files lie there" in str(without(root)), without(root)))
    make_turnstiles(str(root))
    assert os.listdir(folder) == ["slot0"]
    as_user(1001, lambda: expect((why := without(root)) is None, why))


def test_clearing_away_leaves_the_living(root: Path, folder: Path) -> None:
    (folder / "notes").mkdir()
    (folder / "notes" / "of an engine").touch()
    with forked(held(folder / "000000000007")):
        make_turnstiles(str(root))
        assert sorted(os.listdir(folder)) == ["000000000007", "slot0"]
    make_turnstiles(str(root))
    assert os.listdir(folder) == ["slot0"]


@pytest.mark.parametrize("kind", ["folder", "link"])
def test_a_folder_of_somebody_elses_is_replaced(
    root: Path, folder: Path, tmp_path: Path, kind: str
) -> None:
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "file").touch()
    (folder / "slot0").unlink()
    folder.rmdir()

    def squat() -> None:
        if kind == "link":
            folder.symlink_to(precious)
        else:
            (folder / "mine").mkdir(parents=True, mode=0o700)

    as_user(SQUATTER, squat)
    make_turnstiles(str(root))
    assert os.listdir(precious) == ["file"]
    assert (folder.stat().st_uid, folder.stat().st_mode & 0o7777) == (0, 0o1777)
    as_user(1001, lambda: expect((why := without(root)) is None, why))
