"""An engine's decode loop: a CUDA graph a step, a token read back, while memory is registered.

With torch the graph reads weights as a model does; without it the graph is of empty kernels, which
shows the driver's and the kernel's locks alone.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
import time
from collections.abc import Callable
from typing import Any

from benchmarks.register.cuda import Cuda, CudaError
from benchmarks.register.durations import spread, within
from benchmarks.register.inside import empty_graph
from benchmarks.register.mappings import Mapping, file_mapping
from hostprep.backing import MIB, Backing
from hostprep.client.attach import Attachment
from hostprep.client.handoff import Handoff, Region
from hostprep.client.lease import Lease
from hostprep.paths import PoolPaths
from hostprep.register import Registration

WAYS = {
    "nobody registers": "the same loop alone",
    "hostprep": "paced: the loop says that it steps",
    "hostprep, full speed": "the loop says nothing: what happens before an engine serves",
    "256 MiB, gaps of 1 ms": "what vLLM pull request 54578 does",
    "one call": "what vLLM 0.33 does, here while it serves",
}
LOOPS = ("torch", "empty kernels")
_WEIGHT_ROWS = 8192
_BATCH = 32
_STEP_S = 0.010
"""A token each 10 ms: a large model on one GPU."""
_EMPTY_LAUNCHES = 200
_TOKEN_BYTES = 4096
_SCHEDULING_S = 0.001
"""Between empty steps: what an engine does on the CPU."""


def decode_while(
    cuda: Cuda, path: str, size_bytes: int, *, loop: str, way: str, alone_s: float, most_s: float
) -> dict[str, object]:
    """Return the time between tokens alone and while the file's memory is registered.

    Registering is cut off after `most_s`: `registered_bytes` says how much was done by then.
    """
    step = _torch_step() if loop == "torch" else _empty_step(cuda)
    with contextlib.ExitStack() as held:
        work = _work(cuda, path, size_bytes, way=way, alone_s=alone_s, held=held)
        tokens: list[float] = []
        _run(step, tokens, lambda: False, until_s=time.monotonic() + alone_s)
        alone = [*itertools.pairwise(tokens)]
        begin_s = time.monotonic()
        tokens = [begin_s]  # the first step may wait for all of the registration
        work.start()
        _run(step, tokens, work.has_ended, until_s=begin_s + most_s, on_step=work.step)
        end_s = work.end_s if work.has_ended() else time.monotonic()
        told = work.told()
    met = within([*itertools.pairwise(tokens)], [(begin_s, end_s)])
    if not alone:
        raise CudaError(f"no second token came in {alone_s} s")
    undisturbed = spread([b - a for a, b in alone])
    meanwhile = spread(met)
    return {
        "alone": undisturbed,
        "meanwhile": meanwhile,
        "pace": (sum(b - a for a, b in alone) / len(alone)) / (sum(met) / len(met)),
        "took_s": end_s - begin_s,
        **told,
    }


class _Work:
    """A way to register, in another thread of this process."""

    def __init__(self, run: Callable[[], object]) -> None:
        self._run = run
        self._error = ""
        self._thread = threading.Thread(target=self._work, daemon=True)
        self.end_s = 0.0
        self.step: Callable[[], object] = lambda: None
        self.told: Callable[[], dict[str, object]] = dict

    def start(self) -> None:
        self._thread.start()

    def has_ended(self) -> bool:
        """Raise CudaError where it failed."""
        if self._error:
            raise CudaError(self._error)
        return self.end_s > 0

    def join(self) -> None:
        self._thread.join()

    def _work(self) -> None:
        try:
            self._run()
        except Exception as error:
            self._error = f"{type(error).__name__}: {error}"
        self.end_s = time.monotonic()


def _work(
    cuda: Cuda,
    path: str,
    size_bytes: int,
    *,
    way: str,
    alone_s: float,
    held: contextlib.ExitStack,
) -> _Work:
    if way == "nobody registers":
        return _Work(lambda: time.sleep(alone_s))
    if way.startswith("hostprep"):
        return _ours(cuda, path, size_bytes, paced=way == "hostprep", held=held)
    mapping = file_mapping(path, 0, size_bytes)
    held.callback(mapping.close)
    held.callback(mapping.unregister, cuda)
    work = _Work(lambda: _rivals(cuda, mapping, way))
    held.callback(work.join)
    return work


def _rivals(cuda: Cuda, mapping: Mapping, way: str) -> None:
    cuda.call("cuCtxSetCurrent", cuda.context)
    with cuda.relaxed():
        if way == "one call":
            mapping.register(cuda, 0)
        else:
            mapping.register(cuda, 256 * MIB, gap="1 ms")


def _ours(
    cuda: Cuda, path: str, size_bytes: int, *, paced: bool, held: contextlib.ExitStack
) -> _Work:
    attachment = attachment_of(path, size_bytes)
    held.callback(attachment.close)
    registration = Registration(attachment, context=int(cuda.context), grows=True)
    held.callback(registration.close)

    def run() -> None:
        registration.start()
        registration.wait()
        if registration.error is not None:
            raise registration.error

    work = _Work(run)
    if paced:
        work.step = registration.step
    work.told = lambda: {"registered_bytes": registration.progress.done_bytes}
    return work


def attachment_of(path: str, size_bytes: int) -> Attachment:
    """Return an attachment to a resident file that no pool is around."""
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    status = os.fstat(fd)
    backing = Backing.HUGETLB_2MI if os.fstatvfs(fd).f_bsize == 2 * MIB else Backing.BASE
    region = Region(
        name="r0",
        path=path.lstrip("/"),
        st_dev=status.st_dev,
        st_ino=status.st_ino,
        size_bytes=size_bytes,
        backing=backing,
        page_bytes=backing.page_bytes,
        placement="interleave",
        pinned=True,
    )
    handoff = Handoff("bench", "", 1, "", "", (region,))
    lease = Lease(PoolPaths("/", "."), handoff, region, fd, "", is_leader=False)
    return Attachment(lease, writable=True)


def _run(
    step: Callable[[], object],
    tokens: list[float],
    has_ended: Callable[[], bool],
    *,
    until_s: float,
    on_step: Callable[[], object] = lambda: None,
) -> None:
    """Step until a time, or until it has ended; with the moment of each token."""
    while True:
        on_step()
        step()
        tokens.append(time.monotonic())
        if tokens[-1] > until_s or has_ended():
            return


def _empty_step(cuda: Cuda) -> Callable[[], object]:
    runnable, stream = empty_graph(cuda, _EMPTY_LAUNCHES)
    on_gpu = cuda.call("cuMemAlloc", _TOKEN_BYTES)
    on_host = int(cuda.call("cuMemHostAlloc", _TOKEN_BYTES, 0))

    def step() -> None:
        cuda.call("cuGraphLaunch", runnable, stream)
        cuda.call("cuMemcpyDtoHAsync", on_host, on_gpu, _TOKEN_BYTES, stream)
        cuda.call("cuStreamSynchronize", stream)
        time.sleep(_SCHEDULING_S)

    return step


def _torch_step() -> Callable[[], object]:
    """Return a step of about 10 ms that reads weights from the GPU's memory, as decoding does."""
    try:
        import torch as module  # type: ignore[import-not-found,unused-ignore]
    except ImportError as error:
        raise CudaError("torch is not installed") from error
    torch: Any = module
    if not torch.cuda.is_available():
        raise CudaError("this torch sees no CUDA device")
    side = _WEIGHT_ROWS
    like = {"device": "cuda", "dtype": torch.bfloat16}
    weights = [torch.randn(side, side, **like) / side for _ in range(8)]
    tokens = torch.randn(_BATCH, side, **like)

    def layers(count: int) -> Any:
        found = tokens
        for index in range(count):
            found = torch.relu(found @ weights[index % len(weights)])
        return found.float().sum(dim=-1).argmax()

    def captured(count: int) -> tuple[Any, Any]:
        side_stream = torch.cuda.Stream()
        with torch.cuda.stream(side_stream):
            layers(8)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            token = layers(count)
        return graph, token

    graph, token = captured(64)
    for _ in range(3):
        graph.replay()
        token.item()
    begin_s = time.monotonic()
    for _ in range(5):
        graph.replay()
        token.item()
    one_s = (time.monotonic() - begin_s) / 5
    graph, token = captured(max(8, min(2048, int(64 * _STEP_S / one_s))))

    def step() -> None:
        graph.replay()
        token.item()

    step()
    return step
