"""A real worker process beside a test, spoken to as the agent does."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from types import TracebackType
from typing import Self

from hostprep.agent.messages import (
    DesiredPool,
    Done,
    Message,
    PoolDone,
    PoolResult,
    ReconcileRequest,
    ReconcileResult,
    decode,
    encode,
)
from hostprep.api.pool_spec import PoolSpec


def wanted(*specs: PoolSpec, leave_dirty: bool = False) -> tuple[DesiredPool, ...]:
    """Return what the agent would send; the key is the spec's own text."""
    return tuple(
        DesiredPool(spec=spec, key=str(hash(spec)), leave_dirty=leave_dirty) for spec in specs
    )


class WorkerProcess:
    """A worker below one root; killed at the end if it still runs."""

    def __init__(self, root: str, *options: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "hostprep.agent.worker", "--root", root, *options],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        self._number = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.kill()

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    def ask(self, *wishes: DesiredPool, held: tuple[str, ...] = ()) -> None:
        """Send a round's request."""
        assert self._process.stdin is not None
        self._number += 1
        self._process.stdin.write(
            encode(ReconcileRequest(number=self._number, pools=wishes, held=held))
        )
        self._process.stdin.flush()

    def hear(self) -> Message:
        """Return the next message."""
        assert self._process.stdout is not None
        return decode(self._process.stdout.readline())

    def round(self, *wishes: DesiredPool, held: tuple[str, ...] = ()) -> list[Message]:
        """Ask, and return everything up to the end of the work that begins."""
        self.ask(*wishes, held=held)
        return self.until_idle()

    def until_idle(self) -> list[Message]:
        """Return all messages up to the end of the work."""
        heard: list[Message] = []
        while True:
            message = self.hear()
            heard.append(message)
            if isinstance(message, Done) or (
                isinstance(message, ReconcileResult) and not message.busy
            ):
                return heard

    def end(self) -> int:
        """Close its input and wait for its end."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        return self._process.wait(20)

    def terminate(self) -> int:
        """SIGTERM, and wait for its end."""
        self._process.send_signal(signal.SIGTERM)
        return self._process.wait(20)

    def kill(self) -> None:
        """SIGKILL, whatever it is doing."""
        if self._process.poll() is None:
            os.kill(self._process.pid, signal.SIGKILL)
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                stream.close()


def results_of(messages: list[Message]) -> dict[str, PoolResult]:
    """Return the last that was said of each pool."""
    last: dict[str, PoolResult] = {}
    for message in messages:
        if isinstance(message, ReconcileResult):
            last |= {result.name: result for result in message.results}
        elif isinstance(message, PoolDone):
            last[message.result.name] = message.result
    return last
