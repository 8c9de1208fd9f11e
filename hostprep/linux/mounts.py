"""mount(2) and umount2(2)."""

from __future__ import annotations

import ctypes
import errno
import os

from hostprep.linux.files import from_os_error

# linux/mount.h
_MS_NOSUID = 2
_MS_NODEV = 4
_MS_NOEXEC = 8
_MS_REMOUNT = 32
_MNT_DETACH = 2
_SYS_OPEN_TREE = 428  # on all machines but alpha
_OPEN_TREE_CLONE = 1
_AT_FDCWD = -100
_FLAGS = _MS_NOSUID | _MS_NODEV | _MS_NOEXEC

_libc = ctypes.CDLL(None, use_errno=True)
_mount = _libc.mount
_mount.argtypes = (
    ctypes.c_char_p,
    ctypes.c_char_p,
    ctypes.c_char_p,
    ctypes.c_ulong,
    ctypes.c_char_p,
)


def mount(fs_type: str, target: str, options: str) -> None:
    """Mount a memory file system, named hostprep in the mount table. Raises HostprepError."""
    _call(fs_type, target, options, _FLAGS)


def remount(fs_type: str, target: str, options: str) -> None:
    """Change the options of a mount, such as a tmpfs' size. Raises HostprepError."""
    _call(fs_type, target, options, _FLAGS | _MS_REMOUNT)


def _call(fs_type: str, target: str, options: str, flags: int) -> None:
    result = _mount(b"hostprep", os.fsencode(target), fs_type.encode(), flags, options.encode())
    if result != 0:
        code = ctypes.get_errno()
        raise from_os_error(
            OSError(code, os.strerror(code)), f"mount {fs_type} ({options}) at {target}"
        )


def open_below_mounts(folder: str) -> int:
    """Open a folder as it is without the mounts in it; below the descriptor none is entered.

    It is a copy of the folder's own mount that no path leads to (open_tree(2), Linux 5.2), gone
    when it is closed. Raises OSError, without CAP_SYS_ADMIN for one.
    """
    flags = _OPEN_TREE_CLONE | os.O_CLOEXEC
    fd: int = _libc.syscall(_SYS_OPEN_TREE, _AT_FDCWD, os.fsencode(folder), flags)
    if fd < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), folder)
    return fd


def unmount(target: str) -> None:
    """Unmount; with a file on it still open or mapped it vanishes now and is freed at its end.

    Only an empty one may vanish like that: its files were removed by name, once no process was
    found to hold them. Raises HostprepError.
    """
    if _libc.umount2(os.fsencode(target), 0) == 0:
        return
    code = ctypes.get_errno()
    if code == errno.EBUSY and not os.listdir(target):
        detach(target)
    else:
        raise from_os_error(OSError(code, os.strerror(code)), f"unmount {target}")


def detach(target: str) -> None:
    """Take a mount out of sight now, whoever uses it; freed at their end. Raises HostprepError."""
    if _libc.umount2(os.fsencode(target), _MNT_DETACH) != 0:
        code = ctypes.get_errno()
        raise from_os_error(OSError(code, os.strerror(code)), f"unmount {target}")
