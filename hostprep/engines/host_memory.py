"""One rank's host buffers in its part of the lease: tensors, registered before they are returned.

Used by plugins inside of SGLang and vLLM: imports torch.
"""

from __future__ import annotations

import collections
import functools
import logging
import math
import weakref

from hostprep.cuda.board import RankBoard, board_path
from hostprep.cuda.register import register
from hostprep.engines.progress_view import RankTold
from hostprep.engines.shares import Asker, Part, Parts
from hostprep.errors import BusyError, FailedError, HostprepError, NotReadyError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from hostprep.client.attachment import Attachment
    from hostprep.cuda.registration import Registration
    from hostprep.engines.vllm.simple_layout import Share

__all__ = ["HostMemory"]

_log = logging.getLogger("hostprep.engines")


class HostMemory:
    """A rank's share of a region; used from one thread.

    Raises BadInputError (RankTaken) where another engine under the same lease has this share.
    """

    def __init__(self, attachment: Attachment, share: Share, *, rank: int, asker: Asker) -> None:
        """Take the attachment over, which lives as long as the process: views may, too.

        `rank`: this process's number among those that share the region.
        """
        self._attachment = attachment
        self._parts = Parts(share.offset_bytes, share.size_bytes, share.page_bytes, asker=asker)
        self._size_bytes = share.size_bytes
        self._registrations: dict[int, Registration] = {}
        self._dead: collections.deque[Part] = collections.deque()
        self._board = _board_of(attachment, rank, share.ranks)
        self._told = RankTold(self._board) if self._board is not None else None
        _log.info(
            "Host pools in prepared memory: region %s, %d bytes from %d on",
            attachment.region.name,
            share.size_bytes,
            share.offset_bytes,
        )

    @property
    def free_bytes(self) -> int:
        """What is left of the share."""
        self._sweep()
        return self._parts.free_bytes

    @property
    def used_bytes(self) -> int:
        """What was taken of it, whole pages."""
        return self._size_bytes - self.free_bytes

    def check(self, size_bytes: int) -> None:
        """Refuse what does not fit. Raises BadInputError with both numbers."""
        if size_bytes > self.free_bytes:
            raise self._parts.too_small(size_bytes)

    def owns(self, address: int) -> bool:
        """Tell whether an address is ours."""
        start = self._attachment.address
        return start <= address < start + self._attachment.size_bytes

    def tensor(self, dims: tuple[int, ...], dtype: Any, *, row_bytes: int | None) -> Any:
        """Return a tensor over the next part of the share.

        Registered first where `row_bytes` is a number, before it returns: no chunk ends inside a
        row. Its part can be had again once the last view of the tensor is gone.
        Raises BadInputError where it does not fit, and what registering raises.
        """
        import torch

        self._sweep()
        count = math.prod(dims)
        size_bytes = count * torch.empty((), dtype=dtype).element_size()
        part = self._parts.take(size_bytes)
        try:
            end = part.offset_bytes + size_bytes
            view = self._attachment.buffer[part.offset_bytes : end]
            tensor = torch.frombuffer(view, dtype=dtype, count=count).view(dims)
            self._make_ready(part, row_bytes)
        except BaseException:
            self._parts.give_back(part)
            raise
        # torch holds on to the view for as long as it has the storage. Run by the garbage
        # collector, anywhere: it only takes note. A process that ends leaves the rest to the kernel
        weakref.finalize(view, functools.partial(self._dead.append, part)).atexit = False
        return tensor

    def let_go(self, address: int) -> None:
        """Take a buffer's registration back, as the engine's teardown asks, while it is mapped."""
        self._unregister(address - self._attachment.address)

    def close(self) -> None:
        """Take all registrations back, the last first, and let go of the memory."""
        for offset_bytes in sorted(self._registrations, reverse=True):
            self._unregister(offset_bytes)
        if self._board is not None:
            self._board.close()
        self._attachment.close()

    def _make_ready(self, part: Part, row_bytes: int | None) -> None:
        if row_bytes is None:
            if self._board is not None:
                self._board.ready()
            return
        self._registrations[part.offset_bytes] = register(
            self._attachment,
            mode="sync",
            offset_bytes=part.offset_bytes,
            size_bytes=part.size_bytes,
            row_bytes=row_bytes,
            board=self._told.part(part.offset_bytes) if self._told is not None else None,
        )

    def _unregister(self, offset_bytes: int) -> None:
        registration = self._registrations.pop(offset_bytes, None)
        if registration is None:
            return
        try:
            registration.close()
        except HostprepError as error:
            _log.warning("A host pool stays registered until the process ends: %s", error)
        if self._told is not None:
            self._told.without(offset_bytes)

    def _sweep(self) -> None:
        """Take back the parts whose tensors are gone; unregistered first."""
        while self._dead:
            part = self._dead.popleft()
            self._unregister(part.offset_bytes)
            self._parts.give_back(part)


def _board_of(attachment: Attachment, rank: int, ranks: int) -> RankBoard | None:
    """Take the rank's place in its region. Raises BadInputError where another engine has it."""
    try:
        return RankBoard.open(
            board_path(attachment),
            generation=attachment.lease_id,
            world=ranks,
            rank=rank,
        )
    except (BusyError, FailedError, NotReadyError) as error:
        _log.warning("No rank board, `hostprep status` shows no ranks: %s", error)
        return None
