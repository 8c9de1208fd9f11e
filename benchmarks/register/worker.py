"""One process of a measurement: takes commands as lines of JSON, answers each with a line.

Times are of CLOCK_MONOTONIC, which all processes share; `at_s` lets several begin together.
"""

from __future__ import annotations

import fcntl
import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

from benchmarks.register.cuda import NO_FLAGS, Cuda, CudaError
from benchmarks.register.handles import Handles
from benchmarks.register.mappings import Mapping, cold_mapping, file_mapping
from benchmarks.register.watching import Watcher, neighbour
from hostprep.errors import HostprepError


class _Worker:
    """The commands, by name: every public method is one."""

    def __init__(self) -> None:
        self._cuda: Cuda | None = None
        self._mappings: dict[str, Mapping] = {}
        self._watcher: Watcher | None = None
        self._handles: Handles | None = None
        self._lock = -1

    @property
    def cuda(self) -> Cuda:
        if self._cuda is None:
            raise CudaError("no device was opened")
        return self._cuda

    def open(self, device: int) -> dict[str, object]:
        """Have a context; without one where `watch` makes its own."""
        self._cuda = Cuda(device)
        self.cuda.open()
        return self.cuda.traits()

    def map(self, name: str, path: str, offset: int, size_bytes: int) -> dict[str, float]:
        """Map a part of a resident file, page tables included."""
        begin_s = time.monotonic()
        self._mappings[name] = file_mapping(path, offset, size_bytes)
        return {"took_s": time.monotonic() - begin_s}

    def map_cold(self, name: str, size_bytes: int, segments: int) -> dict[str, float]:
        """Map fresh shared memory of base pages, none of them there yet."""
        begin_s = time.monotonic()
        self._mappings[name] = cold_mapping(size_bytes, segments)
        return {"took_s": time.monotonic() - begin_s}

    def populate(self, name: str, *, by_all_cpus: bool) -> dict[str, float]:
        """Make every page of a mapping present."""
        begin_s = time.monotonic()
        self._mappings[name].populate(by_all_cpus=by_all_cpus)
        return {"took_s": time.monotonic() - begin_s}

    def register(self, name: str, chunk: int | str, at_s: float = 0.0) -> dict[str, object]:
        """Register a mapping: by chunks of so many bytes, in one call (0), or `steered`."""
        _wait_until(at_s)
        begin_s = time.monotonic()
        with self.cuda.relaxed():
            calls = self._mappings[name].register(self.cuda, chunk)
        return _told(begin_s, calls)

    def register_by_threads(self, name: str, chunk: int, threads: int) -> dict[str, object]:
        """Register a mapping by chunks that several threads take."""
        begin_s = time.monotonic()
        calls = self._mappings[name].register_by_threads(self.cuda, chunk, threads)
        return _told(begin_s, calls)

    def register_in_turns(self, name: str, folder: str, at_s: float = 0.0) -> dict[str, object]:
        """Register by steered chunks, each in this process's turn at the node's turnstile."""
        from hostprep.cuda.turnstile import Turnstile
        from hostprep.cuda.turnstile_files import make_turnstiles

        make_turnstiles(folder, ("bench",))
        turnstile = Turnstile(folder, "bench")
        _wait_until(at_s)
        begin_s = time.monotonic()
        with self.cuda.relaxed():
            calls = self._mappings[name].register(self.cuda, "steered", turn=turnstile.turn)
        return _told(begin_s, calls)

    def unregister(self, name: str, at_s: float = 0.0) -> dict[str, object]:
        """Unregister what was registered, in reverse."""
        _wait_until(at_s)
        begin_s = time.monotonic()
        return _told(begin_s, self._mappings[name].unregister(self.cuda))

    def unmap(self, name: str) -> dict[str, object]:
        """Forget a mapping."""
        self._mappings.pop(name).close()
        return {}

    def host_alloc(self, size_bytes: int) -> dict[str, object]:
        """Allocate by the driver (cudaHostAlloc), and free it again."""
        begin_s = time.monotonic()
        pointer = self.cuda.call("cuMemHostAlloc", size_bytes, NO_FLAGS)
        told = _told(begin_s, [time.monotonic() - begin_s])
        self.cuda.call("cuMemFreeHost", pointer)
        return told

    def free_bytes(self) -> dict[str, int]:
        """Return the GPU's free memory."""
        return {"free_bytes": int(self.cuda.call("cuMemGetInfo")[0])}

    def copy(self, name: str, size_bytes: int, rounds: int) -> dict[str, object]:
        """Copy both ways between host memory and the GPU.

        `name` is a mapping's, or `handles`, or `driver` and `plain`, which are made for it.
        """
        from benchmarks.register.copying import copy_rates

        address = None
        if name in self._mappings:
            address = self._mappings[name].address
        elif name == "handles" and self._handles is not None:
            address = self._handles.address
        return copy_rates(self.cuda, name, address, size_bytes, rounds)

    def keep_copying(self, name: str, part_bytes: int) -> dict[str, object]:
        """Write to a mapping from the GPU until this process ends."""
        from benchmarks.register.copying import keep_copying

        keep_copying(self.cuda, self._mappings[name], part_bytes)
        return {}

    def hold_lock(self, path: str) -> dict[str, object]:
        """Hold an exclusive lock on a file, as an engine holds the lease of its region."""
        self._lock = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return {}

    def capture(self, name: str, *, relaxed: bool, mode: str) -> dict[str, object]:
        """Capture a graph while another thread registers a mapping; then launch it."""
        from benchmarks.register.capturing import capture_while

        return capture_while(self.cuda, self._mappings[name], relaxed=relaxed, mode=mode)

    def stalls(
        self, name: str, action: str, *, chunk: int | str | None, gap: str, least_s: float
    ) -> dict[str, object]:
        """Register a mapping for so long; return how long an action of this process took."""
        from benchmarks.register.inside import stalls_inside

        mapping = self._mappings[name]
        return stalls_inside(self.cuda, mapping, action, chunk=chunk, gap=gap, least_s=least_s)

    def latencies(self, calls: int) -> dict[str, object]:
        """Return how long a launch and a small copy take now."""
        from benchmarks.register.inside import latencies

        return latencies(self.cuda, calls)

    def decode(self, path: str, size_bytes: int, **how: Any) -> dict[str, object]:
        """Run an engine's decode loop while a file's memory is registered."""
        from benchmarks.register.decoding import decode_while

        return decode_while(self.cuda, path, size_bytes, **how)

    def watch(self, action: str, device: int) -> dict[str, object]:
        """Begin to repeat an action in a thread, as a neighbour would."""
        self._watcher = neighbour(action, device)
        self._watcher.start()
        return {}

    def watched(self, from_s: float, to_s: float) -> dict[str, float]:
        """Return how long the action took, of all calls that met that time."""
        if self._watcher is None:
            raise CudaError("nothing is watched")
        return self._watcher.during([(from_s, to_s)])

    def create_handles(self, size_bytes: int, piece_bytes: int, node: int) -> dict[str, object]:
        """Create host memory that other processes can map, and be ready to send it."""
        self._handles = Handles(self.cuda, piece_bytes)
        return self._handles.create(size_bytes, node)

    def serve_handles(self, path: str) -> dict[str, object]:
        """Send the handles to the one process that connects to the socket at the path."""
        if self._handles is None:
            raise CudaError("no handles were created")
        self._handles.serve(path)
        return {}

    def import_handles(
        self, path: str, size_bytes: int, piece_bytes: int, node: int
    ) -> dict[str, object]:
        """Take handles from another process and map them for the GPU and for this CPU."""
        self._handles = Handles(self.cuda, piece_bytes)
        return self._handles.take(path, size_bytes, node)

    def drop_handles(self) -> dict[str, object]:
        """Unmap and release them."""
        begin_s = time.monotonic()
        if self._handles is not None:
            self._handles.close()
        self._handles = None
        return {"took_s": time.monotonic() - begin_s}


def _told(begin_s: float, calls: list[float]) -> dict[str, object]:
    end_s = time.monotonic()
    return {
        "begin_s": begin_s,
        "end_s": end_s,
        "took_s": end_s - begin_s,
        "calls": len(calls),
        "longest_call_s": max(calls, default=0.0),
    }


def _wait_until(at_s: float) -> None:
    time.sleep(max(0.0, at_s - time.monotonic()))


def main() -> None:
    """Serve until standard input ends."""
    worker = _Worker()
    # Libraries may print; only answers may go to the pipe.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    for line in sys.stdin:
        command = json.loads(line)
        run: Callable[..., Any] = getattr(worker, command.pop("do"))
        try:
            answer = run(**command)
        except (CudaError, HostprepError, OSError, ImportError, RuntimeError) as error:
            answer = {"error": str(error) or type(error).__name__}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()
    sys.stdout.flush()
    os._exit(0)  # threads may still copy, or repeat what they time


if __name__ == "__main__":
    main()
