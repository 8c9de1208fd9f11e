"""One worker at a time below a root, and one agent that has it to itself for life."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator

from hostprep.errors import BadInputError, BusyError, HostprepError
from hostprep.linux.files import closing_fd, from_os_error, remove_file
from hostprep.linux.locks import lies_at, try_lock
from hostprep.node.apply.folder import remove_put_aside
from hostprep.node.apply.root import (
    AGENT_LOCK,
    LOCK,
    LOCK_FLAGS,
    MADE,
    make_root,
    remove_root,
    try_root_lock,
)
from hostprep.node.facts import WITHOUT_ROOT
from hostprep.paths import canonical_root

_PAUSE_S = 0.05


@contextlib.contextmanager
def exclusive(
    root: str, *, wait_timeout_s: float, on_wait: Callable[[str], None]
) -> Iterator[None]:
    """Make the root if need be, and be the only one to prepare or release below it.

    A second process waits; `on_wait` takes the holder's name, once. Raises BusyError after
    `wait_timeout_s`, BadInputError for a root that cannot be used.
    """
    path = f"{root}/{LOCK}"
    deadline_s = time.monotonic() + wait_timeout_s
    is_reported = False
    while (fd := _try(root)) is None:
        if not is_reported:
            on_wait(holder_at(path))
            is_reported = True
        if time.monotonic() >= deadline_s:
            raise BusyError(
                f"{holder_at(path)} is at work below {root}",
                reason="AlreadyRunning",
                remedy="wait for it to end, or give --wait more seconds",
            )
        time.sleep(_PAUSE_S)
    try:
        with closing_fd(fd):
            _sweep(root)
            yield
    finally:  # seconds, where an engine left many files: by now others may go on
        remove_put_aside(root)


def _sweep(root: str) -> None:
    """Remove what a killed run left of a pool or zipapp that it was making or removing."""
    for name in os.listdir(root):
        if name.startswith(".") and name.endswith(".new"):
            remove_file(f"{root}/{name}")


def _try(root: str) -> int | None:
    """Return the locked file, or None. Its holder may remove it, root and all, while we wait."""
    make_root(root)
    try:
        fd = try_root_lock(root)
    except OSError as error:
        remedy = f"only its owner prepares and releases below {root}: {WITHOUT_ROOT}"
        raise from_os_error(error, f"open {root}/{LOCK}", permission_remedy=remedy) from error
    if fd is not None:
        write_pid(fd)
    return fd


def write_pid(fd: int) -> None:
    """Write our process id into a lock file: for people, so a full /run is no failure."""
    with contextlib.suppress(OSError):
        os.ftruncate(fd, 0)
        os.pwrite(fd, str(os.getpid()).encode(), 0)


def holder_at(path: str, who: str = "hostprep") -> str:
    """Return who holds a lock, as far as its file says."""
    with contextlib.suppress(OSError), closing_fd(os.open(path, os.O_RDONLY | os.O_NONBLOCK)) as fd:
        pid = os.read(fd, 20).decode("ascii", "replace").strip()
        if pid:
            return f"another {who} (process {pid})"
    return f"another {who}"


class AgentLock:
    """Held by the one agent of a root: two with different specs would undo each other's work.

    A root that was never worked below gets no lock file: an agent without work leaves no trace.
    """

    def __init__(self, root: str) -> None:
        self._root = canonical_root(root)
        self._path = f"{self._root}/{AGENT_LOCK}"
        self._fd: int | None = None

    def hold(self, *, make: bool = False) -> None:
        """Take the lock unless it is held; again where the root was replaced since.

        With `make` the root is made where it is missing: work is about to begin below it.
        Raises BadInputError where another agent holds the lock.
        """
        # Its holder may remove the file in between: then the next file counts.
        while not self._is_held():
            self._drop()
            try:
                if make:
                    make_root(self._root, mount_existing=True)
                elif not os.path.lexists(f"{self._root}/{LOCK}"):
                    return
                self._fd = os.open(self._path, LOCK_FLAGS, 0o600)
            except FileNotFoundError:
                continue  # the root went in between
            except BlockingIOError as error:
                raise self._held_by_another() from error
            except (HostprepError, OSError):
                return  # the worker meets the same error, and reports it
            self._lock(self._fd)

    def _lock(self, fd: int) -> None:
        if not try_lock(fd, exclusive=True):
            self._drop()
            raise self._held_by_another()
        write_pid(fd)

    def _held_by_another(self) -> BadInputError:
        return BadInputError(
            f"{holder_at(self._path, 'agent')} works below {self._root}",
            reason="AlreadyRunning",
            remedy="end it first; two nodes on one machine need a --root and a --state-dir each",
        )

    def close(self) -> None:
        """Release the lock; where nothing else is left below the root, remove it."""
        if self._is_held():
            with contextlib.suppress(OSError):
                if set(os.listdir(self._root)) <= {AGENT_LOCK, MADE}:
                    fd = try_root_lock(self._root)
                    if fd is not None:
                        with closing_fd(fd):
                            remove_root(self._root, ())
        self._drop()

    def _is_held(self) -> bool:
        return self._fd is not None and lies_at(self._path, self._fd)

    def _drop(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
        self._fd = None
