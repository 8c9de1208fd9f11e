"""The root: the folder of all pools, which nobody but root or its owner may write to."""

from __future__ import annotations

import glob
import os
import stat
from collections.abc import Iterator
from itertools import chain, islice

from hostprep.errors import BadInputError, NotReadyError
from hostprep.linux.files import open_own_folder
from hostprep.linux.selinux import read_label, shared_label
from hostprep.node.facts import Mount, RootFacts
from hostprep.node.observe.host import Warn, fs_type_of, nearest_existing, read_mounts

_LOOKED_AT = 4096
"""Labels, in the root and below: engines may make files without end."""
_DEPTH = 5
"""A device's view of a region's files lies five folders deep; engines could nest without end."""


def observe_root(root: str, warn: Warn) -> RootFacts:
    """Return what the root folder is, or can become."""
    path = os.path.abspath(root)
    refused = _refusal(path)
    nearest = nearest_existing(path)
    return RootFacts(
        path=path,
        exists=os.path.lexists(path),
        fs_type=fs_type_of(nearest, read_mounts(warn=warn)),
        writable=os.path.isdir(nearest)
        and os.access(nearest, os.W_OK | os.X_OK, effective_ids=True),
        free_bytes=_free_bytes(nearest, warn),
        nearest_path=nearest,
        refused=refused.message if refused else "",
        remedy=(refused.remedy or "") if refused else "",
        unshared=_unshared(path),
        is_enforcing=_is_enforcing(),
    )


def _unshared(root: str) -> str:
    """Return the first path that containers are kept from: what engines read first, then the rest.

    Nothing is looked at where the root has no label: there is no SELinux.
    """
    if not shared_label(read_label(root)):
        return ""
    first = [root, *sorted(glob.glob(f"{glob.escape(root)}/*/handoff.json"))]
    for path in islice(chain(first, _below(root)), _LOOKED_AT):
        label = read_label(path)
        if shared_label(label) not in ("", label):
            return f"{path} ({label})"
    return ""


def _below(root: str) -> Iterator[str]:
    """Yield what lies below, such as regions, leases' sidecars and tickets; follow no link."""
    for folder, folders, files, _ in os.fwalk(root):
        folders.sort()
        yield from (f"{folder}/{name}" for name in sorted(folders + files))
        if folder.count("/") - root.count("/") >= _DEPTH:
            folders.clear()


def _is_enforcing() -> bool | None:
    try:
        with open("/sys/fs/selinux/enforce", "rb") as file:
            return file.read(1) == b"1"
    except OSError:
        return None


def _refusal(root: str) -> BadInputError | None:
    """Return why nothing is prepared below such a root; None where it will do."""
    try:
        check_parents(root)
        os.close(open_own_folder(root))
    except NotReadyError:
        return None  # it is missing, and can be made
    except BadInputError as error:
        return error
    return None


def own_mount(root: str) -> Mount | None:
    """Return what is mounted at the root itself, if it is a whole file system.

    In a container the root is a mount in any case: of a folder of /run, where it has no own.
    """
    path = os.path.realpath(root)
    found = None
    for entry in read_mounts():
        if entry.path == path:
            found = entry
    return found if found is not None and found.fs_root == "/" else None


def parents(root: str) -> list[str]:
    """Return the folders above the root, the topmost first."""
    parts = root.strip("/").split("/")[:-1]
    return ["/" + "/".join(parts[:count]) for count in range(1, len(parts) + 1)]


def check_parents(root: str) -> None:
    """Refuse a root below a folder in which another user may put something else in its place.

    Sticky folders such as /tmp will do: only its owner may rename or remove the root there. Group
    0 and our own are not others. Raises BadInputError.
    """
    for folder in ["/", *parents(root)]:
        try:
            status = os.lstat(folder)
        except OSError:
            return  # made by us, or what is wrong with it is said then
        groups = (0, os.getegid())
        writable = status.st_mode & (0o002 if status.st_gid in groups else 0o022)
        if status.st_uid not in (0, os.geteuid()):
            why = f"belongs to user {status.st_uid}"
        elif writable and not status.st_mode & stat.S_ISVTX:
            why = "can be written by other users"
        else:
            continue
        raise BadInputError(
            f"{folder} {why}, who may put another folder in place of {root}",
            reason="BadRoot",
            remedy="choose a --root of which all parent folders are root's or yours alone to"
            f" write to, such as /run/hostprep (or: chown root {folder}; chmod go-w {folder})",
        )


def _free_bytes(path: str, warn: Warn) -> int:
    try:
        status = os.statvfs(path)
    except OSError as error:
        warn(f"free space at {path} is unknown: {error.strerror}")
        return 0
    return status.f_bavail * status.f_frsize
