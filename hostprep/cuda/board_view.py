"""Reading a rank board, without being one of its ranks.

The file is read, never mapped: a process that may write to it may also shrink it, and a mapping
would then end the engine with SIGBUS at its next read.
"""

from __future__ import annotations

import contextlib
import os
import time
from dataclasses import dataclass

from hostprep.client.untrusted import open_file
from hostprep.cuda.board_layout import (
    FAILED,
    GATE,
    MAX_BOARD_BYTES,
    READY,
    SLOT_BYTES,
    Header,
    Slot,
    generation_of,
    pack_slot,
    slot_offset,
    unpack_header,
    unpack_slot,
)
from hostprep.errors import HostprepError, NotReadyError
from hostprep.linux.files import closing_fd, from_os_error, open_state_file
from hostprep.linux.locks import (
    close_tracked,
    is_range_locked,
    is_tracked,
    track_fd,
    try_lock_range,
)
from hostprep.linux.processes import current_process

_TORN_S = 0.02
"""How long a slot that is being written may look torn to a mere reader: a node's boards must not
cost its agent more than that each. A write takes a microsecond."""
LONG_TORN_S = 2.0
"""The same for a gate, which is closed for good by a board that cannot be read: a writer may lose
its CPU in the middle, to its cgroup's quota or to another virtual machine."""
_TORN_PAUSE_S = 0.001


@dataclass(frozen=True)
class RankView:
    """One rank as observed."""

    rank: int
    slot: Slot
    alive: bool
    """Whether its process lives, by a lock that goes with it: in any PID namespace."""

    @property
    def trouble(self) -> str | None:
        """Why this rank keeps the gate from ever opening; None where it does not."""
        if self.slot.state == FAILED:
            return f"rank {self.rank} failed: {self.slot.reason or 'no reason given'}"
        if not self.alive:
            was = "after it was ready" if self.slot.state == READY else "before it was ready"
            return f"rank {self.rank} ended {was}"
        return None


@dataclass(frozen=True)
class BoardView(Header):
    """A board's contents at one moment."""

    ranks: tuple[RankView, ...]
    """Those that have joined, in order."""
    gate: Slot | None
    """What the engine's gate announced, if it did."""
    removed: bool
    """True where the file has no name any more: deleted, or a later run has made another."""

    @property
    def alive(self) -> bool:
        """Whether any of its ranks lives."""
        return any(rank.alive for rank in self.ranks)


def read_board(path: str) -> BoardView:
    """Return a board's contents; changes nothing, and needs no right but to read.

    Raises NotReadyError where there is none (NoBoard), or none that can be understood (BadBoard,
    OtherBoardVersion), NotReadableError for what is no file, or has another name (a hard link).
    """
    try:
        fd = open_file(path)
    except FileNotFoundError as error:
        raise NotReadyError(f"there is no rank board at {path}", reason="NoBoard") from error
    with closing_fd(fd):
        return view_of(fd)


def view_of(fd: int, *, own_rank: int | None = None, torn_s: float = _TORN_S) -> BoardView:
    """Return an open board's contents. Raises NotReadyError for another file.

    `torn_s`: for how many seconds slots may look torn, as while they are being written.
    """
    until_s = time.monotonic() + torn_s
    data = read_whole(fd)
    header = unpack_header(data)
    ranks = []
    for rank in range(header.world):
        slot = _slot_in(fd, data, rank, until_s)
        if slot is not None:
            # Checked after the slot was read: a rank takes its lock before it writes.
            alive = rank == own_rank or is_range_locked(fd, slot_offset(rank), SLOT_BYTES)
            ranks.append(RankView(rank, slot, alive))
    return BoardView(
        **vars(header),
        ranks=tuple(ranks),
        gate=_slot_in(fd, data, GATE, until_s),
        removed=os.fstat(fd).st_nlink == 0,
    )


def read_whole(fd: int) -> bytes:
    """Return a board's bytes; at most one more than the largest board has."""
    try:
        return os.pread(fd, MAX_BOARD_BYTES + 1, 0)
    except OSError as error:
        raise from_os_error(error, "read the rank board") from error


def _slot_in(fd: int, data: bytes, rank: int, until_s: float) -> Slot | None:
    begin = slot_offset(rank)
    try:
        return unpack_slot(data[begin : begin + SLOT_BYTES])
    except ValueError:
        return read_slot(fd, rank, until_s)


def read_slot(fd: int, rank: int, until_s: float | None = None) -> Slot | None:
    """Return a slot, read again while it is being written, until `until_s` of time.monotonic().

    Raises NotReadyError (BadBoard).
    """
    if until_s is None:
        until_s = time.monotonic() + _TORN_S
    while True:
        try:
            return unpack_slot(os.pread(fd, SLOT_BYTES, slot_offset(rank)))
        except ValueError as error:
            if time.monotonic() >= until_s:
                whose = "the gate" if rank == GATE else f"rank {rank}"
                raise NotReadyError(
                    f"the rank board's entry of {whose} is damaged", reason="BadBoard"
                ) from error
        time.sleep(_TORN_PAUSE_S)


class BoardReader:
    """The board of one run, for a gate in a process that is no rank, such as a scheduler.

    The ranks make the file: until it is there, and of this run, there is nothing to read. From
    then on the same file is read, whatever happens to its name.
    """

    def __init__(self, path: str, *, generation: str) -> None:
        """Open nothing yet. Raises BadInputError for an empty generation."""
        self.path = path
        self._generation = generation_of(generation)
        self._fd: int | None = None
        self._since_s = 0.0

    def read(self) -> BoardView | None:
        """Return the contents of this run's board; None where there is none yet.

        Raises HostprepError once it was there and cannot be read any more.
        """
        if self._fd is not None and is_tracked(self._fd):
            return view_of(self._fd, torn_s=LONG_TORN_S)
        self._fd = None
        fd = self._open()
        if fd is None:
            return None
        try:
            view = view_of(fd)
        except HostprepError:
            view = None  # not this run's, or cut short: then its ranks cannot join either
        if view is None or view.generation != self._generation:
            os.close(fd)
            return None
        self._fd = track_fd(fd)
        self._since_s = time.time()
        return view

    def announce(self, state: str, why: str = "") -> None:
        """Write the gate's state into the board, for `hostprep status`, where that is possible."""
        if self._fd is not None:
            announce_gate(self._fd, state, why, since_s=self._since_s)

    def close(self) -> None:
        """Close the file."""
        if self._fd is not None:
            close_tracked(self._fd)
        self._fd = None

    def _open(self) -> int | None:
        for flags in (os.O_RDWR, os.O_RDONLY):
            with contextlib.suppress(OSError):
                return open_state_file(self.path, flags)
        return None


def announce_gate(fd: int, state: str, why: str, *, since_s: float) -> None:
    """Write the gate's slot, unless another gate has it, or the board may only be read.

    The first of the engine's gates locks the slot for the life of its descriptor.
    """
    with contextlib.suppress(OSError, HostprepError):
        if not is_tracked(fd) or not try_lock_range(fd, slot_offset(GATE), SLOT_BYTES):
            return
        before = read_slot(fd, GATE)
        made_at_s = unpack_header(read_whole(fd)).created_at_s
        slot = Slot(
            sequence=before.sequence + 1 if before else 1,
            state=state,
            process=current_process(),
            joined_at_s=since_s,
            took_s=max(0.0, time.time() - made_at_s),
            reason=why,
        )
        os.pwrite(fd, pack_slot(slot), slot_offset(GATE))
