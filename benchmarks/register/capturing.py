"""A graph captured by one thread while another one registers memory."""

from __future__ import annotations

import contextlib
import threading

from benchmarks.register.cuda import Cuda, CudaError
from benchmarks.register.mappings import Mapping

_LAUNCHES = 64


def capture_while(cuda: Cuda, mapping: Mapping, *, relaxed: bool, mode: str) -> dict[str, object]:
    """Return whether the registration went through, and the graph is valid and runs.

    `mode` is the capture's: GLOBAL, the strictest and the default, or THREAD_LOCAL. Without
    `relaxed` the registering thread does not exchange its capture mode: the control.
    """
    kernel, stream = cuda.kernel(), cuda.stream()
    refused: list[str] = []

    def register() -> None:
        try:
            cuda.call("cuCtxSetCurrent", cuda.context)
            with cuda.relaxed() if relaxed else contextlib.nullcontext():
                mapping.register(cuda, "steered")
        except CudaError as error:
            refused.append(str(error))

    thread = threading.Thread(target=register)
    kind = getattr(cuda.api.CUstreamCaptureMode, f"CU_STREAM_CAPTURE_MODE_{mode}")
    cuda.call("cuStreamBeginCapture", stream, kind)
    thread.start()
    invalid = ""
    try:
        for _ in range(_LAUNCHES):
            cuda.launch(kernel, stream)
        thread.join()
        cuda.launch(kernel, stream)
    except CudaError as error:
        invalid = str(error)
    thread.join()
    invalid = invalid or _finish(cuda, stream)
    with contextlib.suppress(CudaError):
        cuda.call("cuStreamEndCapture", stream)  # an invalid capture has to be ended as well
    mapping.unregister(cuda)
    return {"registration": refused[0] if refused else "ok", "graph": invalid or "valid, and ran"}


def _finish(cuda: Cuda, stream: object) -> str:
    try:
        graph = cuda.call("cuStreamEndCapture", stream)
        runnable = cuda.call("cuGraphInstantiate", graph, 0)
        cuda.call("cuGraphLaunch", runnable, stream)
        cuda.call("cuStreamSynchronize", stream)
    except CudaError as error:
        return str(error)
    return ""
