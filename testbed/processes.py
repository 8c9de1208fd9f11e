"""Child processes that end with their parent, free ports, and waiting for a condition."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

MARK = "HOSTPREP_TESTBED"
"""Environment variable with the run's name: by it the processes of a killed run are found."""

# PR_SET_PDEATHSIG (prctl(2)) is set by the program itself before it execs, with a look at its
# parent afterwards: that parent may have died before the signal was asked for.
_DIE_WITH_PARENT = """
import ctypes, os, sys
ctypes.CDLL(None).prctl(1, 9)
if os.getppid() != int(sys.argv[1]):
    os._exit(1)
os.execvp(sys.argv[2], sys.argv[2:])
"""
# The signal comes when the *thread* that forked ends. Tests start servers from short-lived
# threads too, so one thread that lives as long as this process does all of it.
_starter = ThreadPoolExecutor(max_workers=1, thread_name_prefix="testbed-starter")


class Child:
    """A program that runs until it is stopped; what it prints goes to a log file."""

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        *,
        run: str,
        log: Path,
        environ: Mapping[str, str] | None = None,
        cwd: Path | None = None,
    ) -> None:
        """`environ` is the whole environment, by default ours; `run` marks it as the run's."""
        self.name = name
        self.log = log
        self._command = list(command)
        self._environ = {**(os.environ if environ is None else environ), MARK: run}
        self._cwd = cwd
        self._process = _starter.submit(self._start).result()

    def _start(self) -> subprocess.Popen[bytes]:
        shim = [sys.executable, "-I", "-S", "-c", _DIE_WITH_PARENT, str(os.getpid())]
        with open(self.log, "ab") as log:
            # A session of its own: Ctrl-C reaches only us, and we stop the others in order.
            return subprocess.Popen(
                [*shim, *self._command],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=self._environ,
                cwd=self._cwd,
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        """The exit status, negative for a signal; None while it runs."""
        return self._process.poll()

    @property
    def alive(self) -> bool:
        """Whether it still runs."""
        return self.returncode is None

    def signal(self, number: int) -> None:
        """Send a signal, such as SIGSTOP; nothing when it ended already."""
        self._process.send_signal(number)

    def kill(self) -> None:
        """SIGKILL, and wait for the end."""
        self._process.kill()
        self._process.wait()

    def stop(self, timeout_s: float = 10.0) -> int:
        """SIGTERM, after `timeout_s` SIGKILL; returns the exit status."""
        self._process.terminate()
        return self.wait(timeout_s)

    def wait(self, timeout_s: float = 10.0) -> int:
        """Wait for the end, kill it after `timeout_s`; returns the exit status."""
        try:
            return self._process.wait(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            self.kill()
            return -signal.SIGKILL

    def output(self) -> str:
        """Everything it printed so far."""
        return self.log.read_text(encoding="utf-8", errors="replace")

    def tail(self, lines: int = 20) -> str:
        """The last lines it printed."""
        return "\n".join(self.output().splitlines()[-lines:])

    def wait_for_output(self, text: str, timeout_s: float = 10.0) -> None:
        """Wait until it printed `text`; raises TimeoutError with what it printed instead."""
        deadline = time.monotonic() + timeout_s
        while text not in self.output():
            if time.monotonic() > deadline or not self.alive:
                raise TimeoutError(f"{self.name} never said {text!r}:\n{self.tail()}")
            time.sleep(0.02)


def free_port() -> int:
    """Return a port of loopback that nobody uses now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


Found = TypeVar("Found")


def wait_for(
    look: Callable[[], Found | None],
    timeout_s: float = 10.0,
    *,
    every_s: float = 0.05,
    why: str = "it never came true",
) -> Found:
    """Call `look` until it returns something true, and return that.

    Raises AssertionError with `why` and the last thing seen, or the last exception, in time.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        failure: Exception | None = None
        try:
            seen = look()
        except Exception as error:
            failure = error
        else:
            if seen:
                return seen
        if time.monotonic() > deadline:
            last = repr(failure) if failure else repr(seen)
            raise AssertionError(f"{why} in {timeout_s:.0f} s; last seen: {last}") from failure
        time.sleep(every_s)
