"""One worker at a time below a root, and one agent that has it to itself for life."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator

from hostprep.errors import BadInputError, BusyError, HostprepError
from hostprep.linux.files import closing_fd, from_os_error, open_own_folder, remove_file
from hostprep.linux.locks import lies_at, try_lock
from hostprep.node.apply.folder import clear_debris, is_debris, remove_put_aside
from hostprep.node.facts import WITHOUT_ROOT
from hostprep.node.observe.root import check_parents, parents

_NAME = ".lock"
_AGENT = ".agent.lock"
_MADE = ".made"
"""Marks a root that we made, and so may remove."""
_PAUSE_S = 0.05
_LOCK_FLAGS = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC


@contextlib.contextmanager
def exclusive(
    root: str, *, wait_timeout_s: float, on_wait: Callable[[str], None]
) -> Iterator[None]:
    """Make the root if need be, and be the only one to prepare or release below it.

    A second process waits; `on_wait` takes the holder's name, once. Raises BusyError after
    `wait_timeout_s`, BadInputError for a root that cannot be used.
    """
    path = f"{root}/{_NAME}"
    deadline_s = time.monotonic() + wait_timeout_s
    is_reported = False
    while (fd := _try(root, path)) is None:
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


def remove_root(root: str, names: tuple[str, ...]) -> None:
    """Remove the root, once no pool is left in it; to be called while holding it."""
    ours = (*names, _NAME, _MADE, _AGENT)
    for name in os.listdir(root):
        path = f"{root}/{name}"
        if name in names or _is_left_of_mounts(path):
            clear_debris(path)
    entries = set(os.listdir(root))
    if entries - set(ours):
        return
    for name in ours:
        with contextlib.suppress(FileNotFoundError, IsADirectoryError):
            os.unlink(f"{root}/{name}")
    if _MADE in entries:
        with contextlib.suppress(OSError):
            os.rmdir(root)


def _is_left_of_mounts(folder: str) -> bool:
    """Return whether containers with regions left it: each has a view below `devices` mounted.

    One without may be what kubelet made for a pod that waits for its pool, and has it mounted.
    """
    return is_debris(f"{folder}/devices") and is_debris(folder)


def _sweep(root: str) -> None:
    """Remove what a killed run left of a pool or zipapp that it was making or removing."""
    for name in os.listdir(root):
        if name.startswith(".") and name.endswith(".new"):
            remove_file(f"{root}/{name}")


def _make_root(root: str) -> None:
    if not root.startswith("/"):
        raise BadInputError(
            f"root {root!r} is not an absolute path", reason="BadRoot", remedy="begin it with /"
        )
    check_parents(root)
    try:
        if not os.path.lexists(root):
            # One by one: os.makedirs gives those in between whatever mode the umask leaves.
            for folder in [*parents(root), root]:
                with contextlib.suppress(FileExistsError):
                    os.mkdir(folder, mode=0o755)
            with open(f"{root}/{_MADE}", "ab"):
                pass
    except OSError as error:
        raise from_os_error(error, f"create {root}", permission_remedy=WITHOUT_ROOT) from error
    os.close(open_own_folder(root))


def _try(root: str, path: str) -> int | None:
    """Return the locked file, or None. Its holder may remove it, root and all, while we wait."""
    _make_root(root)
    try:
        fd = os.open(path, _LOCK_FLAGS, 0o600)
    except FileNotFoundError:
        return None
    except OSError as error:
        remedy = f"only its owner prepares and releases below {root}: {WITHOUT_ROOT}"
        raise from_os_error(error, f"open {path}", permission_remedy=remedy) from error
    if try_lock(fd, exclusive=True) and lies_at(path, fd):
        write_pid(fd)
        return fd
    os.close(fd)
    return None


def write_pid(fd: int) -> None:
    """Write our process id into a lock file: for people, so a full /run is no failure."""
    with contextlib.suppress(OSError):
        os.ftruncate(fd, 0)
        os.pwrite(fd, str(os.getpid()).encode(), 0)


def holder_at(path: str, who: str = "hostprep") -> str:
    """Return who holds a lock, as far as its file says."""
    with contextlib.suppress(OSError), open(path, encoding="ascii", errors="replace") as file:
        pid = file.read(20).strip()
        if pid:
            return f"another {who} (process {pid})"
    return f"another {who}"


class AgentLock:
    """Held by the one agent of a root: two with different specs would undo each other's work.

    A root that was never worked below gets no lock file: an agent without work leaves no trace.
    """

    def __init__(self, root: str) -> None:
        self._root = root
        self._path = f"{root}/{_AGENT}"
        self._fd: int | None = None

    def hold(self, *, make_root: bool = False) -> None:
        """Take the lock unless it is held; again where the root was replaced since.

        With `make_root` the root is made where it is missing: work is about to begin below it.
        Raises BadInputError where another agent holds the lock.
        """
        # Its holder may remove the file in between: then the next file counts.
        while not self._is_held():
            self._drop()
            try:
                if make_root:
                    _make_root(self._root)
                elif not os.path.lexists(f"{self._root}/{_NAME}"):
                    return
                self._fd = os.open(self._path, _LOCK_FLAGS, 0o600)
            except FileNotFoundError:
                continue  # the root went in between
            except (HostprepError, OSError):
                return  # the worker meets the same error, and reports it
            self._lock(self._fd)

    def _lock(self, fd: int) -> None:
        if not try_lock(fd, exclusive=True):
            self._drop()
            raise BadInputError(
                f"{holder_at(self._path, 'agent')} works below {self._root}",
                reason="AlreadyRunning",
                remedy="end it first; two nodes on one machine need a --root and a --state-dir"
                " each",
            )
        write_pid(fd)

    def close(self) -> None:
        """Release the lock; where nothing else is left below the root, remove it."""
        if self._is_held():
            with contextlib.suppress(OSError):
                if set(os.listdir(self._root)) <= {_AGENT, _MADE}:
                    remove_root(self._root, ())
        self._drop()

    def _is_held(self) -> bool:
        return self._fd is not None and lies_at(self._path, self._fd)

    def _drop(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
        self._fd = None
