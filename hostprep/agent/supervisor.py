"""The worker process as the agent sees it: started, spoken to, started again when it ends."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from hostprep.agent.messages import Done, Message, Round, decode, encode
from hostprep.kube.backoff import Backoff

if TYPE_CHECKING:
    from hostprep.kube.logs import Logger

__all__ = ["Supervisor", "early_worker", "send", "start_worker"]

_MAX_LINE_BYTES = 16 << 20
_STEADY_S = 60.0
"""A worker that lived so long is no sign of a fault that goes on: the pauses begin anew."""


async def start_worker(root: str, state_dir: str) -> asyncio.subprocess.Process:
    """Start a worker. It does nothing until it is asked, and ends when its input does."""
    return await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", "hostprep.agent.worker", "--root", root, "--state-dir", state_dir),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        limit=_MAX_LINE_BYTES,
        # One heap for all threads: its pieces come back, and it works on files, not on heaps.
        env={**os.environ, "MALLOC_ARENA_MAX": "1"},
    )


@contextlib.asynccontextmanager
async def early_worker(root: str, state_dir: str) -> AsyncIterator[asyncio.subprocess.Process]:
    """Start the first worker before the agent reads its own modules, and end it with the block."""
    process = await start_worker(root, state_dir)
    try:
        yield process
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()


async def send(process: asyncio.subprocess.Process, request: Round) -> None:
    """Ask a worker; nothing happens where it has ended."""
    if process.stdin is None or process.returncode is not None:
        return
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        process.stdin.write(encode(request))
        await process.stdin.drain()


@dataclass
class Supervisor:
    """Keeps one worker running; hands on what it says."""

    root: str
    state_dir: str
    """The agent's state folder, where the worker remembers which pools have a boot script."""
    on_message: Callable[[Message], None]
    on_start: Callable[[], None]
    on_lost: Callable[[], None]
    """Told when the worker ended unasked."""
    log: Logger
    first: asyncio.subprocess.Process | None = None
    """A worker that was started beforehand."""
    _process: asyncio.subprocess.Process | None = None
    _stopping: bool = False
    _complaint: str = ""
    _backoff: Backoff = field(default_factory=lambda: Backoff(first_s=0.2, most_s=30.0))

    @property
    def pid(self) -> int | None:
        """The worker's process id."""
        return self._process.pid if self._process else None

    async def run(self) -> None:
        """Keep a worker running until `stop`."""
        while not self._stopping:
            begin_s = time.monotonic()
            await self._run_once()
            if self._stopping:
                return
            if time.monotonic() - begin_s >= _STEADY_S:
                self._backoff.reset()
            self.on_lost()
            await asyncio.sleep(self._backoff.next_s())

    async def send(self, request: Round) -> None:
        """Ask the worker; nothing happens while there is none."""
        if self._process is not None:
            await send(self._process, request)

    def kill(self) -> None:
        """End a worker that answers no more; another one follows."""
        if self._process is not None and self._process.returncode is None:
            self._process.kill()

    async def stop(self, *, timeout_s: float) -> None:
        """Ask the worker to end after the piece in flight; kill it when the time is over.

        What it leaves half done the next one adopts: nothing is lost by the kill.
        """
        self._stopping = True
        process = self._process
        if process is None or process.returncode is not None:
            return
        if process.stdin is not None:
            process.stdin.close()
        try:
            await asyncio.wait_for(process.wait(), timeout_s)
        except TimeoutError:
            self.log.warning("worker_killed", pid=process.pid, after_s=timeout_s)
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()

    async def _run_once(self) -> None:
        process, self.first = self.first or await start_worker(self.root, self.state_dir), None
        self._process = process
        self.log.info("worker_started", pid=process.pid)
        self.on_start()
        assert process.stdout is not None  # noqa: S101 - asked for above
        try:
            while line := await process.stdout.readline():
                self._take(line)
        except ValueError as error:  # a line beyond the limit
            self.log.warning("worker_said_too_much", error=str(error))
            process.kill()
        code = await process.wait()
        if not self._stopping:
            self.log.error("worker_ended", pid=process.pid, exit_code=code)

    def _take(self, line: bytes) -> None:
        try:
            message = decode(line)
        except ValueError as error:
            self.log.warning("worker_said_nonsense", error=str(error))
            return
        if isinstance(message, Done):
            self._note(message)
        self.on_message(message)

    def _note(self, done: Done) -> None:
        """Say once what concerns no pool alone, and so shows in no pool's phase."""
        error = done.error
        said = error.message if error is not None and not error.waits else ""
        if error is not None and said and said != self._complaint:
            self.log.warning("work_failed", reason=error.reason, error=error.message)
        self._complaint = said
