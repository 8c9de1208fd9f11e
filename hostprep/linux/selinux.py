"""SELinux labels: what containers share needs their type, and no container's categories.

Confined containers (`container_t`) may use files of type `container_file_t` whose categories are
among their own (container-selinux, container.te; each container has two random ones). What lies
below /run otherwise becomes `container_var_run_t`, which they may list but not read. What one
engine makes has its categories under policies without `default_range ... target low` (Fedora's has
it: policy/mcs), which shuts out the next one that would adopt its region.

Labels are set file by file and not by the mount option `context=`: Bottlerocket's policy refuses
that one, and a plain folder has no mount. All is best effort: without SELinux, or without the right
to relabel, files stay as they are, and `hostprep doctor` says so.
"""

from __future__ import annotations

import contextlib
import os

from hostprep.errors import HostprepError
from hostprep.linux.files import closing_fd, open_own_folder

_ATTRIBUTE = "security.selinux"
_TYPE = "container_file_t"
_HUGE_PAGES = "hugetlbfs_t"
"""Huge pages' own type, which containers may use already (container.te)."""
_NO_CATEGORIES = "s0"
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_DEPTH = 6
"""A device's view of a region's files lies five folders deep; engines could nest without end."""


def read_label(path: str) -> str:
    """Return a file's label, such as `system_u:object_r:tmpfs_t:s0`; "" without SELinux."""
    try:
        value = os.getxattr(path, _ATTRIBUTE, follow_symlinks=False)
    except OSError:
        return ""
    return value.rstrip(b"\0").decode("ascii", "replace")


def shared_label(label: str) -> str:
    """Return the label with which every container may use a file that has `label` now.

    "" for what is no label: before a policy is loaded the kernel gives a single word.
    """
    user, *others = label.split(":", 3)
    if len(others) < 2:
        return ""
    if others[1] == _HUGE_PAGES:
        return label
    level = [_NO_CATEGORIES] if len(others) > 2 else []
    return ":".join([user, "object_r", _TYPE, *level])


def share(path: str) -> bool:
    """Let containers use one file or folder; what is made in the folder later inherits it.

    Returns False where the label is refused, or there is none to change.
    """
    label = read_label(path)
    wanted = shared_label(label)
    if wanted in ("", label):
        return wanted != ""
    try:
        os.setxattr(path, _ATTRIBUTE, f"{wanted}\0".encode(), follow_symlinks=False)
    except OSError:
        return False
    return True


def share_tree(folder: str) -> None:
    """Let containers use a folder and all in it, such as what engines made with their categories.

    Returns at once without SELinux, or without the right: each refusal is a line in the audit log.
    No link is followed: engines may write to folders below.
    """
    if not share(folder):
        return
    with contextlib.suppress(OSError, HostprepError), closing_fd(open_own_folder(folder)) as fd:
        _share_entries(fd, _DEPTH)


def _share_entries(fd: int, depth: int) -> None:
    with os.scandir(fd) as entries:
        found = [(entry.name, entry.is_dir(follow_symlinks=False)) for entry in entries]
    for name, is_folder in found:
        # By the open folder: whatever others put in the place of those above it meanwhile.
        share(f"/proc/self/fd/{fd}/{name}")
        if is_folder and depth:
            with contextlib.suppress(OSError), closing_fd(os.open(name, _FOLDER, dir_fd=fd)) as sub:
                _share_entries(sub, depth - 1)
