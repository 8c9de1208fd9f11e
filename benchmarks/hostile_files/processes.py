"""Children of the fuzzer: an attacker that moves on request, and operations with their outcome."""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import resource
import select
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import IO, NoReturn

from benchmarks.hostile_files.moves import Attacker

CRASHED = 70
"""Exit code of an operation that raised something else than an error of ours."""
_MOST_BYTES = 2 << 30
"""Of private memory an operation may have: one that reads without a bound must not take ours."""
_PAUSE_S = 0.001


@dataclass(frozen=True)
class User:
    """A user of one group, without capabilities."""

    uid: int
    gid: int

    def become(self) -> None:
        """Change the calling process, for good."""
        os.setgroups([])
        os.setgid(self.gid)
        os.setuid(self.uid)


@dataclass(frozen=True)
class Outcome:
    """What an operation printed and took."""

    code: int
    out: str
    err: str
    took_s: float
    """Less the time that it had to wait for a CPU: the machine has other work."""
    peak_bytes: int
    timed_out: bool


def run_child(work: Callable[[], int], *, user: User | None, limit_s: float) -> Outcome:
    """Run `work` in a child of its own process group; kill the group after `limit_s` seconds."""
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        begin_s = time.monotonic()
        pid = os.fork()
        if pid == 0:
            _child(work, user, out, err)
        timed_out = False
        queued_s = 0.0
        try:
            timed_out = not _ends_within(pid, limit_s)
            if timed_out:  # where it hangs
                os.kill(pid, signal.SIGABRT)
                _ends_within(pid, 1.0)
            queued_s = _queued_s(pid)
        finally:
            # Of a group that has ended nothing is left to kill, unless a grandchild stayed.
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(pid, signal.SIGKILL)
            _, status, usage = os.wait4(pid, 0)
        return Outcome(
            os.waitstatus_to_exitcode(status),
            _text(out),
            _text(err),
            time.monotonic() - begin_s - queued_s,
            usage.ru_maxrss * 1024,
            timed_out,
        )


def _child(work: Callable[[], int], user: User | None, out: IO[bytes], err: IO[bytes]) -> NoReturn:
    code = CRASHED
    try:
        os.setpgid(0, 0)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGALRM):
            signal.signal(number, signal.SIG_DFL)
        faulthandler.enable(err)
        resource.setrlimit(resource.RLIMIT_DATA, (_MOST_BYTES, _MOST_BYTES))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(out.fileno(), 1)
        os.dup2(err.fileno(), 2)
        # As a terminal's: whatever cannot be encoded shows.
        sys.stdout = os.fdopen(1, "w", encoding="utf-8", closefd=False)
        sys.stderr = os.fdopen(2, "w", encoding="utf-8", errors="backslashreplace", closefd=False)
        if user is not None:
            user.become()
        code = work()
        sys.stdout.flush()
    except SystemExit as exit_:
        code = exit_.code if isinstance(exit_.code, int) else 1
    except BaseException:
        traceback.print_exc()
        code = CRASHED
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _ends_within(pid: int, limit_s: float) -> bool:
    fd = os.pidfd_open(pid)
    try:
        return bool(select.select([fd], [], [], limit_s)[0])
    finally:
        os.close(fd)


def _queued_s(pid: int) -> float:
    """Return how long a child that has ended waited for a CPU (schedstat, in nanoseconds)."""
    try:
        with open(f"/proc/{pid}/schedstat", encoding="ascii") as file:
            return int(file.read().split()[1]) / 1e9
    except (OSError, IndexError):
        return 0.0


def _text(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read(8 << 20).decode("utf-8", "surrogateescape")


class AttackerProcess:
    """An attacker in a child, as a user or with root's rights; its moves are repeatable.

    It answers each request with what it did; between two of them it moves only where it was told
    to go on. It ends with this process, or at `close()`.
    """

    def __init__(self, user: User | None, make: Callable[[], Attacker]) -> None:
        commands, self._commands = os.pipe()
        self._answers, answers = os.pipe()
        self._pid = os.fork()
        if self._pid == 0:
            os.close(self._commands)
            os.close(self._answers)
            _attack(user, make, commands, answers)
        os.close(commands)
        os.close(answers)
        self._reader = os.fdopen(self._answers, encoding="ascii", closefd=False)

    def moves(self, count: int) -> list[tuple[str, str]]:
        """Make that many moves; returns each one's kind and what it was."""
        return self._ask(str(count))

    @contextlib.contextmanager
    def moving(self, log: list[tuple[str, str]]) -> Iterator[None]:
        """Move all the time while the block runs; what was done is added to the log."""
        os.write(self._commands, b"go on\n")
        yield
        log += self._ask("0")

    def close(self) -> None:
        """End it, and with it all that it holds."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self._pid, 0)
        self._reader.close()
        os.close(self._answers)
        os.close(self._commands)

    def _ask(self, command: str) -> list[tuple[str, str]]:
        os.write(self._commands, f"{command}\n".encode())
        line = self._reader.readline()
        if not line:
            raise RuntimeError("the attacker ended by itself")
        return [(kind, what) for kind, what in json.loads(line)]


def _attack(
    user: User | None, make: Callable[[], Attacker], commands: int, answers: int
) -> NoReturn:
    try:
        # Its leases are broken, its files cut short under its mappings: it goes on.
        for number in (signal.SIGIO, signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
        if user is not None:
            user.become()
        os.umask(0)
        attacker = make()
        log: list[tuple[str, str]] = []
        goes_on = False
        pending = b""
        while True:
            if goes_on and not select.select([commands], [], [], _PAUSE_S)[0]:
                log.append(attacker.move())
                continue
            data = os.read(commands, 64)
            if not data:
                os._exit(0)
            *lines, pending = (pending + data).split(b"\n")
            for line in lines:
                goes_on = line == b"go on"
                if not goes_on:
                    log += [attacker.move() for _ in range(int(line))]
                    answer = json.dumps(log).encode() + b"\n"
                    log.clear()
                    while answer:
                        answer = answer[os.write(answers, answer) :]
    except BaseException:
        traceback.print_exc()
        os._exit(1)
