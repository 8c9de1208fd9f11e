"""Files: opened beneath a folder, written atomically, without a name until they are whole."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Iterator

from hostprep.errors import BadInputError, FailedError, HostprepError, NotReadyError

_TAMPERED = "the handoff was not written by hostprep: run prepare again and see who writes there"

_MEANINGS = {
    errno.EACCES: ("NoPermission", "no permission", "run it as root, or as the pool's group"),
    errno.EPERM: ("NoPermission", "not permitted", "run it as root"),
    errno.EROFS: ("ReadOnly", "the file system is read-only", "choose another --root"),
    errno.ENOSPC: ("NoSpace", "no space is left there", "free some, or choose another --root"),
    errno.EDQUOT: ("NoSpace", "the quota is used up", "free some, or choose another --root"),
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


def make_folder(path: str, *, mode: int, gid: int | None) -> None:
    """Make a folder with that mode and group; None leaves the group. Raises OSError.

    Nothing is changed where it is right already. For folders whose parents are ours alone to
    write to: links would be followed.
    """
    os.makedirs(path, exist_ok=True)
    if gid is not None and os.stat(path).st_gid != gid:
        os.chown(path, -1, gid)
    if stat.S_IMODE(os.stat(path).st_mode) != mode:
        os.chmod(path, mode)


def open_state_file(path: str, flags: int, *, folder: int | None = None) -> int:
    """Open a file in a folder that others may write to, where anything may lie.

    No link is followed, no FIFO waited for, nothing but a regular file returned. Raises OSError
    (ELOOP for a link, EINVAL for what is no regular file).
    """
    fd = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
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
        import shutil  # late: only malice leads here

        shutil.rmtree(path, ignore_errors=True)
        return True
    except OSError as error:
        raise from_os_error(error, f"delete {path}") from error
    return True


def from_os_error(error: OSError, doing: str) -> HostprepError:
    """Return our error for the system's: what was attempted, what went wrong, the remedy.

    What another request would avoid (no right, no room) is bad input.
    """
    reason, words, remedy = _MEANINGS.get(
        error.errno or 0, ("Failed", error.strerror or str(error), "")
    )
    kind = BadInputError if remedy else FailedError
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
