"""The processes of a measurement, each with a context of its own."""

from __future__ import annotations

import contextlib
import json
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, cast

_REPOSITORY = Path(__file__).parent.parent.parent
_LONGEST_S = 150.0
_DYING_S = 10.0
_LEAD_S = 0.05
"""From the last command sent until all begin."""

Answer = dict[str, Any]


class MeasureError(Exception):
    """A measurement could not be made; in words."""


class Process:
    """One worker process. Commands are answered in order."""

    def __init__(self, patience: Callable[[], float] = lambda: _LONGEST_S) -> None:
        """`patience`: the seconds that an answer may take."""
        self._patience = patience
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.register.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=_REPOSITORY,
        )
        self._answers: queue.Queue[str] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def ask(self, do: str, **arguments: object) -> Answer:
        """Give a command and return its answer. Raises MeasureError."""
        self.begin(do, **arguments)
        return self.answer()

    def begin(self, do: str, **arguments: object) -> None:
        """Give a command; `answer` waits for it."""
        pipe = self._process.stdin
        assert pipe is not None
        try:
            pipe.write(json.dumps({"do": do, **arguments}) + "\n")
            pipe.flush()
        except OSError as error:
            raise MeasureError(f"{do}: the process has ended") from error

    def answer(self) -> Answer:
        """Return the answer to the oldest command. Raises MeasureError, also for one that hangs."""
        try:
            patience_s = min(_LONGEST_S, max(0.1, self._patience()))
            line = self._answers.get(timeout=patience_s)
        except queue.Empty as error:
            self.kill()
            raise MeasureError(f"no answer for {patience_s:.0f} s: process ended") from error
        if not line:
            raise MeasureError(f"the process ended with status {self._process.wait(_DYING_S)}")
        told = cast("Answer", json.loads(line))
        if "error" in told:
            raise MeasureError(str(told["error"]))
        return told

    @property
    def is_alive(self) -> bool:
        """Whether commands can be given."""
        return self._process.poll() is None

    def end(self) -> None:
        """End the process, at once if it does not end by itself."""
        self.dismiss()
        try:
            self._process.wait(timeout=_DYING_S)
        except subprocess.TimeoutExpired:
            self.kill()

    def dismiss(self) -> None:
        """Let the process end by itself."""
        with contextlib.suppress(OSError):
            if self._process.stdin is not None:
                self._process.stdin.close()

    def kill(self) -> None:
        """End the process at once; one that hangs in the driver is left behind."""
        self._process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=_DYING_S)

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._answers.put(line)
        self._answers.put("")


class Crew:
    """Ranks and neighbours, started when they are first needed; to be closed at the end."""

    def __init__(self, gpus: int, patience: Callable[[], float] = lambda: _LONGEST_S) -> None:
        self._gpus = max(1, gpus)
        self._patience = patience
        self._ranks: dict[int, Process] = {}
        self._watchers: dict[str, Process] = {}

    def close(self) -> None:
        """End all processes; those that are asked for later are new ones."""
        processes = (*self._ranks.values(), *self._watchers.values())
        for process in processes:
            process.dismiss()
        for process in processes:
            process.end()
        self._ranks.clear()
        self._watchers.clear()

    def rank(self, number: int = 0) -> Process:
        """Return that rank with its context; ranks go round the GPUs."""
        process = self._ranks.get(number)
        if process is None or not process.is_alive:
            process = self._ranks[number] = Process(self._patience)
            process.ask("open", device=number % self._gpus)
        return process

    def ranks(self, count: int) -> list[Process]:
        """Return the first so many ranks."""
        return [self.rank(number) for number in range(count)]

    @contextlib.contextmanager
    def fresh(self) -> Iterator[Process]:
        """Give a process that has done nothing yet, with its context; it ends with the block."""
        process = Process(self._patience)
        try:
            process.ask("open", device=0)
            yield process
        finally:
            process.end()

    def watcher(self, action: str) -> Process:
        """Return the neighbour that repeats the action on the first GPU."""
        if action not in self._watchers:
            self._watchers[action] = Process(self._patience)
            self._watchers[action].ask("watch", action=action, device=0)
        return self._watchers[action]

    @property
    def watched(self) -> tuple[str, ...]:
        """The actions of the neighbours that there are."""
        return tuple(self._watchers)

    def dismiss(self, action: str) -> None:
        """End a neighbour."""
        self._watchers.pop(action).end()


def together(processes: Sequence[Process], do: str, each: Sequence[Answer]) -> list[Answer]:
    """Have all begin the command at one moment; returns their answers. Raises MeasureError."""
    at_s = time.monotonic() + _LEAD_S
    for process, arguments in zip(processes, each, strict=True):
        process.begin(do, **arguments, at_s=at_s)
    answers, problem = [], None
    for process in processes:
        try:
            answers.append(process.answer())
        except MeasureError as error:  # the others answer all the same, and must be heard
            problem = error
    if problem is not None:
        raise problem
    return answers


@contextlib.contextmanager
def mapped(processes: Sequence[Process], name: str, path: str, size_bytes: int) -> Iterator[None]:
    """Have each process map its own slice of a file, and unregister and unmap it at the end."""
    part = size_bytes // len(processes)
    done = []
    try:
        for index, process in enumerate(processes):
            process.ask("map", name=name, path=path, offset=index * part, size_bytes=part)
            done.append(process)
        yield
    finally:
        for process in done:
            with contextlib.suppress(MeasureError):
                process.ask("unregister", name=name)
                process.ask("unmap", name=name)
