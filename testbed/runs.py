"""Which testbeds run on this machine, and what killed ones left behind.

Every run holds a lock on a file of its name for as long as its process lives: the kernel drops it
whatever happens. A name whose lock is free is a run that ended without cleaning up. Its processes
are those that carry its random name in their environment; its folder carries the name too.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import shutil
import signal
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from testbed.processes import MARK

_PREFIX = "hostprep-testbed-"
_ROOM_BYTES = 2 << 30
_SOCKET_PATH_LIMIT = 60
"""Bytes for a base folder: the path of a unix socket has 108, and names follow."""
_END_SECONDS = 5.0


def carries_mark(environ: bytes, name: str) -> bool:
    """Whether a process's environment (NUL-separated) says that it belongs to a run."""
    return f"{MARK}={name}".encode() in environ.split(b"\0")


def is_run_folder(folder: str, name: str) -> bool:
    """Whether a recorded folder may be removed for a run: its last part is the run's name."""
    return (
        name.startswith(_PREFIX)
        and os.path.isabs(folder)
        and ".." not in folder.split("/")
        and os.path.basename(folder) == name
    )


def choose_base(candidates: Iterable[tuple[str, int]]) -> str:
    """The first folder of (folder, free bytes) with room and a short path, else /tmp."""
    for folder, free_bytes in candidates:
        if free_bytes >= _ROOM_BYTES and len(os.fsencode(folder)) <= _SOCKET_PATH_LIMIT:
            return folder
    return "/tmp"


@dataclass(slots=True)
class Run:
    """A run that is alive: its folder, and the lock that says so."""

    name: str
    folder: Path
    _record: Path
    _lock_fd: int

    def release(self) -> None:
        """Kill what still carries the run's mark, remove the folder and the record."""
        kill_marked(self.name)
        shutil.rmtree(self.folder, ignore_errors=True)
        self._record.unlink(missing_ok=True)
        os.close(self._lock_fd)


class Runs:
    """The register of runs, in a folder that all of a user's testbeds share."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def begin(self) -> Run:
        """Remove what killed runs left, and register a new one with a folder of its own."""
        with self._alone():
            self._sweep()
            name = f"{_PREFIX}{secrets.token_hex(4)}"
            folder = Path(choose_base(_bases())) / name
            record = self._folder / name
            fd = os.open(record, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            fcntl.flock(fd, fcntl.LOCK_EX)
            os.write(fd, os.fsencode(folder))
            folder.mkdir(mode=0o700)
            return Run(name, folder, record, fd)

    def sweep(self) -> list[str]:
        """Remove what killed runs left; returns their names."""
        with self._alone():
            return self._sweep()

    def alive(self) -> list[str]:
        """Names of the runs whose process lives."""
        with self._alone():
            return [record.name for record in self._records() if not _is_free(record)]

    def alive_folders(self) -> list[Path]:
        """Folders of the runs whose process lives."""
        with self._alone():
            records = [record for record in self._records() if not _is_free(record)]
            return [Path(os.fsdecode(record.read_bytes())) for record in records]

    @contextmanager
    def _alone(self) -> Iterator[None]:
        self._folder.mkdir(parents=True, exist_ok=True)
        with open(self._folder / ".lock", "w", encoding="ascii") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def _records(self) -> list[Path]:
        return sorted(self._folder.glob(f"{_PREFIX}*"))

    def _sweep(self) -> list[str]:
        dead = [record for record in self._records() if _is_free(record)]
        for record in dead:
            kill_marked(record.name)
            folder = os.fsdecode(record.read_bytes())
            if is_run_folder(folder, record.name):
                shutil.rmtree(folder, ignore_errors=True)
            record.unlink(missing_ok=True)
        return [record.name for record in dead]


def _is_free(record: Path) -> bool:
    try:
        with open(record, "rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except FileNotFoundError:
        return False
    return True


def _bases() -> Iterator[tuple[str, int]]:
    for folder in ("/dev/shm", tempfile.gettempdir()):
        if os.access(folder, os.W_OK | os.X_OK):
            yield folder, shutil.disk_usage(folder).free


def kill_marked(name: str) -> list[int]:
    """SIGKILL every process of a run and wait for their end; returns their ids.

    A process is held by a descriptor before its mark is read: its id cannot pass to another.
    """
    killed: set[int] = set()
    deadline = time.monotonic() + _END_SECONDS
    while found := dict(_marked(name)):
        for pid, pidfd in found.items():
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)
            os.close(pidfd)
            killed.add(pid)
        if time.monotonic() > deadline:
            break
        time.sleep(0.02)
    return sorted(killed)


def _marked(name: str) -> Iterator[tuple[int, int]]:
    for entry in os.listdir("/proc"):
        if not entry.isdecimal() or int(entry) == os.getpid():
            continue
        try:
            pidfd = os.pidfd_open(int(entry))
        except OSError:
            continue
        try:
            # A zombie's environment reads as nothing: it does not count.
            with open(f"/proc/{entry}/environ", "rb") as file:
                ours = carries_mark(file.read(), name)
        except OSError:
            ours = False
        if ours:
            yield int(entry), pidfd
        else:
            os.close(pidfd)
