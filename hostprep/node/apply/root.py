"""The root folder: made with a small tmpfs of its own, and removed once no pool is left in it.

Engines may write to some folders of their pool. Those lie in the root's file system, by default
/run, which kubelet, the container runtime and systemd need as well: a tmpfs of its own bounds what
an engine can take. It is the root itself that is mounted, no folder in it: mounts below a volume
are out of reach for pods with `hostUsers: false`, and not read-only with it.
"""

from __future__ import annotations

import contextlib
import os
import stat

from hostprep.api.pool_spec import MOUNT_SOURCE, ROOT_BYTES, ROOT_INODES, root_options
from hostprep.errors import BadInputError, FailedError, HostprepError, NotReadyError
from hostprep.linux import selinux
from hostprep.linux.files import closing_fd, from_os_error, open_folder, open_own_folder
from hostprep.linux.locks import lies_at, try_lock
from hostprep.linux.mounts import detach, mount, open_below_mounts, remount
from hostprep.node.apply.folder import clear_debris, is_debris
from hostprep.node.facts import WITHOUT_ROOT, Mount
from hostprep.node.observe.root import check_parents, own_mount, parents

LOCK = ".lock"
AGENT_LOCK = ".agent.lock"
MADE = ".made"
"""Marks a root that we made, and so may remove; below its mount, where it has one."""
LOCK_FLAGS = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
"""Who has a lease (F_SETLEASE) on a lock file holds it, and is not waited for: EAGAIN."""

_TRIES = 10
_FOR_REGIONS = 128
"""As many regions as that has ample room for: each has some files of a page, and clutter."""


def make_root(root: str, *, mount_existing: bool = False) -> None:
    """Make the root if need be, on a tmpfs of its own where this process may mount.

    A folder that was there before is mounted over only with `mount_existing`: it is another's, who
    could not remove it then. Raises BadInputError for a root that cannot be used, FailedError for
    one that was removed and is mounted here, HostprepError where it cannot be made.
    """
    if not root.startswith("/"):
        raise BadInputError(
            f"root {root!r} is not an absolute path", reason="BadRoot", remedy="begin it with /"
        )
    check_parents(root)
    try:
        if not os.path.lexists(root):
            clear_removed(root)
            # One by one: os.makedirs gives those in between whatever mode the umask leaves.
            for folder in parents(root):
                with contextlib.suppress(FileExistsError):
                    os.mkdir(folder, mode=0o755)
            with contextlib.suppress(FileExistsError):
                os.mkdir(root, mode=0o755)
                with open(f"{root}/{MADE}", "ab"):
                    pass
    except OSError as error:
        raise from_os_error(error, f"create {root}", permission_remedy=WITHOUT_ROOT) from error
    with contextlib.suppress(NotReadyError):  # another process removed it since
        _check_not_removed(root)
    if os.geteuid() == 0:
        with contextlib.suppress(OSError, HostprepError):  # without the right, a plain folder
            if mount_existing or os.path.lexists(f"{root}/{MADE}"):
                _mount_once(root)
    selinux.share(root)


def _check_not_removed(root: str) -> None:
    """Raise FailedError for a mount of a folder that is gone: nothing can be made in it again."""
    with closing_fd(open_own_folder(root)) as fd:
        if os.fstat(fd).st_nlink == 0 and lies_at(root, fd):
            raise FailedError(
                f"{root} is mounted here from a folder that was removed since",
                reason="BadRoot",
                remedy="start this container again",
            )


def try_root_lock(root: str) -> int | None:
    """Return the root's lock file, locked; None where another process has it or removed it.

    Raises OSError where it cannot be opened.
    """
    path = f"{root}/{LOCK}"
    try:
        fd = os.open(path, LOCK_FLAGS, 0o600)
    except (FileNotFoundError, BlockingIOError):
        return None
    if try_lock(fd, exclusive=True) and lies_at(path, fd):
        return fd
    os.close(fd)
    return None


def _mount_once(root: str) -> None:
    """Mount a tmpfs at a root that is empty. Raises OSError, HostprepError.

    One in use stays as it is: pods may have folders of it mounted, and would not see new ones.
    """
    if not _may_be_mounted(root):
        return
    with closing_fd(open_folder(root)) as below:
        fd = try_root_lock(root)
        if fd is None:
            return
        with closing_fd(fd):
            if _may_be_mounted(root):
                status = os.fstat(below)
                mode = f"mode={stat.S_IMODE(status.st_mode):o}"
                options = f"{mode},uid={status.st_uid},gid={status.st_gid},{root_options()}"
                mount("tmpfs", root, options)
                # Whoever has it open, to wait for us, sees that the path leads elsewhere now.
                os.unlink(LOCK, dir_fd=below)


def _may_be_mounted(root: str) -> bool:
    return set(os.listdir(root)) <= {LOCK, MADE} and own_mount(root) is None


def grow_root(root: str, *, regions: int) -> None:
    """Make room for the files of that many regions, in a tmpfs that we mounted."""
    factor = max(1, -(-regions // _FOR_REGIONS))
    if factor == 1:
        return
    room = os.statvfs(root)
    # Both, or an administrator's own size would be made smaller.
    is_small = room.f_blocks * room.f_frsize < factor * ROOT_BYTES
    if is_small and room.f_files < factor * ROOT_INODES and _is_ours(own_mount(root)):
        with contextlib.suppress(HostprepError):  # without the right: what is there must do
            remount("tmpfs", root, root_options(factor))


def _is_ours(entry: Mount | None) -> bool:
    return entry is not None and (entry.fs_type, entry.source) == ("tmpfs", MOUNT_SOURCE)


def remove_root(root: str, names: tuple[str, ...]) -> None:
    """Remove the root, once no pool is left in it; to be called while holding it.

    `names` are files beside the pools that go with it. A root that we did not make stays, mounted
    as it is: containers that wait for a pool may have it. So does one with another process's agent:
    in its container it may be a mount of its own, in which it would prepare what nobody sees.
    """
    ours = (*names, LOCK, MADE, AGENT_LOCK)
    for name in os.listdir(root):
        path = f"{root}/{name}"
        if name in names or _is_left_of_mounts(path):
            clear_debris(path)
    entries = set(os.listdir(root))
    if entries - set(ours):
        return
    has_agent = _has_other_agent(root)
    for name in names if has_agent else (*names, AGENT_LOCK):
        with contextlib.suppress(FileNotFoundError, IsADirectoryError):
            os.unlink(f"{root}/{name}")
    # The lock's file stays until the folder goes: in one without, the next process would be at work
    # already.
    with contextlib.suppress(OSError, HostprepError):
        if has_agent:
            os.unlink(f"{root}/{LOCK}")
        elif _was_made_below_mount(root):
            detach(root)
            fd = try_root_lock(root)  # else another process is at work there already
            if fd is not None:
                with closing_fd(fd):
                    _remove_made(root)
        elif MADE in entries:
            _remove_made(root)
        else:
            os.unlink(f"{root}/{LOCK}")


def _remove_made(root: str) -> None:
    """Remove a folder that we made, in one step: the next process makes another one."""
    parent, name = os.path.split(root)
    for _ in range(_TRIES):
        # An agent may have locked a file of its own here before the root was mounted.
        if set(os.listdir(root)) <= {LOCK, MADE, AGENT_LOCK}:
            with contextlib.suppress(OSError):  # that of another process, or of a killed one
                os.rename(root, f"{parent}/.{name}.removed")
                break
            clear_removed(root)
    clear_removed(root)


def clear_removed(root: str) -> None:
    """Remove what this process or a killed one made of a root that it removed."""
    parent, name = os.path.split(root)
    folder = f"{parent}/.{name}.removed"
    with contextlib.suppress(OSError, HostprepError):  # in /dev/shm it may be another user's
        with closing_fd(open_own_folder(folder)) as fd:
            for name in (LOCK, MADE, AGENT_LOCK):
                with contextlib.suppress(OSError):
                    os.unlink(name, dir_fd=fd)
        os.rmdir(folder)


def _has_other_agent(root: str) -> bool:
    """Return whether an agent holds the root that is neither this process nor its parent.

    The agent's worker is a process of its own.
    """
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        fd = os.open(f"{root}/{AGENT_LOCK}", flags)
    except OSError:
        return False
    ours = {str(pid).encode() for pid in (os.getpid(), os.getppid())}
    with closing_fd(fd):
        return not try_lock(fd, exclusive=True) and os.read(fd, 20) not in ours


def _was_made_below_mount(root: str) -> bool:
    """Return whether the folder that the root's mount lies on is one that we made.

    In a container it is another folder, and this mount is all that the container has of the root.
    A mount that others made over it is not ours to remove.
    """
    if not _is_ours(own_mount(root)):
        return False
    parent, name = os.path.split(root)
    with contextlib.suppress(OSError), closing_fd(open_below_mounts(parent)) as fd:
        os.stat(f"{name}/{MADE}", dir_fd=fd, follow_symlinks=False)
        return True
    return False


def _is_left_of_mounts(folder: str) -> bool:
    """Return whether containers with regions left it: each has a view below `devices` mounted.

    One without may be what kubelet made for a pod that waits for its pool, and has it mounted.
    """
    return is_debris(f"{folder}/devices") and is_debris(folder)
