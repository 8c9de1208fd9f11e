"""One rank's entry on the rank board, where several registrations make up its memory."""

from __future__ import annotations

from hostprep.cuda.board import RankBoard, board_path
from hostprep.errors import BusyError, FailedError, NotReadyError

TYPE_CHECKING = False
if TYPE_CHECKING:
    import logging

    from hostprep.client.attach import Attachment
    from hostprep.cuda.registration_state import Board


def open_board(
    attachment: Attachment, *, rank: int, world: int, log: logging.Logger
) -> RankBoard | None:
    """Take the rank's entry on its region's board; None, with a warning, where there is no board.

    Raises BadInputError (RankTaken) where another engine has it.
    """
    try:
        return RankBoard.open(
            board_path(attachment), generation=attachment.lease_id, world=world, rank=rank
        )
    except (BusyError, FailedError, NotReadyError) as error:
        log.warning("No rank board, `hostprep status` shows no ranks: %s", error)
        return None


class RankProgress:
    """The sums of a rank's registrations, written to the board."""

    def __init__(self, board: Board) -> None:
        self.board = board
        self._done_bytes: dict[int, int] = {}
        self._size_bytes: dict[int, int] = {}
        self._longest_s = 0.0

    def part(
        self, offset_bytes: int, *, size_bytes: int | None = None, sets_state: bool = True
    ) -> PartProgress:
        """Return what the registration of the memory at that offset reports to.

        `size_bytes`: counted from now on, not only once it is reported. `sets_state`: whether this
        registration begins and ends the rank's.
        """
        if size_bytes is not None:
            self._size_bytes[offset_bytes] = size_bytes
        return PartProgress(self, offset_bytes, sets_state=sets_state)

    def remove(self, offset_bytes: int) -> None:
        """Stop counting a part."""
        self._done_bytes.pop(offset_bytes, None)
        self._size_bytes.pop(offset_bytes, None)

    def update(
        self, offset_bytes: int, done_bytes: int, size_bytes: int, longest_chunk_s: float
    ) -> None:
        """Take a part's progress, and write the sums."""
        self._done_bytes[offset_bytes] = done_bytes
        self._size_bytes[offset_bytes] = size_bytes
        self._longest_s = max(self._longest_s, longest_chunk_s)
        self.board.progress(
            sum(self._done_bytes.values()), sum(self._size_bytes.values()), self._longest_s
        )


class PartProgress:
    """The board of one registration among several (hostprep.cuda.registration_state.Board)."""

    def __init__(self, rank: RankProgress, offset_bytes: int, *, sets_state: bool) -> None:
        self._rank = rank
        self._offset_bytes = offset_bytes
        self._sets_state = sets_state

    def initializing(self) -> None:
        """Begin, or withdraw: in either case this rank is not ready."""
        if self._sets_state:
            self._rank.board.initializing()

    def progress(self, done_bytes: int, size_bytes: int, longest_chunk_s: float = 0.0) -> None:
        """Report the progress of this part."""
        self._rank.update(self._offset_bytes, done_bytes, size_bytes, longest_chunk_s)

    def ready(self) -> None:
        """Report that all parts so far are registered."""
        if self._sets_state:
            self._rank.board.ready()

    def failed(self, reason: str) -> None:
        """Report that the memory will not be ready."""
        if self._sets_state:
            self._rank.board.failed(reason)
