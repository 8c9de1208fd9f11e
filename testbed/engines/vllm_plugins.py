"""What each of vLLM's processes is made to do first: entry points of `vllm.general_plugins`.

vLLM calls them in its server, its engine's process and each worker, before anything is made.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import time
from pathlib import Path
from typing import Any

_OF_RANK = "STANDIN_RANK{}_"
_WORKER = "VllmWorker-"
"""What vLLM calls a worker's process (vllm/v1/executor/multiproc_executor.py)."""


def plugin(folder: Path, function: str) -> Path:
    """Make a folder for PYTHONPATH that has vLLM call one of these functions."""
    described = folder / "hostprep_tests-0.dist-info"
    described.mkdir(parents=True)
    (described / "METADATA").write_text("Metadata-Version: 2.1\nName: hostprep-tests\nVersion: 0\n")
    (described / "entry_points.txt").write_text(
        f"[vllm.general_plugins]\nhostprep_tests = {__name__}:{function}\n"
    )
    return folder


def steer_ranks() -> None:
    """Give a rank a driver of its own: STANDIN_RANK1_FAIL becomes STANDIN_FAIL in rank 1.

    The stand-in reads its variables at each call.
    """
    _, is_worker, rank = multiprocessing.current_process().name.rpartition(_WORKER)
    if not is_worker:
        return
    prefix = _OF_RANK.format(rank)
    for name, text in list(os.environ.items()):
        if name.startswith(prefix):
            os.environ[f"STANDIN_{name.removeprefix(prefix)}"] = text


def copy_plainly() -> None:
    """Have vLLM's Tiering spec work on its CPU platform, which it refuses for want of streams.

    Its region, its worker and everything above are vLLM's; a copy is a plain one, by a thread.
    """
    gpu_worker: Any = importlib.import_module("vllm.v1.kv_offload.cpu.gpu_worker")
    tiering: Any = importlib.import_module("vllm.v1.kv_offload.tiering.spec")
    ours: Any = importlib.import_module("hostprep.engines.vllm.offloading_worker")

    class Handler(ours.MemcpyHandler):  # type: ignore[misc]
        def __init__(
            self, *, canonical_layout: bool, host_memory_is_pinned: bool, **named: Any
        ) -> None:
            assert not canonical_layout
            assert not host_memory_is_pinned
            named["gpu_tensors"] = list(named["gpu_tensors"])  # each handler empties its own
            named["cpu_tensors"] = list(named["cpu_tensors"])
            super().__init__(**named)

    def get_worker(spec: Any, kv_caches: Any) -> Any:
        spec._worker = spec._worker or spec.create_worker(kv_caches)
        return spec._worker

    gpu_worker.SingleDirectionOffloadingHandler = Handler
    tiering.TieringOffloadingSpec.get_worker = get_worker
    if not hasattr(gpu_worker, "host_register"):  # before 0.32 a rank is the number of its GPU
        tiering.torch.accelerator.current_device_index = lambda: 0


_PIECES = 4
_PIECE_S = 0.002
COPIES = "STANDIN_COPIES"
"""Names the folder in which `copy_slowly` says what is being copied."""


def copy_slowly() -> None:
    """Have each copy of our plain ones take its time, so that a kill finds it half done.

    While one is under way a file `store-PID` or `load-PID` lies in the folder that COPIES names.
    """
    ours: Any = importlib.import_module("hostprep.engines.vllm.offloading_worker")
    folder = Path(os.environ[COPIES])
    own = ours.MemcpyHandler._copy

    class Slow:
        """Stands for numpy, of which the module uses one function."""

        @staticmethod
        def copyto(to: Any, source: Any) -> None:
            step = -(-len(source) // _PIECES)
            for at in range(0, len(source), step):
                time.sleep(_PIECE_S)
                to[at : at + step] = source[at : at + step]

    def copy(self: Any, *job: Any) -> Any:
        sign = folder / f"{'store' if self._is_store else 'load'}-{os.getpid()}"
        sign.touch()
        try:
            return own(self, *job)
        finally:
            sign.unlink()

    ours.np = Slow
    ours.MemcpyHandler._copy = copy
