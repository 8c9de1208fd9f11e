"""The gate: while it is closed, the engine serves from GPU memory alone; all ranks ready open it.

Ranks of this node report on the board, others over the engine's own channel. The engine polls one
attribute. Everything that takes a system call (the board, whether its ranks live, the deadline) is
the work of a thread that ends as soon as the gate is decided.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from dataclasses import dataclass

from hostprep.cuda.board_layout import (
    CLOSED,
    DEGRADED,
    FAILED,
    INITIALIZING,
    JOINED,
    MAX_WORLD,
    OPEN,
    READY,
    Holes,
)
from hostprep.errors import BadInputError, HostprepError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Protocol

    from hostprep.cuda.board_view import BoardView

    class Board(Protocol):
        """What a gate needs of a board: a rank's own, or a reader of one."""

        def read(self) -> BoardView | None:
            """Return the board's contents; None where there is no board yet."""

        def announce(self, state: str, why: str = "") -> None:
            """Write the gate's state into the board."""


_POLL_S = 0.02
_STATES = {state.upper(): state for state in (JOINED, INITIALIZING, READY, FAILED)}
_SHOWN_RANKS = 8
ALL = 1 << 62
"""More bytes than any rank has: all of its part is registered."""


@dataclass(frozen=True)
class Report:
    """A rank's last report over the engine's own channel."""

    state: str
    reason: str = ""


@dataclass(frozen=True)
class Verdict:
    """A gate's state: Closed, Open or Degraded, and why, for people."""

    state: str
    why: str = ""


def common_mark(world: int, board: BoardView | None) -> int:
    """Return up to where all ranks have registered, each from its slice's start on; pure.

    The mark of the rank that is furthest behind, `ALL` where every rank is ready; 0 where a rank is
    missing on the board. What a rank that failed has registered stays so while its process lives.
    """
    if board is None or len(board.ranks) < world:
        return 0
    return min(ALL if r.slot.state == READY else r.slot.mark_bytes for r in board.ranks)


def common_holes(board: BoardView | None) -> Holes:
    """Return what one rank or another passed over, in ascending order; pure.

    A rank that is behind may add more, but none below the common mark.
    """
    holes: list[tuple[int, int]] = []
    for hole in sorted(hole for rank in board.ranks for hole in rank.slot.holes) if board else ():
        if holes and hole[0] <= holes[-1][1]:
            last = holes.pop()
            hole = (last[0], max(last[1], hole[1]))  # noqa: PLW2901
        holes.append(hole)
    return tuple(holes)


def judge(
    world: int, reports: Mapping[int, Report], board: BoardView | None, *, grows: bool = False
) -> Verdict:
    """Return the verdict that follows from channel and board; pure.

    A rank is ready if both agree: one that is ready by the channel and still registers by the
    board is not. One rank that failed, or ended, degrades the gate. A gate that grows opens with
    the first bytes that all ranks have registered.
    """
    if board is not None and board.world != world:
        why = f"the rank board is for {board.world} ranks, this gate for {world}"
        return Verdict(DEGRADED, why)
    states: dict[int, list[str]] = {}
    for rank, report in sorted(reports.items()):
        if report.state == FAILED:
            why = f"rank {rank} failed: {report.reason or 'no reason given'}"
            return Verdict(DEGRADED, why)
        states.setdefault(rank, []).append(report.state)
    for view in board.ranks if board else ():
        if view.trouble is not None:
            return Verdict(DEGRADED, view.trouble)
        states.setdefault(view.rank, []).append(view.slot.state)
    ready = {rank for rank, reported in states.items() if set(reported) == {READY}}
    if len(ready) == world or (grows and common_mark(world, board)):
        return Verdict(OPEN)
    if board is not None and board.removed:
        return Verdict(DEGRADED, "the rank board was removed, or a later run has made another")
    return Verdict(CLOSED, _waiting(world, ready, states))


def _waiting(world: int, ready: set[int], states: Mapping[int, list[str]]) -> str:
    missing = [rank for rank in range(world) if rank not in ready]
    shown = ", ".join(
        f"{rank} ({states[rank][-1].lower() if rank in states else 'not reported'})"
        for rank in missing[:_SHOWN_RANKS]
    )
    more = f" and {len(missing) - _SHOWN_RANKS} more" if len(missing) > _SHOWN_RANKS else ""
    return f"{len(ready)} of {world} ranks ready; waiting for {shown}{more}"


class Gate:
    """Polled by the engine. Once open it stays open, once degraded it stays degraded.

    `board` is this process's RankBoard, or a BoardReader in a process that is no rank; without
    one, `report` is all there is. `deadline_s`: for how many seconds a gate that is shut may see
    no progress on the board, from now on; then it is degraded. `on_degraded(why)` and `on_open()`
    are called once, by whichever thread decides; without `on_degraded` a warning is logged. Safe
    from any thread.

    With `grows`, which needs the board of all ranks, it opens with the first bytes that all of them
    have registered, and `usable_bytes` grows from there, but for the `holes`. `on_grown()` is
    called once that is all of it. What fails later leaves it open.
    """

    def __init__(
        self,
        world: int,
        board: Board | None = None,
        *,
        deadline_s: float | None = None,
        grows: bool = False,
        on_degraded: Callable[[str], object] | None = None,
        on_open: Callable[[], object] | None = None,
        on_grown: Callable[[], object] | None = None,
    ) -> None:
        """Begin to watch. Raises BadInputError for an invalid world size."""
        if not 1 <= world <= MAX_WORLD:
            raise BadInputError(
                f"a gate for {world} ranks cannot be",
                reason="BadWorld",
                remedy=f"give 1 to {MAX_WORLD}",
            )
        self._is_open = False
        self._grows = grows
        self.usable_bytes = 0
        """Of each rank's part, from its start on: what all ranks have registered. 0 while it is
        closed, `ALL` once all are ready. An attribute: no lock, no system call."""
        self.holes: Holes = ()
        """What is not to be used below that, because a rank could not register it; read it after
        `usable_bytes`, and those below that are complete."""
        self._verdict = judge(world, {}, None)
        self._world = world
        self._board = board
        self._reports: dict[int, Report] = {}
        self.deadline_s = deadline_s
        self.opened_after_s: float | None = None
        """Seconds from the gate's creation to its opening; None until then."""
        self._begun_s = self._moved_s = time.monotonic()
        self._done_bytes = 0
        self._on_degraded = on_degraded or _log
        self._on_open = on_open
        self._on_grown = on_grown
        self._lock = threading.Lock()
        self._read_lock = threading.Lock()
        self._decided = threading.Event()
        self._closed = threading.Event()
        _gates.add(self)
        if board is not None or deadline_s is not None:
            try:
                threading.Thread(target=self._watch, name="hostprep-gate", daemon=True).start()
            except RuntimeError as error:  # no thread can be had: a limit of the container
                self._decide(Verdict(DEGRADED, f"the gate cannot be watched: {error}"))

    @property
    def is_open(self) -> bool:
        """Whether the host tier may be used: no lock, no system call."""
        return self._is_open

    @property
    def state(self) -> str:
        """Closed, Open or Degraded."""
        return self._verdict.state

    @property
    def why(self) -> str:
        """Why it is not open, in words; empty once it is."""
        return self._verdict.why

    def report(self, rank: int, state: str, reason: str = "") -> None:
        """Take a rank's report over the engine's own channel: Initializing, Ready or Failed.

        The last report of a rank counts, and none once the gate is decided. Raises BadInputError
        for an invalid rank or state.
        """
        known = _STATES.get(str(state).upper())
        if known is None or not 0 <= rank < self._world:
            raise BadInputError(
                f"rank {rank} of a world of {self._world} cannot be {state!r}",
                reason="BadReport",
                remedy="report Initializing, Ready or Failed, for ranks counted from 0",
            )
        with self._lock:
            self._reports[rank] = Report(known, reason)
        self._evaluate()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until the gate is decided; tell whether it is open."""
        self._decided.wait(timeout_s)
        return self._is_open

    def close(self) -> None:
        """Stop watching: a gate that is not open by now stays closed, silently."""
        self._closed.set()
        self._decide(Verdict(DEGRADED, "the gate was closed by the engine"), silently=True)

    def _watch(self) -> None:
        while not self._decided.wait(_POLL_S):
            self._evaluate()
        while self._is_open and self.usable_bytes < ALL and not self._closed.wait(_POLL_S):
            self._grow()

    def _grow(self) -> None:
        """Read the common mark again; what cannot be read any more leaves it where it is."""
        try:
            with self._read_lock:
                board = self._board.read() if self._board is not None else None
        except (HostprepError, OSError):
            self._closed.set()
            return
        # Never less: a rank that takes its part back, at its end, has no copies any more.
        mark = common_mark(self._world, board)
        if mark > self.usable_bytes:
            self.holes = common_holes(board)  # before the mark, for those who read it first
            self.usable_bytes = mark
        if mark >= ALL:
            _call(self._on_grown)
        for rank in board.ranks if board is not None else ():
            if rank.trouble is not None and rank.slot.mark_bytes <= mark:
                self._closed.set()  # it is furthest behind, and comes no further

    def _evaluate(self) -> None:
        """Judge again, and act where that decides the gate."""
        if self._verdict.state != CLOSED:
            return
        with self._lock:
            reports = dict(self._reports)
        try:
            with self._read_lock:
                board = self._board.read() if self._board is not None else None
            verdict = judge(self._world, reports, board, grows=self._grows)
            mark = common_mark(self._world, board) if self._grows else ALL
            done_bytes = sum(rank.slot.mark_bytes for rank in board.ranks) if board else 0
        except (HostprepError, OSError) as error:
            verdict = Verdict(DEGRADED, getattr(error, "message", f"the rank board: {error}"))
            done_bytes, mark, board = 0, 0, None
        if done_bytes != self._done_bytes:
            self._done_bytes, self._moved_s = done_bytes, time.monotonic()
        is_late = (
            self.deadline_s is not None and time.monotonic() - self._moved_s >= self.deadline_s
        )
        if verdict.state == CLOSED and is_late:
            why = f"no progress within {self.deadline_s:g} s: {verdict.why}"
            verdict = Verdict(DEGRADED, why)
        self._decide(verdict, usable_bytes=mark, holes=common_holes(board))

    def _decide(
        self,
        verdict: Verdict,
        *,
        usable_bytes: int = 0,
        holes: Holes = (),
        silently: bool = False,
    ) -> None:
        with self._lock:
            if self._verdict.state != CLOSED:
                return
            self._verdict = verdict
            if verdict.state == CLOSED:
                return
            if verdict.state == OPEN:
                self.holes = holes
                self.usable_bytes = usable_bytes or ALL  # ready by the channel alone: all of it
            self._is_open = verdict.state == OPEN
            if self._is_open:
                self.opened_after_s = time.monotonic() - self._begun_s
        if self._board is not None:
            self._board.announce(verdict.state, verdict.why)
        self._decided.set()
        if self._is_open:
            _call(self._on_open)
            if self.usable_bytes >= ALL:
                _call(self._on_grown)
        elif not silently:
            _call(lambda: self._on_degraded(verdict.why))

    def _close_in_child(self) -> None:
        """In a forked child, where no thread watches: stay as it is, for good."""
        self._lock = threading.Lock()
        self._read_lock = threading.Lock()
        self._closed = threading.Event()
        if self._verdict.state == CLOSED:
            self._verdict = Verdict(DEGRADED, "this process was forked while the gate was closed")
        self._decided = threading.Event()
        self._decided.set()


_gates: weakref.WeakSet[Gate] = weakref.WeakSet()


def _after_fork() -> None:
    for gate in tuple(_gates):
        gate._close_in_child()  # noqa: SLF001 - of this module


os.register_at_fork(after_in_child=_after_fork)


def _call(callback: Callable[[], object] | None) -> None:
    """Call a callback of the engine; its errors are logged and do not become the gate's."""
    try:
        if callback is not None:
            callback()
    except Exception:
        import logging

        logging.getLogger("hostprep.register").exception("a gate's callback failed")


def _log(why: str) -> None:
    import logging

    logging.getLogger("hostprep.register").warning(
        "serving from GPU memory alone, without the host tier, until the engine is restarted: %s",
        why,
    )
