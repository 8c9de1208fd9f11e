"""Engines killed while they attach, and what that leaves behind."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import hostprep
from testbed.machine import POOL
from testbed.processes import wait_for

_END_S = 60.0
_GONE_S = 30.0
_MARK = b"the last owner's" * 256


def moments(count: int, longest_s: float) -> Iterator[float]:
    """Yield that many moments after a start: anywhere, but not all of them early."""
    for index in range(count):
        yield longest_s * (index + random.random()) / count


def killed_at(
    moment_s: float,
    command: Sequence[str],
    environ: Mapping[str, str],
    log: Path,
    *,
    number: int = signal.SIGKILL,
    is_ready: Callable[[int], bool] = lambda process_id: False,
) -> int:
    """Start an engine and end it at that moment, or once it is ready; return how it ended.

    The engine alone, not what it has started: those have to see it by themselves.
    """
    with (
        log.open("ab") as output,
        subprocess.Popen(command, stdout=output, stderr=output, env=dict(environ)) as process,
    ):
        deadline_s = time.monotonic() + moment_s
        while time.monotonic() < deadline_s and not is_ready(process.pid):
            assert process.poll() is None, f"it ended by itself:\n{log.read_text('utf-8')[-4000:]}"
            time.sleep(0.02)
        process.send_signal(number)
        return process.wait(_END_S)


def beside(root: str) -> list[str]:
    """Return the command lines of our processes that speak of a root: those beside an engine."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            words = (folder / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        line = b" ".join(words).decode("utf-8", "replace")
        if root in line and "hostprep" in line and int(folder.name) != os.getpid():
            found.append(line)
    return found


def is_left_whole(root: str, sizes_bytes: Mapping[str, int]) -> None:
    """Assert that nothing of a dead engine is in the way of the next owner, who reads zeros.

    And leaves other bytes, so that the next engine finds something to be zeroed.
    """
    for name, size_bytes in sizes_bytes.items():
        status = os.stat(f"{root}/{POOL}/mem/{name}")
        assert (status.st_size, status.st_blocks * 512) == (size_bytes, size_bytes)
    wait_for(lambda: not beside(root), _GONE_S, why=f"still there: {beside(root)}")
    for name in sizes_bytes:
        with hostprep.attach(POOL, region=name, root=root, wait_timeout_s=_GONE_S) as memory:
            assert not any(memory.buffer), f"{name} holds what is not the next owner's"
            memory.buffer[:] = _MARK * (size_bytes // len(_MARK))
    links = [link for link in Path("/dev/shm").iterdir() if link.is_symlink()]
    left = [link.name for link in links if os.readlink(link).startswith(root)]
    assert not left, "the next claim takes them away"
