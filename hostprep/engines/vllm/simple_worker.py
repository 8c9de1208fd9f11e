"""The worker's half of SimpleCPUOffloadConnector over prepared memory.

vLLM allocates its host tensors one by one with torch.zeros, pins each in one call, and makes its
copy backend, all inside `register_kv_caches`, which keeps the engine from starting. Here
`register_kv_caches` gets views of the region; pinning and the backend come in the background,
from the first poll after warm-up on, in chunks and turns. The engine's own code does the rest.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from hostprep.engines.allocator import share_of
from hostprep.engines.host_memory import open_board
from hostprep.engines.vllm.simple_region import RunRegistrations, lay_out
from hostprep.errors import FailedError, HostprepError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Any

    from hostprep.client.attach import Attachment
    from hostprep.cuda.board import RankBoard
    from hostprep.engines.vllm.simple_region import Layout

READY = "Ready"
FAILED = "Failed"
_OVERRIDDEN = "_init_cpu_mode"


@dataclass(frozen=True)
class Rank:
    """Which of an engine's ranks this is; a data-parallel replica is an engine of its own."""

    rank: int
    world_size: int
    local_rank: int
    """Among the ranks of this node, which share a region."""
    local_world_size: int


class PreparedTier:
    """Takes the place of one method of vLLM's SimpleCPUOffloadWorker, `handler`.

    `attach` returns the region: called when the engine's KV caches are there. `registers`: with
    CUDA; without, the tier is joined at the first poll. `in_background`: else before
    `register_kv_caches` returns, as vLLM does by itself; what fails is raised then, and in the
    background it is reported. Used by the worker's main thread, but for the engine's part.
    """

    def __init__(
        self,
        handler: Any,
        rank: Rank,
        *,
        attach: Callable[[], Attachment],
        registers: bool,
        in_background: bool,
        deadline_s: float,
        log: Any,
    ) -> None:
        if not callable(getattr(handler, _OVERRIDDEN, None)):
            raise FailedError(
                f"this vLLM's {type(handler).__name__} has no {_OVERRIDDEN}: it allocates its host "
                "tensors elsewhere",
                reason="EngineUnknown",
                remedy="use a release that `hostprep engines` lists, or --engine vllm-offloading",
            )
        self._handler = handler
        self._rank = rank
        self._attach = attach
        self._registers = registers
        self._in_background = in_background
        self._deadline_s = deadline_s
        self._log = log
        self._attachment: Attachment | None = None
        self._layout: Layout | None = None
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
                self._begin()
            self._check_registrations()
        except Exception as error:
            self._fail(str(error))

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
        handler, rows = self._handler, int(self._handler.num_cpu_blocks)
        attachment = self._attach()
        share = share_of(
            attachment.size_bytes,
            attachment.page_bytes,
            ranks=self._rank.local_world_size,
            index=self._rank.local_rank,
        )
        self._layout = lay_out(
            {name: _row_bytes(tensor) for name, tensor in gpu_caches.items()},
            rows=rows,
            share=share,
        )
        handler.cpu_kv_caches = _views(attachment, self._layout, gpu_caches, rows)
        self._attachment = attachment
        self._gpu_caches, self._device = gpu_caches, device
        how = "registered in the background" if self._in_background else "registered now"
        if not self._registers:
            how = "not registered with CUDA"
        self._log.info(
            "Host KV cache in prepared memory: region %s, %d tensors, %d blocks, %d bytes from %d "
            "on, %s",
            attachment.region.name,
            len(gpu_caches),
            rows,
            rows * total_bytes_per_block,
            share.offset_bytes,
            how,
        )
        self._board = open_board(
            attachment, rank=self._rank.rank, world=self._rank.world_size, log=self._log
        )
        if not self._in_background:
            self._register_now()

    def _register_now(self) -> None:
        registrations = self._registrations = self._make_registrations()
        if registrations is None:
            self._make_backend()
            self._outcome = (READY, "")
            return
        registrations.run()
        self._outcome = (READY, "")

    def _begin(self) -> None:
        registrations = self._registrations = self._make_registrations()
        if registrations is not None:
            registrations.start()
            return
        if self._board is not None:
            self._board.initializing()
        self._make_backend()
        if self._board is not None:
            self._board.ready()
        self._outcome = (READY, "")

    def _make_registrations(self) -> RunRegistrations | None:
        if not self._registers or self._attachment is None or self._layout is None:
            return None
        return RunRegistrations(
            self._attachment,
            self._layout.runs,
            on_registered=self._make_backend,
            board=self._board,
            deadline_s=self._deadline_s,
        )

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
        handler._backend = backend  # noqa: SLF001

    def _check_registrations(self) -> None:
        registrations = self._registrations
        if registrations is None:
            return
        state = registrations.state
        if state in ("Registered", "Skipped"):
            self._outcome = (READY, "")
        elif state in ("Failed", "Cancelled", "Closed"):
            self._outcome = (FAILED, str(registrations.error or state))

    def _fail(self, why: str) -> None:
        self._outcome = (FAILED, why)
        if self._board is not None:
            try:
                self._board.failed(why)
            except HostprepError as error:
                self._log.debug("The rank board: %s", error)


def _row_bytes(tensor: Any) -> int:
    return int(math.prod(tensor.shape[1:]) * tensor.element_size())


def _views(
    attachment: Attachment, layout: Layout, like: Mapping[str, Any], rows: int
) -> dict[str, Any]:
    """Return tensors over the region, of the dtypes and the row shapes of the engine's own."""
    import torch

    whole = torch.frombuffer(attachment.buffer, dtype=torch.uint8)
    views = {}
    for name, offset in layout.offsets:
        tensor = like[name]
        part = whole[offset : offset + rows * _row_bytes(tensor)]
        views[name] = part.view(tensor.dtype).view(rows, *tensor.shape[1:])
    return views
