"""The worker process as the agent sees it: started, sent requests, started again when it ends."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from hostprep.agent.messages import Done, Message, ReconcileRequest, decode, encode
from hostprep.kube.backoff import Backoff
from hostprep.kube.logs import Logger

_MAX_LINE_BYTES = 16 << 20
_STEADY_S = 60.0
"""A worker that lived so long shows no persistent fault: the pauses start over."""


@dataclass
class Supervisor:
    """Keeps one worker running; hands on its messages."""

    root: str
    state_dir: str
    """The agent's state folder, where the worker remembers which pools have a boot script."""
    on_message: Callable[[Message], None]
    on_start: Callable[[], None]
    on_lost: Callable[[], None]
    """Called when the worker ended unasked."""
    log: Logger
    _process: asyncio.subprocess.Process | None = None
    _stopping: bool = False
    _complaint: str = ""
    _backoff: Backoff = field(default_factory=lambda: Backoff(first_s=0.2, most_s=30.0))

    @property
    def pid(self) -> int | None:
        """The worker's process id."""
        return self._process.pid if self._process else None

    async def run(self) -> None:
        """Keep a worker running until `stop`; where this is cancelled, it is killed."""
        try:
            while not self._stopping:
                begin_s = time.monotonic()
                await self._run_once()
                if self._stopping:
                    return
                if time.monotonic() - begin_s >= _STEADY_S:
                    self._backoff.reset()
                self.on_lost()
                await asyncio.sleep(self._backoff.next_s())
        finally:
            self.kill()
            if self._process is not None:
                await self._process.wait()

    async def send(self, request: ReconcileRequest) -> None:
        """Send the worker a request; nothing happens while there is none."""
        process = self._process
        if process is None or process.stdin is None or process.returncode is not None:
            return
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            process.stdin.write(encode(request))
            await process.stdin.drain()

    def kill(self) -> None:
        """Kill a worker that does not answer; another one follows."""
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()

    async def stop(self, *, timeout_s: float) -> None:
        """Ask the worker to end after the piece in flight; kill it when the time is over.

        The next one adopts what it leaves half done: nothing is lost by the kill.
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
            self.kill()
            await process.wait()

    async def _run_once(self) -> None:
        process = self._process = await asyncio.create_subprocess_exec(
            sys.executable,
            *("-m", "hostprep.agent.worker"),
            *("--root", self.root, "--state-dir", self.state_dir),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            limit=_MAX_LINE_BYTES,
            # One heap for all threads: its pieces come back, and it works on files, not on heaps.
            env={**os.environ, "MALLOC_ARENA_MAX": "1"},
        )
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
            self._log_failure(message)
        self.on_message(message)

    def _log_failure(self, done: Done) -> None:
        """Log once what concerns no pool alone, and so shows in no pool's phase."""
        error = done.error
        complaint = error.message if error is not None and not error.waits else ""
        if error is not None and complaint and complaint != self._complaint:
            self.log.warning("work_failed", reason=error.reason, error=error.message)
        self._complaint = complaint
