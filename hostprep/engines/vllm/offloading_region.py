"""A rank's slice of the region: its registration with CUDA, and its place on the board.

vLLM's own worker registers in its constructor, before the engine serves
(vllm/v1/kv_offload/cpu/gpu_worker.py, pin_mmap_region). Here the constructor enters the rank on
the board and no more; the first poll begins.
"""

from __future__ import annotations

from hostprep.cuda.board import RankBoard, board_path
from hostprep.cuda.pace import Pace
from hostprep.cuda.registration import register
from hostprep.errors import HostprepError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from hostprep.client.attach import Attachment
    from hostprep.cuda.registration import Registration
    from hostprep.engines.vllm.offloading_layout import Layout
    from hostprep.engines.vllm.settings import Settings


class RankRegistration:
    """One rank's registration, in its process. `poll` is called at each step, and is cheap.

    `slice_number`: which slice of the layout is the rank's. `registers`: with CUDA; without, the
    rank is ready at the first poll. `grows`: rows are used as they are registered. `obstacle`: why
    the gate can never open for this rank, which is reported at once.
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
        self._pace = Pace(memory.lease_id, duty_cycle=settings.duty_cycle)
        self._board = RankBoard.open(
            board_path(memory), generation=memory.lease_id, world=world, rank=rank
        )
        try:
            if obstacle:
                self._has_begun = True
                self._board.failed(obstacle)
            elif settings.mode == "sync":
                self.poll()
        except BaseException:
            self._board.close()
            raise

    def poll(self) -> None:
        """Begin, at the first call; at the others, note that the engine works."""
        if self._has_begun:
            self._pace.step()
            return
        self._has_begun = True
        if not self._registers:
            self._board.initializing()
            self._board.ready()
            return
        if self._settings.mode == "background":
            self._pace.step()  # requests may come from now on
        try:
            self._registration = register(
                self._memory,
                mode=self._settings.mode,
                offset_bytes=self._layout.offset_of(self._slice_number),
                size_bytes=self._layout.slice_bytes,
                row_bytes=self._layout.row_bytes,
                deadline_s=self._settings.deadline_s,
                board=self._board,
                pace=self._pace,
                grows=self._grows,
            )
        except HostprepError as error:
            self._board.failed(str(error))
            if self._settings.mode == "sync":
                raise

    @property
    def rows(self) -> int:
        """How many rows copies may use, the first ones but for `holes`."""
        if self._registration is None or self._registration.state in ("Registered", "Skipped"):
            return self._layout.rows
        return self._registration.progress.mark_bytes // self._layout.row_bytes

    @property
    def holes(self) -> tuple[range, ...]:
        """The rows among them that copies may not use: they could not be registered."""
        if self._registration is None:
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
