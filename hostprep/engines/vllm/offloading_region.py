"""A rank's slice of the region: its registration with CUDA, and its place on the board.

vLLM's own worker registers in its constructor, before the engine serves
(vllm/v1/kv_offload/cpu/gpu_worker.py, pin_mmap_region). Here the constructor enters the rank on
the board and no more; `begin` begins, before warm-up where that is safe, or else the first poll.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

from hostprep.backing import GIB
from hostprep.client.attach import make_present
from hostprep.cuda.board import RankBoard, board_path
from hostprep.cuda.pace import Pace
from hostprep.cuda.registration import register
from hostprep.errors import HostprepError
from hostprep.units import format_bytes

TYPE_CHECKING = False
if TYPE_CHECKING:
    from hostprep.client.attach import Attachment
    from hostprep.cuda.board_layout import Holes
    from hostprep.cuda.registration import Registration
    from hostprep.cuda.registration_state import Progress
    from hostprep.engines.vllm.offloading_layout import Layout
    from hostprep.engines.vllm.settings import Settings

_log = logging.getLogger("vllm.hostprep")
_LEAST_FREE_BYTES = 4 * GIB
_LEAST_FREE_SHARE = 16
"""What warm-up is left: the activations, for which vLLM leaves room when it makes its caches, and
workspaces of kernels that are tuned, for which it does not. A registration that finds no memory
costs the host tier, a warm-up that finds none the engine."""


@dataclass(frozen=True)
class FreeMemory:
    """A GPU's memory, as its driver says."""

    free_bytes: int
    total_bytes: int


def why_later(memory: FreeMemory | None, *, captures_graphs: bool, tables_bytes: int) -> str:
    """Return why registering must wait until warm-up has ended; empty where it need not. Pure.

    `memory`: once the KV caches are there. The page tables of registered memory, `tables_bytes`,
    are taken from what vLLM has left for its warm-up and for others.
    """
    if captures_graphs:
        return "CUDA graphs are to be captured first"
    if memory is None:
        return "it is not known how much GPU memory is free"
    least_bytes = max(_LEAST_FREE_BYTES, memory.total_bytes // _LEAST_FREE_SHARE)
    if memory.free_bytes - tables_bytes < least_bytes:
        return (
            f"page tables of {format_bytes(tables_bytes)} would leave less than "
            f"{format_bytes(least_bytes)} of GPU memory to warm-up, "
            f"{format_bytes(memory.free_bytes)} are free"
        )
    return ""


class _WithoutFailures:
    """A rank's board, to which no failure is reported: the rank goes on without registering."""

    def __init__(self, board: RankBoard) -> None:
        self.initializing = board.initializing
        self.progress = board.progress
        self.ready = board.ready

    def failed(self, reason: str) -> None:
        """Report nothing."""


class RankRegistration:
    """One rank's registration, in its process. `poll` is called at each step, and is cheap.

    `slice_number`: which slice of the layout is the rank's. `registers`: with CUDA; without, the
    rank is ready at the first poll. `grows`: rows are used as they are registered. `obstacle`: why
    the gate can never open for this rank, which is reported at once.

    A rank that cannot register has failed, and with it the gate; unless the settings allow memory
    that is not pinned. Then it is ready, with all of its rows, once what was registered is taken
    back, or stays: whatever it is, copies are such that do not need it. Each rank decides for
    itself.
    """

    def __init__(
        self,
        memory: Attachment,
        layout: Layout,
        settings: Settings,
        *,
        rank: int,
        world: int,
        slice_number: int,
        registers: bool,
        grows: bool = False,
        obstacle: str = "",
    ) -> None:
        """Enter the rank on the board; register only where that is to be done at once.

        Raises BadInputError where the rank is taken (two engines on one region), HostprepError.
        """
        self._memory = memory
        self._layout = layout
        self._settings = settings
        self._slice_number = slice_number
        self._registers = registers
        self._grows = grows
        self._registration: Registration | None = None
        self._has_begun = False
        self._has_fallen_back = self._is_unpinned = False
        self._pace = Pace(memory.lease_id, duty_cycle=settings.duty_cycle)
        self._board = RankBoard.open(
            board_path(memory), generation=memory.lease_id, world=world, rank=rank
        )
        try:
            if obstacle:
                self._has_begun = True
                self._board.failed(obstacle)
            elif settings.mode == "sync":
                self.begin()
        except BaseException:
            self._board.close()
            raise

    def poll(self) -> None:
        """Note that the engine works: requests may come from now on. Begin, unless that is done."""
        self._pace.step()
        if not self._has_begun:
            self.begin()

    def begin(self) -> None:
        """Register; until the first poll at full speed. Nothing where that was begun before."""
        if self._has_begun:
            return
        self._has_begun = True
        if not self._registers:
            self._board.initializing()
            self._board.ready()
            return
        is_forgiving = self._settings.is_unpinned_allowed
        try:
            self._registration = register(
                self._memory,
                mode=self._settings.mode,
                offset_bytes=self._layout.offset_of(self._slice_number),
                size_bytes=self._layout.slice_bytes,
                row_bytes=self._layout.row_bytes,
                deadline_s=self._settings.deadline_s,
                board=_WithoutFailures(self._board) if is_forgiving else self._board,
                pace=self._pace,
                grows=self._grows,
                on_progress=self._go_on_unpinned if is_forgiving else None,
            )
        except HostprepError as error:
            if is_forgiving:
                self._use_unpinned(str(error))
                return
            self._board.failed(str(error))
            if self._settings.mode == "sync":
                raise
        else:
            if is_forgiving:  # it may have failed before there was a thread
                self._go_on_unpinned(self._registration.progress)

    def _go_on_unpinned(self, progress: Progress) -> None:
        """Use all rows where registering has failed; its thread calls this, at its end at last."""
        if progress.state == "Failed" and self._registration is not None:
            self._use_unpinned(
                str(self._registration.error), done_bytes=progress.done_bytes, holes=progress.holes
            )

    def _use_unpinned(self, why: str, *, done_bytes: int = 0, holes: Holes = ()) -> None:
        """Be ready without having registered all; not where a page is bad, which is found here."""
        if self._has_fallen_back:
            return
        self._has_fallen_back = True
        address = self._memory.address + self._layout.offset_of(self._slice_number)
        try:
            make_present(self._memory.region, address, self._layout.slice_bytes)
        except HostprepError as error:
            self._board.failed(f"{error}; before that: {why}")
            return
        _log.warning(
            "rank %d copies to and from host memory that is not registered, which is slower: %s",
            self._board.rank,
            why,
        )
        self._is_unpinned = True
        self._board.progress(done_bytes, self._layout.slice_bytes, holes=holes)
        self._board.ready(f"not registered, copies are slower: {why}")

    @property
    def rows(self) -> int:
        """How many rows copies may use, the first ones but for `holes`."""
        registration = self._registration
        if self._is_unpinned or registration is None:
            return self._layout.rows
        if registration.state in ("Registered", "Skipped"):
            return self._layout.rows
        return registration.progress.mark_bytes // self._layout.row_bytes

    @property
    def holes(self) -> tuple[range, ...]:
        """The rows among them that copies may not use: they could not be registered."""
        if self._is_unpinned or self._registration is None:
            return ()
        return self._layout.rows_in(self._registration.progress.holes)

    def close(self) -> None:
        """Take the registration back and leave the board, once copies are done.

        Raises FailedError where the driver did not take all of it back.
        """
        try:
            if self._registration is not None:
                self._registration.close()
        finally:
            self._board.close()
