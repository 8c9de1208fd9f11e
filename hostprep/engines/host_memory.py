"""One rank's host buffers in its share of the lease, and its entry on the rank board.

Used by plugins inside of SGLang and vLLM: imports torch.
"""

from __future__ import annotations

import collections
import functools
import logging
import math
import time
import weakref
from typing import TYPE_CHECKING, Any

from hostprep.backing import GIB
from hostprep.client.attach import Attachment
from hostprep.cuda.board import RankBoard, board_path
from hostprep.cuda.registration import Registration, register
from hostprep.engines.allocator import Allocation, Allocator, Requester, share_of
from hostprep.errors import BusyError, FailedError, HostprepError, NotReadyError
from hostprep.units import format_bytes

if TYPE_CHECKING:
    from hostprep.cuda.board_layout import Holes
    from hostprep.cuda.registration_state import Board, Progress

_log = logging.getLogger("hostprep.engines")
_LOG_INTERVAL_S = 10.0


class HostMemory:
    """A rank's share of a region; used from one thread."""

    def __init__(
        self,
        attachment: Attachment,
        *,
        rank: int,
        ranks: int,
        requester: Requester,
        log: logging.Logger = _log,
    ) -> None:
        """Take an attachment over, of which the rank gets its share; views may outlive this.

        `rank`: this process's number among the `ranks` that share the region. `log`: one whose
        lines people see in this engine. Raises BadInputError
        (RankTaken) where another engine under the same lease has this share; the attachment is
        closed then.
        """
        try:
            share = share_of(attachment.size_bytes, attachment.page_bytes, ranks=ranks, index=rank)
            self._board = open_board(attachment, rank=rank, world=ranks, log=log)
        except BaseException:
            attachment.close()
            raise
        self._log = log
        self._attachment = attachment
        self._allocator = Allocator(share, requester=requester)
        self._size_bytes = share.size_bytes
        self._registrations: dict[int, Registration] = {}
        self._unused: collections.deque[Allocation] = collections.deque()
        self._progress = RankProgress(self._board) if self._board is not None else None
        log.info(
            "Host pools in prepared memory: region %s, %d bytes from %d on",
            attachment.region.name,
            share.size_bytes,
            share.offset_bytes,
        )

    @property
    def free_bytes(self) -> int:
        """What is left of the share."""
        self._sweep()
        return self._allocator.free_bytes

    @property
    def used_bytes(self) -> int:
        """What is allocated of it, whole pages."""
        return self._size_bytes - self.free_bytes

    def check(self, size_bytes: int) -> None:
        """Raise BadInputError, with both numbers, where that many bytes do not fit."""
        if size_bytes > self.free_bytes:
            raise self._allocator.too_small(size_bytes)

    def owns(self, address: int) -> bool:
        """Tell whether an address lies in the region."""
        start = self._attachment.address
        return start <= address < start + self._attachment.size_bytes

    def tensor(self, dims: tuple[int, ...], dtype: Any, *, row_bytes: int | None) -> Any:
        """Return a tensor over the next free bytes of the share.

        Registered first where `row_bytes` is a number, before it returns: no chunk ends inside a
        row. Its place is free again once the last view of the tensor is gone.
        Raises BadInputError where it does not fit, and what registering raises.
        """
        import torch

        self._sweep()
        count = math.prod(dims)
        size_bytes = count * torch.empty((), dtype=dtype).element_size()
        place = self._allocator.allocate(size_bytes)
        try:
            end = place.offset_bytes + size_bytes
            view = self._attachment.buffer[place.offset_bytes : end]
            tensor = torch.frombuffer(view, dtype=dtype, count=count).view(dims)
            self._register(place, row_bytes)
        except BaseException:
            self._allocator.free(place)
            raise
        # torch holds on to the view for as long as it has the storage. The garbage collector may
        # run this anywhere: it only notes the place. A process that ends leaves it to the kernel.
        weakref.finalize(view, functools.partial(self._unused.append, place)).atexit = False
        return tensor

    def unregister(self, address: int) -> None:
        """Take the registration of the buffer at that address back, while it is mapped."""
        self._unregister(address - self._attachment.address)

    def close(self) -> None:
        """Take all registrations back, the last first, and close the attachment."""
        for offset_bytes in sorted(self._registrations, reverse=True):
            self._unregister(offset_bytes)
        if self._board is not None:
            self._board.close()
        self._attachment.close()

    def _register(self, place: Allocation, row_bytes: int | None) -> None:
        if row_bytes is None:
            if self._board is not None:
                self._board.ready()
            return
        self._registrations[place.offset_bytes] = register(
            self._attachment,
            mode="sync",
            offset_bytes=place.offset_bytes,
            size_bytes=place.size_bytes,
            row_bytes=row_bytes,
            on_progress=ProgressLog(
                self._log, f"{self._attachment.region.name} from {place.offset_bytes} on"
            ),
            board=self._progress.part(place.offset_bytes) if self._progress is not None else None,
        )

    def _unregister(self, offset_bytes: int) -> None:
        registration = self._registrations.pop(offset_bytes, None)
        if registration is None:
            return
        try:
            registration.close()
        except HostprepError as error:
            self._log.warning("A host pool stays registered until the process ends: %s", error)
        if self._progress is not None:
            self._progress.remove(offset_bytes)

    def _sweep(self) -> None:
        """Free the places whose tensors are gone; unregistered first."""
        while self._unused:
            place = self._unused.popleft()
            self._unregister(place.offset_bytes)
            self._allocator.free(place)


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


class ProgressLog:
    """Logs how a registration proceeds, for those who wait for it: `on_progress` of one."""

    def __init__(self, log: logging.Logger, name: str) -> None:
        self._log = log
        self._name = name
        self._last_s = time.monotonic()

    def __call__(self, progress: Progress) -> None:
        """Log a line each ten seconds, and one when all is registered."""
        if progress.state == "Registered":
            self._log.info(
                "%s: %s registered with CUDA by %d calls in %.1f s, the longest %.3f s",
                self._name,
                format_bytes(progress.size_bytes),
                progress.chunks,
                progress.elapsed_s,
                progress.longest_chunk_s,
            )
        elif progress.done_bytes and time.monotonic() - self._last_s >= _LOG_INTERVAL_S:
            self._last_s = time.monotonic()
            rate = progress.done_bytes / max(progress.elapsed_s, 1e-9)
            self._log.info(
                "%s: %s of %s registered with CUDA, %.1f GiB/s, %.0f s left",
                self._name,
                format_bytes(progress.done_bytes),
                format_bytes(progress.size_bytes),
                rate / GIB,
                (progress.size_bytes - progress.done_bytes) / rate,
            )


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

    def progress(
        self,
        done_bytes: int,
        size_bytes: int,
        longest_chunk_s: float = 0.0,
        holes: Holes = (),  # noqa: ARG002 - what is used as a whole has none
    ) -> None:
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
