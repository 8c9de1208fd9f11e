"""What vLLM's SimpleCPUOffloadConnector needs of CUDA, where there is no GPU: streams and events.

torch's CUDA runtime does not run on our stand-in driver, so that its streams and events are
stood in for, and nothing else. Copies go through vLLM's own DmaCopyBackend, its thread and its
arithmetic, cuda-python and cuMemcpyBatchAsync of the stand-in (testbed/standin/batch_copies.c),
which has copied when it returns: an event that was recorded after it has happened.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any


def have_streams() -> None:
    """Complete the placeholders that vLLM's CPU platform puts where torch's own would be.

    Theirs are enough for its model runner (vllm/v1/worker/cpu/shm.py); the connector asks more.
    """
    torch: Any = importlib.import_module("torch")
    importlib.import_module("vllm.v1.worker.cpu.shm")

    class Stream(torch.cuda.Stream):  # type: ignore[misc]
        cuda_stream = 0

        def __init__(self, *args: object, **options: object) -> None:
            """Have a context current in this thread, as torch does when CUDA is first used."""
            super().__init__(*args, **options)
            api: Any = importlib.import_module("cuda.bindings.driver")
            assert int(api.cuInit(0)[0]) == 0
            code, context = api.cuDevicePrimaryCtxRetain(0)
            assert int(code) == 0
            assert int(api.cuCtxSetCurrent(context)[0]) == 0

        @staticmethod
        def priority_range() -> tuple[int, int]:
            return (0, -1)

    class Event(torch.Event):  # type: ignore[misc]
        """In order of issue on one queue: what was recorded has happened."""

        def __init__(self, *args: object, **options: object) -> None:
            super().__init__(*args, **options)
            self.is_recorded = False
            self.record = self._record
            self.query = lambda: self.is_recorded

        def _record(self, stream: object = None) -> None:
            self.is_recorded = True

    torch.cuda.Stream = Stream
    torch.Event = Event


def plugin(folder: Path) -> Path:
    """Make a folder for PYTHONPATH that has each of vLLM's processes call `have_streams`."""
    described = folder / "hostprep_streams-0.dist-info"
    described.mkdir(parents=True)
    (described / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: hostprep-streams\nVersion: 0\n"
    )
    (described / "entry_points.txt").write_text(
        "[vllm.general_plugins]\nhostprep_streams = tests.engines.vllm_on_cpu:have_streams\n"
    )
    return folder
