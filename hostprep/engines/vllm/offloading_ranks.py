"""One rank's registration: begun at the first poll, told to the board, taken back at the end.

vLLM's own worker registers in its constructor, before the engine serves
(vllm/v1/kv_offload/cpu/gpu_worker.py, pin_mmap_region). Here the constructor makes the rank known
to the board and no more.
"""

from __future__ import annotations

from dataclasses import dataclass

from hostprep.cuda.board import RankBoard, board_path
from hostprep.cuda.register import register
from hostprep.errors import HostprepError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from hostprep.client.attachment import Attachment
    from hostprep.cuda.registration import Registration

__all__ = ["Rank", "RankRegistration"]


@dataclass(frozen=True)
class Rank:
    """Which part of the region is a rank's, and how it is registered."""

    number: int
    world: int
    offset_bytes: int
    size_bytes: int
    row_bytes: int
    registers: bool
    mode: str
    deadline_s: float
    obstacle: str = ""
    """Why the gate can never open for this rank; it says so at once."""


class RankRegistration:
    """Of one rank, in its process. `poll` is called at each step, and costs an attribute."""

    def __init__(self, memory: Attachment, rank: Rank) -> None:
        """Take the rank's place on the board; register only where that is to be done at once.

        Raises BadInputError where the rank is taken (two engines on one region), HostprepError.
        """
        self._memory = memory
        self._rank = rank
        self._registration: Registration | None = None
        self._has_begun = False
        self._board = RankBoard.open(
            board_path(memory),
            generation=memory.lease_id,
            world=rank.world,
            rank=rank.number,
        )
        try:
            if rank.obstacle:
                self._has_begun = True
                self._board.failed(rank.obstacle)
            elif rank.mode == "sync":
                self.poll()
        except BaseException:
            self._board.close()
            raise

    def poll(self) -> None:
        """Begin, if this is the first time."""
        if self._has_begun:
            return
        self._has_begun = True
        if not self._rank.registers:
            self._board.initializing()
            self._board.ready()
            return
        try:
            self._registration = self._register()
        except HostprepError as error:
            self._board.failed(str(error))
            if self._rank.mode == "sync":
                raise

    def _register(self) -> Registration:
        rank = self._rank
        return register(
            self._memory,
            mode=rank.mode,
            offset_bytes=rank.offset_bytes,
            size_bytes=rank.size_bytes,
            row_bytes=rank.row_bytes,
            deadline_s=rank.deadline_s,
            board=self._board,
        )

    def close(self) -> None:
        """Take the registration back and leave the board; once copies are done.

        Raises FailedError where the driver did not take all of it back.
        """
        try:
            if self._registration is not None:
                self._registration.close()
        finally:
            self._board.close()
