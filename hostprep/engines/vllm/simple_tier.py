"""What is behind SimpleCPUOffloadConnector: its memory, its registration, and its gate.

vLLM allocates its host tensors one by one with torch.zeros, pins each in one call, and makes its
copy backend, all inside `register_kv_caches`, which keeps the engine from starting. Here
`register_kv_caches` gets views of the region; pinning and the backend come in the background,
from the first poll after warm-up on, in chunks and turns. The engine's own code does the rest.

Nothing here imports vLLM before its memory is there.
"""

from __future__ import annotations

import functools
import logging
import math
from dataclasses import dataclass

from hostprep.cuda.board_layout import CLOSED, FAILED, READY
from hostprep.cuda.chunks import pool_of
from hostprep.cuda.gate import Gate
from hostprep.cuda.pace import Pace
from hostprep.cuda.registration import Registration
from hostprep.cuda.turnstile import Turnstile
from hostprep.engines.allocator import share_of
from hostprep.engines.host_memory import RankProgress, open_board
from hostprep.errors import BadInputError, FailedError, HostprepError
from hostprep.units import format_bytes

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from typing import Any

    from hostprep.client.attach import Attachment
    from hostprep.cuda.board import RankBoard
    from hostprep.cuda.board_view import BoardReader
    from hostprep.engines.allocator import Share
    from hostprep.engines.vllm.settings import Settings

_OVERRIDDEN = "_init_cpu_mode"
# Below vLLM's own logger, whose handler and level are the ones that people have set.
_log = logging.getLogger("vllm.hostprep")


class TierGate(Gate):
    """The scheduler's gate, and the requests that came before it opened.

    Such a request stays without the host tier until it ends: vLLM counts a request's blocks from
    the first step in which it sees it, and would take later blocks for the first ones, stored
    before they are computed.

    `world` counts all ranks of the engine, on whichever node. The board has those of this node,
    the connector's own messages all of them.
    """

    def __init__(self, world: int, board: BoardReader | None) -> None:
        self._early: set[str] = set()
        super().__init__(world, board, on_degraded=_log_degraded, on_open=_log_open)

    @property
    def is_decided(self) -> bool:
        """Whether the ranks need not report any more."""
        return self.state != CLOSED

    def admits(self, request_id: str) -> bool:
        """Tell whether a request may use the tier, now."""
        if self.is_open:
            return request_id not in self._early
        if not self.is_decided:
            self._early.add(request_id)
        return False

    def forget(self, request_id: str) -> None:
        """Note that a request ended."""
        self._early.discard(request_id)

    def report_all(self, ranks: Mapping[int, tuple[str, str]]) -> None:
        """Take the states that ranks report: a state, and why."""
        if not self.is_decided:
            for rank, (state, reason) in ranks.items():
                self.report(rank, state, reason)


def _log_open() -> None:
    _log.info("All ranks have registered: the host KV cache is in use")


def _log_degraded(why: str) -> None:
    _log.warning(
        "Serving from GPU memory alone, without the host KV cache, until the engine is "
        "started again: %s",
        why,
    )


@dataclass(frozen=True)
class Run:
    """Tensors with rows of one size, one after the other: what is registered as one slice."""

    offset_bytes: int
    """From the region's start."""
    size_bytes: int
    """Up to the end of the last page."""
    row_bytes: int


def lay_out(
    row_bytes: Mapping[str, int], *, rows: int, share: Share
) -> tuple[dict[str, int], tuple[Run, ...]]:
    """Place tensors of `rows` rows each, named with the bytes of a row.

    The engine has one host tensor for each of its KV tensors: as many rows as the tier has blocks.
    Copies are whole rows, and a copy across two registrations fails. So tensors with rows of one
    size follow one another without a gap; a run of them begins on a page. Most models have one run.

    Returns each tensor's offset from the region's start, in the engine's order, and the runs.
    Raises BadInputError where they do not fit, with both sizes and what would fit.
    """
    sizes = sorted(set(row_bytes.values()))
    if rows <= 0 or not sizes or sizes[0] <= 0:
        raise BadInputError(f"{len(row_bytes)} tensors of {rows} rows cannot be placed")
    offsets = dict.fromkeys(row_bytes, 0)
    runs = []
    at = share.offset_bytes
    for size in sizes:
        begin = at
        for name, row in row_bytes.items():
            if row == size:
                offsets[name] = at
                at += rows * row
        at = begin + -(-(at - begin) // share.page_bytes) * share.page_bytes
        runs.append(Run(begin, at - begin, size))
    needed_bytes = at - share.offset_bytes
    if needed_bytes > share.size_bytes:
        raise _too_small(needed_bytes, len(runs), share)
    return offsets, tuple(runs)


def _too_small(needed_bytes: int, runs: int, share: Share) -> BadInputError:
    # Each run but the last may leave most of a page unused.
    fits_bytes = (share.size_bytes - (runs - 1) * share.page_bytes) * share.ranks
    less = f"set cpu_bytes_to_use to {fits_bytes} or less, or " if fits_bytes > 0 else ""
    region_bytes = needed_bytes * share.ranks
    return BadInputError(
        f"the engine wants {needed_bytes} bytes of host memory for this rank, and its part of the "
        f"region has {share.size_bytes} ({share.ranks} ranks share it, pages of "
        f"{format_bytes(share.page_bytes)})",
        reason="RegionTooSmall",
        remedy=f"{less}claim a region of at least {region_bytes} bytes",
    )


class RunRegistrations:
    """Registers the runs of a rank as if they were one: all of them are ready, or none.

    Start or run `first`, the first run's registration. Further runs are registered by its
    `on_registered`, in its thread: it reports READY after all of them and after `on_registered`,
    which is the engine's part; a failure in there takes all back.

    Make it where the engine's CUDA context is current, and start it then. `deadline_s` is for each
    chunk, and the pace is one for all runs.
    """

    def __init__(
        self,
        attachment: Attachment,
        runs: Sequence[Run],
        *,
        on_registered: Callable[[], object],
        board: RankBoard | None,
        deadline_s: float,
        pace: Pace,
    ) -> None:
        self._attachment = attachment
        self._runs = runs
        self._on_registered = on_registered
        self._pace = pace
        self._deadline_s = deadline_s
        self._turnstile = Turnstile(pool_of(attachment).root, engine=attachment.lease_id)
        self._is_closing = False
        progress = RankProgress(board) if board is not None else None
        self._boards = [
            # The first run's registration ends last.
            progress.part(run.offset_bytes, size_bytes=run.size_bytes, sets_state=at == 0)
            for at, run in enumerate(runs)
            if progress is not None
        ]
        self.first = self._part(0)
        self._parts = [self.first]

    def close(self) -> None:
        """Take all back, the last run first; what is still in progress is cancelled."""
        self._is_closing = True
        parts = list(self._parts)
        for part in parts:
            part.cancel()
        for part in reversed(parts):
            part.close()

    def _part(self, at: int) -> Registration:
        run = self._runs[at]
        return Registration(
            self._attachment,
            offset_bytes=run.offset_bytes,
            size_bytes=run.size_bytes,
            row_bytes=run.row_bytes,
            turnstile=self._turnstile,
            deadline_s=self._deadline_s,
            on_registered=functools.partial(self._register_next, at + 1),
            board=self._boards[at] if self._boards else None,
            pace=self._pace,
        )

    def _register_next(self, at: int) -> None:
        if at == len(self._runs):
            self._on_registered()
            return
        part = self._part(at)
        self._parts.append(part)
        if self._is_closing:
            raise FailedError("the engine is ending", reason="Cancelled")
        part.run()


def launch_apart(  # noqa: PLR0917 - in the order of vLLM's
    launch: Callable[..., None],
    src_blocks: Sequence[int],
    dst_blocks: Sequence[int],
    is_store: bool,
    event_idx: int,
    events_list: list[Any],
    **more: Any,
) -> None:
    """Copy by vLLM's `launch_copy`: blocks that are side by side in host memory in two calls.

    First those with even numbers. A vLLM that makes one copy of neighbours (pull request 56110)
    would make one across two registrations, which the driver refuses. Calls are done in order, so
    that the event of the last one is that of all.
    """
    pairs = list(zip(src_blocks, dst_blocks))
    host = 1 if is_store else 0
    halves = [[pair for pair in pairs if pair[host] % 2 == odd] for odd in (0, 1)]
    parts = [half for half in halves if half] or [[]]
    for part in parts:
        events = events_list if part is parts[-1] else []
        sources, targets = ([pair[side] for pair in part] for side in (0, 1))
        launch(sources, targets, is_store, event_idx, events, **more)


class PreparedTier:
    """Takes the place of one method of vLLM's SimpleCPUOffloadWorker, `handler`.

    `parallel`: vLLM's ParallelConfig, which says which rank this is. `attach` returns the region:
    called when the engine's KV caches are there. `registers`: with CUDA; without, the tier is
    joined at the first poll. In mode sync all is done before `register_kv_caches` returns, as vLLM
    does by itself; what fails is raised then, and in the background it is reported. Used by the
    worker's main thread, but for the engine's part.
    """

    def __init__(
        self,
        handler: Any,
        parallel: Any,
        settings: Settings,
        *,
        attach: Callable[[], Attachment],
        registers: bool,
    ) -> None:
        if not callable(getattr(handler, _OVERRIDDEN, None)):
            raise FailedError(
                f"this vLLM's {type(handler).__name__} has no {_OVERRIDDEN}: it allocates its host "
                "tensors elsewhere",
                reason="EngineUnknown",
                remedy="use a release that `hostprep engines` lists, or --engine vllm-offloading",
            )
        self._handler = handler
        self._parallel = parallel
        self._attach = attach
        self._registers = registers
        self._in_background = settings.mode == "background"
        self._deadline_s = settings.deadline_s
        self._duty_cycle = settings.duty_cycle
        self._pace: Pace | None = None
        self._attachment: Attachment | None = None
        self._board: RankBoard | None = None
        self._registrations: RunRegistrations | None = None
        self._has_begun = False
        self._outcome: tuple[str, str] | None = None
        self._is_acknowledged = False
        setattr(handler, _OVERRIDDEN, self._prepare)

    @property
    def report(self) -> tuple[str, str] | None:
        """This rank's state and why, until the scheduler is known to have decided."""
        return None if self._is_acknowledged else self._outcome

    def acknowledge(self) -> None:
        """Note that the scheduler's gate is open, or will never be."""
        self._is_acknowledged = True

    def poll(self) -> None:
        """Begin after warm-up, then check progress; no system call once that is settled."""
        if self._outcome is not None or self._attachment is None or not self._in_background:
            return
        try:
            if not self._has_begun:
                self._has_begun = True
                self._begin(self._attachment)
            elif self._pace is not None:
                self._pace.step()
            self._check_registrations()
        except Exception as error:
            self._outcome = (FAILED, str(error))
            if self._board is not None:
                try:
                    self._board.failed(str(error))
                except HostprepError as unwritten:
                    _log.debug("The rank board: %s", unwritten)

    def close(self) -> None:
        """Let copies end, take registrations back, and close the memory."""
        handler, attachment = self._handler, self._attachment
        if attachment is None:
            return
        self._attachment = None
        registrations = self._registrations
        if registrations is not None and self._outcome is None:
            registrations.close()  # also waits for the engine's part, which makes the backend
        if handler._backend is not None:  # noqa: SLF001
            handler._backend.shutdown()  # noqa: SLF001
            handler._flush_and_sync_all()  # noqa: SLF001
            handler._backend = None  # noqa: SLF001
        handler.cpu_kv_caches = None
        try:
            if registrations is not None:
                registrations.close()
        finally:
            if self._board is not None:
                self._board.close()
            attachment.close()

    def _prepare(
        self, gpu_caches: Mapping[str, Any], total_bytes_per_block: int, device: Any
    ) -> None:
        """Do what vLLM's method does, over the region; `register_kv_caches` calls it."""
        if self._attachment is not None:
            raise FailedError("the KV caches were registered before", reason="AlreadyStarted")
        rows, ranks = int(self._handler.num_cpu_blocks), self._parallel.local_world_size
        attachment = self._attach()
        share = share_of(
            attachment.size_bytes,
            attachment.page_bytes,
            ranks=ranks,
            index=self._parallel.rank % ranks,
        )
        row_bytes = {name: _row_bytes(tensor) for name, tensor in gpu_caches.items()}
        offsets, self._runs = lay_out(row_bytes, rows=rows, share=share)
        self._handler.cpu_kv_caches = _views(attachment, offsets, gpu_caches, rows)
        self._attachment = attachment
        self._gpu_caches, self._device = gpu_caches, device
        how = "registered in the background" if self._in_background else "registered now"
        _log.info(
            "Host KV cache in prepared memory: region %s, %d tensors, %d blocks, %d bytes from %d "
            "on, %s",
            attachment.region.name,
            len(gpu_caches),
            rows,
            rows * total_bytes_per_block,
            share.offset_bytes,
            how if self._registers else "not registered with CUDA",
        )
        self._board = open_board(
            attachment, rank=self._parallel.rank, world=self._parallel.world_size, log=_log
        )
        if not self._in_background:
            self._begin(attachment)

    def _begin(self, attachment: Attachment) -> None:
        """Register, or join the tier at once where that is not needed."""
        if not self._registers:
            board = self._board if self._in_background else None
            if board is not None:
                board.initializing()
            self._make_backend()
            if board is not None:
                board.ready()
            self._outcome = (READY, "")
            return
        self._pace = Pace(attachment.lease_id, duty_cycle=self._duty_cycle)
        self._registrations = RunRegistrations(
            attachment,
            self._runs,
            on_registered=self._make_backend,
            board=self._board,
            deadline_s=self._deadline_s,
            pace=self._pace,
        )
        if self._in_background:
            self._registrations.first.start()
        else:
            self._registrations.first.run()
            self._outcome = (READY, "")

    def _make_backend(self) -> None:
        """Make the copy backend: the engine's part, in whichever thread registered last."""
        from vllm.v1.simple_kv_offload.copy_backend import DmaCopyBackend

        handler = self._handler
        backend = DmaCopyBackend()
        backend.init(
            self._gpu_caches,
            handler.cpu_kv_caches,
            self._device,
            handler.load_stream,
            handler.store_stream,
        )
        launch: Any = backend.launch_copy
        backend.launch_copy = functools.partial(launch_apart, launch)
        handler._backend = backend  # noqa: SLF001

    def _check_registrations(self) -> None:
        if self._registrations is None:
            return
        first = self._registrations.first
        if first.state in ("Registered", "Skipped"):
            self._outcome = (READY, "")
        elif first.state in ("Failed", "Cancelled", "Closed"):
            self._outcome = (FAILED, str(first.error or first.state))


def _row_bytes(tensor: Any) -> int:
    return int(math.prod(tensor.shape[1:]) * tensor.element_size())


def _views(
    attachment: Attachment, offsets: Mapping[str, int], like: Mapping[str, Any], rows: int
) -> dict[str, Any]:
    """Return tensors over the region, of the dtypes and the row shapes of the engine's own."""
    import torch

    whole = torch.frombuffer(attachment.buffer, dtype=torch.uint8)
    views = {}
    for name, offset in offsets.items():
        tensor = like[name]
        part = whole[offset : offset + rows * _row_bytes(tensor)]
        views[name] = part.view(tensor.dtype).view(rows, *tensor.shape[1:])
    return views
