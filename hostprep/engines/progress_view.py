"""What one rank tells the board, whose buffers are registered one after the other."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from hostprep.cuda.listeners import Board

__all__ = ["PartTold", "RankTold"]


class RankTold:
    """A rank's place on the board, as its buffers' registrations share it."""

    def __init__(self, board: Board) -> None:
        self.board = board
        self.done_bytes: dict[int, int] = {}
        self.size_bytes: dict[int, int] = {}
        self.longest_s = 0.0

    def part(self, offset_bytes: int) -> PartTold:
        """Return what the registration of the buffer at that offset tells."""
        return PartTold(self, offset_bytes)

    def without(self, offset_bytes: int) -> None:
        """Count a buffer no more."""
        self.done_bytes.pop(offset_bytes, None)
        self.size_bytes.pop(offset_bytes, None)

    def add_up(self) -> None:
        """Write the sums."""
        self.board.progress(
            sum(self.done_bytes.values()), sum(self.size_bytes.values()), self.longest_s
        )


class PartTold:
    """What a Registration calls its board."""

    def __init__(self, rank: RankTold, offset_bytes: int) -> None:
        self._rank = rank
        self._offset_bytes = offset_bytes

    def initializing(self) -> None:
        """Begin, or withdraw: in either case this rank is not ready."""
        self._rank.board.initializing()

    def progress(self, done_bytes: int, size_bytes: int, longest_chunk_s: float = 0.0) -> None:
        """Say how far this buffer is."""
        self._rank.done_bytes[self._offset_bytes] = done_bytes
        self._rank.size_bytes[self._offset_bytes] = size_bytes
        self._rank.longest_s = max(self._rank.longest_s, longest_chunk_s)
        self._rank.add_up()

    def ready(self) -> None:
        """Say that all buffers so far are registered."""
        self._rank.board.ready()

    def failed(self, reason: str) -> None:
        """Say that the engine will not start."""
        self._rank.board.failed(reason)
