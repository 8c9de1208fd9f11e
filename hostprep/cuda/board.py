"""The rank board: where the ranks of one engine on this node say how far they are.

One small file beside the region (`<pool>/state/<region>/board`): that folder is the pool's group's
to write to, and comes with the region where a device plugin hands it out. Each rank writes one
slot, which it has locked for as long as it lives. A file is for one run (one lease) only: the first
rank of a new run makes a new one, and what an earlier run left can neither be read nor be written
by it. No process is needed to keep it.
"""

from __future__ import annotations

import os
import threading
import time
from dataclasses import replace

from hostprep.cuda.board_join import JOIN_PAUSE_S, join
from hostprep.cuda.board_layout import (
    FAILED,
    INITIALIZING,
    MAX_WORLD,
    READY,
    Header,
    Slot,
    generation_of,
    pack_slot,
    slot_offset,
)
from hostprep.cuda.board_view import (
    LONG_TORN_S,
    Announcer,
    BoardReader,
    BoardView,
    RankView,
    look,
    view_of,
)
from hostprep.cuda.slices import pool_of
from hostprep.errors import BadInputError, BusyError, FailedError, HostprepError
from hostprep.linux.files import from_os_error
from hostprep.linux.fork_safe_fds import close_own, is_own

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from hostprep.client.attachment import Attachment

__all__ = ["BoardReader", "BoardView", "RankBoard", "RankView", "board_path"]


def board_path(attachment: Attachment, region: str | None = None) -> str:
    """Return where the board of an attachment's run lies.

    All ranks must mean the same one: with several regions a lease, name the first of them.
    """
    return pool_of(attachment).board(region or attachment.region.name)


class RankBoard:
    """One rank's place on the board, for this process alone; a forked child has none.

    Calls are safe from any thread. `failed` is final for the run.
    """

    def __init__(self, path: str, fd: int, header: Header, rank: int, slot: Slot) -> None:
        """Use `RankBoard.open`."""
        self.path = path
        self.rank = rank
        self.world = header.world
        self._fd = fd
        self._slot = slot
        self._begun_s: float | None = None
        self._lock = threading.Lock()
        self._announcer = Announcer(fd)

    @classmethod
    def open(
        cls, path: str, *, generation: str, world: int, rank: int, wait_s: float = 5.0
    ) -> RankBoard:
        """Join the board of a run, made where it is missing or an earlier run's.

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
                board = join(path, header, rank, deadline_s)
            except BusyError:
                if time.monotonic() >= deadline_s:
                    raise
                board = None
            except OSError as error:
                raise _cannot(error, path) from error
            if board is not None:
                return cls(path, *board)
            if time.monotonic() >= deadline_s + wait_s:
                raise FailedError(f"{path} was taken away again and again while we joined")
            time.sleep(JOIN_PAUSE_S)

    @staticmethod
    def look(path: str) -> BoardView:
        """Return what a board says, for anybody who may read it. Raises HostprepError."""
        return look(path)

    def initializing(self) -> None:
        """Say that this rank registers. Raises FailedError, BadInputError."""
        self._begun_s = time.monotonic()
        self._write(state=INITIALIZING)

    def ready(self) -> None:
        """Say that this rank is done, the engine's own work after registering included."""
        self._write(state=READY, took_s=self._so_far_s())

    def failed(self, reason: str) -> None:
        """Say that this rank will not be ready in this run, and why: the gate stays closed."""
        self._write(state=FAILED, reason=reason, took_s=self._so_far_s())

    def progress(self, done_bytes: int, size_bytes: int, longest_chunk_s: float = 0.0) -> None:
        """Say how much is registered, for people; the gate does not look at it."""
        self._write(
            done_bytes=done_bytes,
            size_bytes=size_bytes,
            longest_chunk_s=longest_chunk_s,
            took_s=self._so_far_s(),
        )

    def read(self) -> BoardView:
        """Return what all ranks say. Raises HostprepError."""
        self._check_open()  # before the lock, which a forked child may find held for ever
        with self._lock:
            self._check_open()
            return view_of(self._fd, own_rank=self.rank, torn_s=LONG_TORN_S)

    def announce(self, state: str, why: str = "") -> None:
        """Write the gate's state into the board, for `hostprep status`; where that can be."""
        self._announcer.announce(state, why)

    def close(self) -> None:
        """Leave. A rank that left counts as ended: a gate that is not open yet stays closed."""
        if is_own(self._fd):  # as in `read`
            with self._lock:
                close_own(self._fd)

    def _so_far_s(self) -> float:
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
        if not is_own(self._fd):
            raise FailedError(
                "the rank board is closed, or belongs to the process that this one was forked from",
                reason="BoardClosed",
                remedy="open it in the process that registers",
            )


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


def _cannot(error: OSError, path: str) -> HostprepError:
    plain = from_os_error(error, f"open {path}")
    return type(plain)(
        plain.message,
        reason=plain.reason,
        remedy="mount the pool's folder writable and run as its group, or tell the gate over the"
        " engine's own channel: Gate.report",
    )
