"""The folders of turnstiles: opened by engines, made and kept tidy by whoever prepares the node.

Anybody may create files there (mode 1777). What a prank could leave in place for good, such as a
link in a slot's place or a heap of files, is cleared away here, by their owner.
"""

from __future__ import annotations

import contextlib
import os
import stat

from hostprep.cuda.turnstile_tickets import (
    SLOT_MODE,
    is_slot_name,
    is_ticket_name,
    lives,
    open_plain,
)
from hostprep.errors import BadInputError, NotReadyError
from hostprep.linux.files import closing_fd, open_folder
from hostprep.linux.locks import try_lock
from hostprep.linux.tmpfile import give_name, new_nameless
from hostprep.paths import POOL_MARKS, TURNSTILE

__all__ = ["make_turnstiles", "open_turnstile", "remove_turnstiles"]

_MODE = 0o1777
_FOLDER_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_SLOT = "slot0"


def open_turnstile(root: str, key: str) -> int:
    """Open a key's folder, made where missing; follows no link. Raises OSError, HostprepError.

    The folder around it is the node's, and never made here: in a container that sees nothing of
    the root but its pool, an engine's own would be a turnstile for it alone.
    """
    with closing_fd(_open_all(root, make=False)) as folder:
        return _open_or_make(folder, key)


def make_turnstiles(root: str, keys: tuple[str, ...] = ("node",)) -> None:
    """Have the folders, for engines that may not make them; by whoever prepares the node.

    Each with its first slot, which is ours then, so that nobody else can take it away; and without
    whatever is no living ticket. Raises OSError, HostprepError.
    """
    with closing_fd(_open_all(root, make=True)) as folder:
        for key in keys:
            with contextlib.suppress(FileNotFoundError):
                if not _is_ours(os.stat(key, dir_fd=folder, follow_symlinks=False)):
                    _clear(folder, key)
            with closing_fd(_open_or_make(folder, key)) as turnstile:
                if _is_ours(os.fstat(turnstile)):  # else somebody was faster: the next time
                    _tidy(turnstile)
                    _have_slot(turnstile)


def remove_turnstiles(root: str) -> None:
    """Remove the folders with all that is in them; by root, once no pool is left.

    Whoever waits there goes on without taking turns. Links are removed, never followed; a folder
    of that name that is not everybody's to write to is not ours.
    """
    folder = f"{root}/{TURNSTILE}"
    with contextlib.suppress(OSError):
        if stat.S_IMODE(os.lstat(folder).st_mode) == _MODE:
            import shutil

            shutil.rmtree(folder, ignore_errors=True)


def _is_ours(status: os.stat_result) -> bool:
    return status.st_uid == os.geteuid()


def _tidy(folder: int) -> None:
    """Remove what is neither a slot nor a living ticket, dead ones of other users included."""
    with os.scandir(folder) as entries:
        names = [entry.name for entry in entries if not is_slot_name(entry.name)]
    for name in names:
        is_plain = stat.S_ISREG(_mode(folder, name))
        if is_plain and is_ticket_name(name):
            lives(folder, name)  # removes it if not
        else:
            _clear(folder, name)


def _have_slot(folder: int) -> None:
    """Have the first slot, ours and open to everybody: the sticky bit then keeps it in place.

    Another's is replaced once nobody has its turn there: under its lock, so that whoever is about
    to take it sees that it has gone.
    """
    with contextlib.suppress(FileNotFoundError):
        try:
            fd = open_plain(folder, _SLOT)
        except OSError as error:
            if isinstance(error, FileNotFoundError):
                raise
            _clear(folder, _SLOT)
        else:
            with closing_fd(fd):
                status = os.fstat(fd)
                if _is_ours(status) and stat.S_IMODE(status.st_mode) == SLOT_MODE:
                    return
                if not try_lock(fd, exclusive=True):
                    return
                os.unlink(_SLOT, dir_fd=folder)
    fd = new_nameless(folder, SLOT_MODE)
    with closing_fd(fd):
        give_name(folder, fd, _SLOT)


def _mode(folder: int, name: str) -> int:
    try:
        return os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode
    except FileNotFoundError:
        return 0


def _clear(folder: int, name: str) -> None:
    """Remove whatever it is; a link itself, never what it leads to. What resists stays.

    In the open folder: its owner could lead a path elsewhere meanwhile.
    """
    try:
        os.unlink(name, dir_fd=folder)
    except IsADirectoryError:
        import shutil

        # Python 3.11: the node half's, which alone comes here.
        shutil.rmtree(name, ignore_errors=True, dir_fd=folder)
    except OSError:
        pass


def _open_all(root: str, *, make: bool) -> int:
    with closing_fd(open_folder(root)) as parent:
        _refuse_pool(root, parent)
        try:
            return _open_or_make(parent, TURNSTILE, make=make)
        except FileNotFoundError as error:
            raise NotReadyError(
                f"there is no {root}/{TURNSTILE}", reason="NoTurnstile", remedy="mount the node's"
            ) from error


def _refuse_pool(root: str, parent: int) -> None:
    """Raise BadInputError for a pool of our name: it must not be opened to everybody."""
    for mark in POOL_MARKS:
        with contextlib.suppress(OSError):
            os.stat(f"{TURNSTILE}/{mark}", dir_fd=parent, follow_symlinks=False)
            raise BadInputError(
                f"{root}/{TURNSTILE} is a pool",
                reason="BadTurnstile",
                remedy="name the pool otherwise",
            )


def _open_or_make(parent: int, name: str, *, make: bool = True) -> int:
    try:
        folder = os.open(name, _FOLDER_FLAGS, dir_fd=parent)
    except FileNotFoundError:
        if not make:
            raise
        with contextlib.suppress(FileExistsError):
            os.mkdir(name, _MODE, dir_fd=parent)
        folder = os.open(name, _FOLDER_FLAGS, dir_fd=parent)
    status = os.fstat(folder)
    # Ours, and made an instant ago (the umask) or by a run that was killed here.
    if _is_ours(status) and stat.S_IMODE(status.st_mode) != _MODE:
        os.fchmod(folder, _MODE)
    return folder
