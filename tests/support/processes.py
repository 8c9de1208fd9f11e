"""Processes that hold memory in the ways that engines and their accidents do."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def forked(work: Callable[[Callable[[], None]], None]) -> Iterator[int]:
    """Run `work(ready)` in a forked child; yield its id once it called `ready`, kill it after.

    The child hangs after `work` returned, holding whatever it held.
    """
    read_end, write_end = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(read_end)
        try:
            work(lambda: _tell(write_end))
            while True:
                time.sleep(60)
        except BaseException as error:
            os.write(2, f"child: {type(error).__name__}: {error}\n".encode())
        os._exit(1)
    os.close(write_end)
    try:
        assert os.read(read_end, 1) == b"+", "the child failed before it was ready"
        yield pid
    finally:
        os.close(read_end)
        kill(pid)


def _tell(fd: int) -> None:
    os.write(fd, b"+")


def kill(pid: int) -> None:
    """Kill a child of ours and wait for its end; nothing if it ended already."""
    try:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    except (ProcessLookupError, ChildProcessError):
        pass


def python(*arguments: str, timeout_s: float = 60) -> subprocess.CompletedProcess[str]:
    """Run this Python with arguments."""
    return subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )


def hostprep(*arguments: str, timeout_s: float = 60) -> subprocess.CompletedProcess[str]:
    """Run the command line."""
    return python("-m", "hostprep", *arguments, timeout_s=timeout_s)


def hostprep_as(uid: int, gid: int, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the command line as a user whose one capability is to read this checkout."""
    keep = "-all,+dac_read_search"
    drop = ["setpriv", f"--reuid={uid}", f"--regid={gid}", "--clear-groups"]
    drop += [f"--inh-caps={keep}", f"--ambient-caps={keep}", f"--bounding-set={keep}"]
    return subprocess.run(
        [*drop, sys.executable, "-B", "-m", "hostprep", *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
        env={"PATH": os.environ["PATH"], "HOME": "/nonexistent"},
    )


def wait_until(condition: Callable[[], bool], *, timeout_s: float = 10) -> None:
    """Wait for a condition that must come true."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it never came true"
        time.sleep(0.01)
