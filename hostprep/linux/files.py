"""Files: opened beneath a folder, written atomically, without a name until they are whole."""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import stat
from collections.abc import Iterator

from hostprep.errors import BadInputError, FailedError, HostprepError, NotReadyError

_TAMPERED = "the handoff was not written by hostprep: run prepare again and see who writes there"

_BATCH = 4096
"""Entries of a folder that are read at once: another user may have put any number there."""

_REMOUNT = (
    "choose another --root; in a container, mount the pool's folder writable, and start the"
    " container again where the pool was made again"
)

_FREE_SOME = "free some (see `hostprep doctor`), or choose another --root"
_MEANINGS = {
    errno.EACCES: ("NoPermission", "no permission", "run it as root, or as the pool's group"),
    errno.EPERM: ("NoPermission", "not permitted", "run it as root"),
    errno.EROFS: ("ReadOnly", "the file system is read-only", _REMOUNT),
    errno.ENOSPC: ("NoSpace", "no space is left there", _FREE_SOME),
    errno.EDQUOT: ("NoSpace", "the quota is used up", _FREE_SOME),
    errno.ENOTDIR: ("BadRoot", "a part of the path is no folder", "choose another --root"),
    errno.ENAMETOOLONG: ("BadRoot", "the path is too long", "choose another --root"),
}


@contextlib.contextmanager
def closing_fd(fd: int) -> Iterator[int]:
    """Close a descriptor at the end of a block."""
    try:
        yield fd
    finally:
        os.close(fd)


def open_folder(path: str) -> int:
    """Open a folder that must not itself be a symbolic link. Returns a descriptor.

    Raises BadInputError for a link or a file, NotReadyError where there is nothing.
    """
    try:
        return os.open(path.rstrip("/") or "/", os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError as error:
        if error.errno == errno.ENOENT:
            raise NotReadyError(
                f"{path} does not exist",
                reason="NotPrepared",
                remedy="run `hostprep prepare`, or give its --root",
            ) from error
        if error.errno in (errno.ELOOP, errno.ENOTDIR):
            raise BadInputError(
                f"{path} is not a plain folder (a symbolic link or a file)",
                reason="BadRoot",
                remedy="give the folder itself",
            ) from error
        raise from_os_error(error, f"open {path}") from error


def open_own_folder(path: str) -> int:
    """Open a folder as `open_folder` does; root's or this user's, written to by its owner alone.

    Anywhere else another user could put other files in place of ours, or already did. Raises
    BadInputError, NotReadyError.
    """
    fd = open_folder(path)
    status = os.fstat(fd)
    is_ours = status.st_uid in (0, os.geteuid()) or _is_unmapped(status.st_uid)
    if is_ours and not status.st_mode & 0o022:
        return fd
    os.close(fd)
    why = "can be written by other users" if is_ours else f"belongs to user {status.st_uid}"
    raise BadInputError(
        f"{path} {why}, who may put other files in place of hostprep's",
        reason="BadRoot",
        remedy="give a --root that is root's or your own, mode 0755 or stricter",
    )


def _is_unmapped(uid: int) -> bool:
    """Return whether a user namespace shows an owner by that number whom it has no number for.

    The node's root is such a one in a pod with `hostUsers: false` (user_namespaces(7)).
    """
    try:
        with open("/proc/self/uid_map", encoding="ascii") as file:
            has_own_users = file.read().split() != ["0", "0", "4294967295"]
        with open("/proc/sys/kernel/overflowuid", encoding="ascii") as file:
            return has_own_users and uid == int(file.read())
    except (OSError, ValueError):
        return False


def check_relative(path: str) -> tuple[str, ...]:
    """Return the parts of a relative path that stays where it starts.

    Raises NotReadyError for absolute ones and for those with empty, `.` or `..` parts.
    """
    parts = tuple(path.split("/"))
    if not path or "\0" in path or any(part in ("", ".", "..") for part in parts):
        raise NotReadyError(
            f"path {path!r} leaves the pool's folder", reason="BadPath", remedy=_TAMPERED
        )
    return parts


def open_beneath(folder: int, path: str, flags: int) -> int:
    """Open a relative path below an open folder, following no symbolic link on the way.

    Raises NotReadyError for a link or a path that leaves the folder, OSError otherwise.
    """
    parts = check_relative(path)
    flags |= os.O_NOFOLLOW | os.O_CLOEXEC
    current = os.dup(folder)
    try:
        for part in parts[:-1]:
            below = os.open(part, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=current)
            os.close(current)
            current = below
        return os.open(parts[-1], flags, dir_fd=current)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise NotReadyError(
                f"path {path!r} goes through a symbolic link", reason="BadPath", remedy=_TAMPERED
            ) from error
        raise
    finally:
        os.close(current)


def read_limited(fd: int, limit_bytes: int) -> bytes:
    """Read a regular file of at most `limit_bytes`; raises NotReadyError for anything else."""
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode):
        raise NotReadyError("it is not a regular file", reason="BadHandoff")
    chunks = []
    left = limit_bytes + 1
    while left > 0:
        chunk = os.read(fd, min(left, 1 << 20))
        if not chunk:
            break
        chunks.append(chunk)
        left -= len(chunk)
    if left == 0:
        raise NotReadyError(f"it is larger than {limit_bytes} bytes", reason="BadHandoff")
    return b"".join(chunks)


def atomic_write(path: str, data: bytes, *, mode: int = 0o644, gid: int | None = None) -> None:
    """Replace a file so that readers see the old content or the new, never a part.

    The temporary name is fixed: a killed writer leaves at most one such file, which the next
    one overwrites. Writers of one file must therefore be serialised by their caller.
    Raises FailedError.
    """
    folder, name = os.path.split(path)
    temporary = f"{folder}/.{name}.new"
    try:
        remove_file(temporary)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        with closing_fd(os.open(temporary, flags, 0o600)) as fd:
            view = memoryview(data)
            while view:
                view = view[os.write(fd, view) :]
            if gid is not None:
                os.fchown(fd, -1, gid)
            os.fchmod(fd, mode)
            os.fsync(fd)
        try:
            os.rename(temporary, path)
        except IsADirectoryError:  # what others put in its place
            remove_tree(path)
            os.rename(temporary, path)
        with closing_fd(os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)) as parent:
            os.fsync(parent)
    except OSError as error:
        raise from_os_error(error, f"write {path}") from error


def write_control_file(path: str, data: bytes) -> None:
    """Write to a file of sysfs or cgroupfs in one call. Raises OSError.

    os.write reports the error that a buffered file's destructor would swallow.
    """
    with closing_fd(os.open(path, os.O_WRONLY | os.O_CLOEXEC)) as fd:
        os.write(fd, data)


def open_without_links(path: str, flags: int) -> int:
    """Open an absolute path with no symbolic link anywhere in it, as `canonical_root` gives them.

    Raises NotReadyError for a link, OSError otherwise.
    """
    if path == "/":
        return open_folder(path)
    with closing_fd(open_folder("/")) as top:
        return open_beneath(top, path.strip("/"), flags)


def make_folder(path: str, *, mode: int, gid: int | None) -> None:
    """Make a folder with that mode and group; None leaves the group. Raises OSError.

    Nothing is changed where it is right already. Mode and group are set by a descriptor, and only
    on a folder of root's or ours: a link in its place, or on the way to it, is refused.
    """
    os.makedirs(path, exist_ok=True)
    set_folder_access(path, mode=mode, gid=gid)


def replace_by_folder(path: str, *, mode: int, gid: int | None) -> None:
    """Make a folder as `make_folder` does, in place of whatever else lies there. Raises OSError."""
    with contextlib.suppress(FileNotFoundError):
        if not stat.S_ISDIR(os.lstat(path).st_mode):
            os.unlink(path)
    make_folder(path, mode=mode, gid=gid)


def set_folder_access(path: str, *, mode: int, gid: int | None) -> None:
    """Give a folder of root's or ours that mode and group. Raises OSError.

    Any other user's is refused, and a link in its place or on the way to it.
    """
    try:
        folder = open_without_links(path, os.O_RDONLY | os.O_DIRECTORY)
    except NotReadyError as error:
        raise OSError(errno.ELOOP, "a symbolic link lies in its place", path) from error
    with closing_fd(folder):
        status = os.fstat(folder)
        if status.st_uid not in (0, os.geteuid()):
            raise OSError(errno.EPERM, f"it belongs to user {status.st_uid}", path)
        _set_access(folder, status, mode, gid)


def set_file_access(fd: int, *, mode: int, gid: int | None, names: int = 1) -> None:
    """Give an open file that mode and group; None leaves the group. Raises OSError.

    For files in folders that others may write to: one with another name than the `names` that the
    caller knows may be any file of the file system, linked there, and is refused.
    """
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode) or status.st_nlink > names:
        raise OSError(errno.EMLINK, "it has other names (hard links)")
    _set_access(fd, status, mode, gid)


def _set_access(fd: int, status: os.stat_result, mode: int, gid: int | None) -> None:
    if gid is not None and status.st_gid != gid:
        os.fchown(fd, -1, gid)
    if stat.S_IMODE(os.fstat(fd).st_mode) != mode:  # fchown may clear bits of it
        os.fchmod(fd, mode)


def open_state_file(path: str, flags: int, *, folder: int | None = None) -> int:
    """Open a file in a folder that others may write to, where anything may lie.

    No link is followed, nothing but a regular file returned; one that is made has mode 0600.
    Neither a FIFO nor another process's lease (F_SETLEASE) is waited for: without O_NONBLOCK its
    holder delays each open by /proc/sys/fs/lease-break-time, 45 s. Raises OSError (ELOOP for a
    link, EINVAL for what is no regular file, EAGAIN for a leased one).
    """
    flags |= os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    fd = os.open(path, flags, 0o600, dir_fd=folder)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(errno.EINVAL, "not a regular file", path)
    return fd


def remove_file(path: str) -> bool:
    """Delete a file, or what the pool's group put in its place; False where nothing was.

    Raises FailedError, BadInputError.
    """
    try:
        os.unlink(path)
    except FileNotFoundError:
        return False
    except IsADirectoryError:
        remove_tree(path)
        return True
    except OSError as error:
        raise from_os_error(error, f"delete {path}") from error
    return True


def remove_tree(name: str, *, folder: int | None = None) -> None:
    """Remove a folder with all that is in it, as far as that can be removed; a missing one is fine.

    Made for what other users filled. No link is followed and no mount point entered (rmdir(2)
    says EBUSY for one before it says ENOTEMPTY). Nested folders are moved up beside the first
    ones, so that any depth takes two descriptors and no recursion. Each folder is closed to
    others before it is emptied: they cannot go on filling it.
    """
    with contextlib.suppress(OSError):
        if _remove_folder(name, folder):
            return
        with closing_fd(_open_to_empty(name, folder)) as top:
            moved = _NewNames()
            while _empty(top, top, moved):
                pass
        os.rmdir(name, dir_fd=folder)


def empty_folder(folder: int) -> None:
    """Remove all that is in an open folder, as `remove_tree` does; the folder stays as it is."""
    with contextlib.suppress(OSError):
        moved = _NewNames()
        while _empty(folder, folder, moved):
            pass


class _NewNames:
    """Names that no entry has, for folders that are moved: the start of each is random."""

    def __init__(self) -> None:
        self._start = f".{os.urandom(8).hex()}"
        self._numbers = itertools.count()

    def next(self) -> str:
        return f"{self._start}.{next(self._numbers)}"


def _empty(folder: int, top: int, moved: _NewNames) -> bool:
    """Remove or move up one batch of an open folder's entries. Returns whether any went."""
    with os.scandir(folder) as entries:
        names = [entry.name for entry in itertools.islice(entries, _BATCH)]
    return sum(_remove_entry(name, folder, top, moved) for name in names) > 0


def _remove_entry(name: str, folder: int, top: int, moved: _NewNames) -> bool:
    """Remove an entry; one that is a full folder is moved up, or emptied where it is up already."""
    try:
        try:
            os.unlink(name, dir_fd=folder)
        except IsADirectoryError:
            if _remove_folder(name, folder):
                pass
            elif folder != top:
                os.rename(name, moved.next(), src_dir_fd=folder, dst_dir_fd=top)
            else:
                with closing_fd(_open_to_empty(name, top)) as below:
                    while _empty(below, top, moved):
                        pass
                os.rmdir(name, dir_fd=top)
    except OSError:
        return False
    return True


def _remove_folder(name: str, folder: int | None) -> bool:
    """Remove an empty folder, or a missing one; False for a full one. Raises OSError."""
    try:
        os.rmdir(name, dir_fd=folder)
    except FileNotFoundError:
        return True
    except OSError as error:
        if error.errno != errno.ENOTEMPTY:
            raise
        return False
    return True


def _open_to_empty(name: str, folder: int | None) -> int:
    """Open a folder that is to be removed, from now on closed to all others. Raises OSError."""
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
    fd = os.open(name, flags, dir_fd=folder)
    try:
        # Who owns it could open it again: it becomes ours, where this process may take it.
        with contextlib.suppress(PermissionError):
            os.fchown(fd, os.geteuid(), -1)
            os.fchmod(fd, 0o700)
    except BaseException:
        os.close(fd)
        raise
    return fd


def from_os_error(
    error: OSError, doing: str, *, permission_remedy: str | None = None
) -> HostprepError:
    """Return our error for the system's: what was attempted, what went wrong, the remedy.

    What another request would avoid (no right) is bad input; no room is not ready: it may come.
    `permission_remedy` is what to do where the right is missing, if the pool's group does not have
    it either.
    """
    reason, words, remedy = _MEANINGS.get(
        error.errno or 0, ("Failed", error.strerror or str(error), "")
    )
    if reason == "NoPermission":
        remedy = permission_remedy or remedy
    kind: type[HostprepError] = BadInputError if remedy else FailedError
    if reason == "NoSpace":
        kind = NotReadyError
    return kind(f"cannot {doing}: {words}", reason=reason, remedy=remedy or None)


def open_tmpfile(folder: int, mode: int) -> int:
    """Return a file without a name in an open folder, of that mode whatever the umask.

    open(2), O_TMPFILE: it goes with its last descriptor, so that a killed process leaves nothing.
    Raises OSError.
    """
    flags = os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC
    fd = os.open(".", flags, mode, dir_fd=folder)
    try:
        os.fchmod(fd, mode)
    except BaseException:
        os.close(fd)
        raise
    return fd


def give_name(folder: int, fd: int, name: str) -> bool:
    """Name a tmpfile in its folder; False where the name is taken. Raises OSError."""
    try:
        os.link(f"/proc/self/fd/{fd}", name, dst_dir_fd=folder, follow_symlinks=True)
    except FileExistsError:
        return False
    return True
