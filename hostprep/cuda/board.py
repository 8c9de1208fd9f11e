"""The rank board: where the ranks of one engine on this node report their state."""

from __future__ import annotations

import fcntl
import os
import threading
import time
from dataclasses import replace

from hostprep.cuda.board_layout import (
    FAILED,
    INITIALIZING,
    JOINED,
    MAX_WORLD,
    READY,
    SLOT_BYTES,
    Header,
    Holes,
    Slot,
    generation_of,
    pack_header,
    pack_slot,
    slot_offset,
    unpack_header,
)
from hostprep.cuda.board_view import (
    LONG_TORN_S,
    BoardView,
    announce_gate,
    read_board,
    read_slot,
    read_whole,
    view_of,
)
from hostprep.cuda.chunks import pool_of
from hostprep.errors import BadInputError, BusyError, FailedError, HostprepError, NotReadyError
from hostprep.linux.files import (
    closing_fd,
    from_os_error,
    give_name,
    open_folder,
    open_state_file,
    open_tmpfile,
)
from hostprep.linux.locks import (
    close_tracked,
    is_range_locked,
    is_tracked,
    lies_at,
    track_fd,
    try_lock,
    try_lock_range,
)
from hostprep.linux.processes import current_process

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from hostprep.client.attach import Attachment

_MODE = 0o660
_JOIN_PAUSE_S = 0.01


def board_path(attachment: Attachment, region: str | None = None) -> str:
    """Return where the board of an attachment's run lies.

    All ranks must use the same one: with several regions a lease, name the first of them.
    """
    return pool_of(attachment).board(region or attachment.region.name)


class RankBoard:
    """One rank's slot on the board, for this process alone; a forked child has none.

    Calls are safe from any thread. `failed` is final for the run.
    """

    def __init__(self, path: str, world: int, rank: int, fd: int, slot: Slot) -> None:
        """Use `RankBoard.open`."""
        self.path = path
        self.rank = rank
        self.world = world
        self._fd = fd
        self._slot = slot
        self._begun_s: float | None = None
        self._lock = threading.Lock()
        self._opened_at_s = time.time()

    @classmethod
    def open(
        cls, path: str, *, generation: str, world: int, rank: int, wait_s: float = 5.0
    ) -> RankBoard:
        """Join the board of a run; it is made where it is missing or an earlier run's.

        `generation` is what all ranks of this run, and no other run, have in common: the lease's
        id. Waits at most `wait_s` for ranks of an earlier run to end. Raises BadInputError for
        another world size or a rank that was reported already, NotReadyError for a board of
        another version whose ranks live, BusyError, FailedError.
        """
        _check(world, rank)
        header = Header(world, generation_of(generation), time.time())
        deadline_s = time.monotonic() + wait_s
        while True:
            try:
                board = _join(path, header, rank, deadline_s)
            except BusyError:
                if time.monotonic() >= deadline_s:
                    raise
                board = None
            except OSError as error:
                raise _open_error(error, path) from error
            if board is not None:
                return cls(path, world, rank, *board)
            if time.monotonic() >= deadline_s + wait_s:
                raise FailedError(f"{path} was taken away again and again while we joined")
            time.sleep(_JOIN_PAUSE_S)

    @staticmethod
    def look(path: str) -> BoardView:
        """Return a board's contents, for any process that may read it. Raises HostprepError."""
        return read_board(path)

    def initializing(self) -> None:
        """Report that this rank registers. Raises FailedError, BadInputError."""
        self._begun_s = time.monotonic()
        self._write(state=INITIALIZING)

    def ready(self, note: str = "") -> None:
        """Report that this rank is done, the engine's own work after registering included.

        `note`: what people should know of it, such as that its memory is not registered.
        """
        self._write(state=READY, reason=note, took_s=self._elapsed_s())

    def failed(self, reason: str) -> None:
        """Report that this rank will not be ready in this run, and why: the gate stays closed."""
        self._write(state=FAILED, reason=reason, took_s=self._elapsed_s())

    def progress(
        self,
        done_bytes: int,
        size_bytes: int,
        longest_chunk_s: float = 0.0,
        holes: Holes = (),
    ) -> None:
        """Report how much is registered: for people, and for a gate that grows."""
        self._write(
            done_bytes=done_bytes,
            holes=holes,
            size_bytes=size_bytes,
            longest_chunk_s=longest_chunk_s,
            took_s=self._elapsed_s(),
        )

    def read(self) -> BoardView:
        """Return what all ranks reported. Raises HostprepError."""
        self._check_open()  # before the lock, which a forked child may find held forever
        with self._lock:
            self._check_open()
            return view_of(self._fd, own_rank=self.rank, torn_s=LONG_TORN_S)

    def announce(self, state: str, why: str = "") -> None:
        """Write the gate's state into the board, for `hostprep status`, where that is possible."""
        announce_gate(self._fd, state, why, since_s=self._opened_at_s)

    def close(self) -> None:
        """Leave. A rank that left counts as ended: a gate that is not open yet stays closed."""
        if is_tracked(self._fd):  # as in `read`
            with self._lock:
                close_tracked(self._fd)

    def _elapsed_s(self) -> float:
        return 0.0 if self._begun_s is None else time.monotonic() - self._begun_s

    def _write(self, **changes: Any) -> None:
        self._check_open()  # as in `read`
        with self._lock:
            self._check_open()
            if self._slot.state == FAILED and changes.get("state", FAILED) != FAILED:
                raise BadInputError(
                    f"rank {self.rank} has failed, which is final for this run",
                    reason="RankFailed",
                    remedy="start the engine again: a new lease is a new run",
                )
            slot = replace(self._slot, sequence=self._slot.sequence + 1, **changes)
            try:
                os.pwrite(self._fd, pack_slot(slot), slot_offset(self.rank))
            except OSError as error:
                raise from_os_error(error, f"write {self.path}") from error
            self._slot = slot

    def _check_open(self) -> None:
        if not is_tracked(self._fd):
            raise FailedError(
                "the rank board is closed, or belongs to the process that this one was forked from",
                reason="BoardClosed",
                remedy="open it in the process that registers",
            )


def _join(path: str, header: Header, rank: int, deadline_s: float) -> tuple[int, Slot] | None:
    """Take our rank's slot; None where the file is another by now. Raises BusyError, OSError."""
    opened = _open_or_make(path, header)
    if opened is None:
        return None
    fd = track_fd(opened)
    try:
        _lock_until(fd, deadline_s)
        try:
            if lies_at(path, fd):
                if _is_of_run(fd, header):
                    return fd, _take_slot(fd, rank)
                os.unlink(path)
        finally:
            fcntl.flock(fd, fcntl.LOCK_UN)
    except BaseException:
        close_tracked(fd)
        raise
    close_tracked(fd)
    return None


def _open_or_make(path: str, header: Header) -> int | None:
    try:
        return open_state_file(path, os.O_RDWR)
    except FileNotFoundError:
        pass
    parent, name = os.path.split(path)
    with closing_fd(open_folder(parent)) as folder:
        fd = open_tmpfile(folder, _MODE)
        try:
            # All of it is written: a full file system must show now, not later.
            os.pwrite(fd, pack_header(header).ljust(slot_offset(header.world), b"\0"), 0)
            if give_name(folder, fd, name):
                return fd
        except BaseException:
            os.close(fd)
            raise
    os.close(fd)
    return None


def _lock_until(fd: int, deadline_s: float) -> None:
    """Lock out others that join or replace this file; each does so for microseconds."""
    while not try_lock(fd, exclusive=True):
        if time.monotonic() >= deadline_s:
            raise BusyError("another rank has been joining the board for too long")
        time.sleep(_JOIN_PAUSE_S)


def _is_of_run(fd: int, header: Header) -> bool:
    """Tell whether a board is of our run; another may be replaced, once no rank lives on it.

    Raises BusyError or NotReadyError while one does, and BadInputError where the board is of our
    run and for another world size.
    """
    try:
        found = unpack_header(read_whole(fd))
    except NotReadyError:
        if _has_ranks(fd):
            raise
        return False
    if found.generation == header.generation:
        if found.world != header.world:
            raise BadInputError(
                f"this rank is of a world of {header.world}, the ranks before it of {found.world}",
                reason="OtherWorld",
                remedy="give all ranks of the engine the same world size",
            )
        return True
    if _has_ranks(fd):
        raise BusyError(
            "ranks of another run still live on this board",
            reason="OtherRun",
            remedy="end them first: each run needs a lease of its own",
        )
    return False


def _has_ranks(fd: int) -> bool:
    """Tell whether a rank lives on a board, of any version: all lock their slots, from here on.

    A gate, whose slot is before, does not count: a scheduler may outlive its ranks.
    """
    return is_range_locked(fd, slot_offset(0), 0)


def _take_slot(fd: int, rank: int) -> Slot:
    """Lock our slot for life and enter our process. Raises BadInputError where it is taken."""
    me = current_process()
    lives = not try_lock_range(fd, slot_offset(rank), SLOT_BYTES)
    before = read_slot(fd, rank)
    if lives or (before is not None and before.process != me):
        whose = "a process that lives" if lives else "a process that has ended"
        raise BadInputError(
            f"rank {rank} of this run was reported by {whose}",
            reason="RankTaken",
            remedy="give each process a rank of its own; after a rank's end, start the whole"
            " engine again: a new lease is a new run",
        )
    slot = before or Slot(1, JOINED, me, time.time())
    os.pwrite(fd, pack_slot(slot), slot_offset(rank))
    return slot


def _check(world: int, rank: int) -> None:
    if not 1 <= world <= MAX_WORLD:
        raise BadInputError(
            f"a world of {world} ranks cannot be",
            reason="BadWorld",
            remedy=f"give 1 to {MAX_WORLD}",
        )
    if not 0 <= rank < world:
        raise BadInputError(
            f"rank {rank} is not of a world of {world}",
            reason="BadRank",
            remedy=f"give 0 to {world - 1}",
        )


def _open_error(error: OSError, path: str) -> HostprepError:
    plain = from_os_error(error, f"open {path}")
    return type(plain)(
        plain.message,
        reason=plain.reason,
        remedy="mount the pool's folder writable and run as its group, or report to the gate over"
        " the engine's own channel: Gate.report",
    )
