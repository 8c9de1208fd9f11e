"""Being charged in a cgroup of the host's own, outside of kubelet's and any login's.

tmpfs pages stay charged to whoever touched them first, and kubelet sets the huge-page limit of
pods that request none to 0: populating must happen elsewhere. Attaching later is free.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

from hostprep.errors import FailedError
from hostprep.facts import CgroupFacts, Facts

__all__ = ["NAME", "host_cgroup", "remove_host_cgroup"]

NAME = "hostprep"


@contextlib.contextmanager
def host_cgroup(facts: Facts) -> Iterator[None]:
    """Work in the host-level cgroup while the block runs, if where we are would be charged.

    Raises FailedError only where staying is bound to fail. The cgroup outlives the block, since
    what was populated in it stays charged to it.
    """
    if facts.cgroup.is_top:
        yield
        return
    homes: list[str] = []
    try:
        for top in _tops(facts):
            home = _home(facts, top)
            folder = f"{top}/{NAME}"
            try:
                os.makedirs(folder, exist_ok=True)
                _move_to(folder)
            except OSError as error:
                _complain(facts.cgroup, folder, error)
            else:
                homes.append(home)
        yield
    finally:
        for home in homes:
            with contextlib.suppress(OSError):
                _move_to(home)


def remove_host_cgroup(facts: Facts) -> None:
    """Remove the host-level cgroup once nothing is left in it; leave it otherwise."""
    for top in _tops(facts):
        with contextlib.suppress(OSError):
            os.rmdir(f"{top}/{NAME}")


def _move_to(folder: str) -> None:
    # os.write reports the error that a buffered file's destructor would swallow.
    fd = os.open(f"{folder}/cgroup.procs", os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(fd, b"0")
    finally:
        os.close(fd)


def _home(facts: Facts, top: str) -> str:
    """Return the folder of the cgroup that this process is in now, in the hierarchy at `top`."""
    mount = next(entry for entry in facts.mounts if entry.path == top)
    with open("/proc/self/cgroup", encoding="utf-8") as file:
        for line in file:
            _, controllers, path = line.rstrip("\n").split(":", 2)
            names = controllers.split(",") if controllers else []
            is_here = any(mount.option(name) is not None for name in names)
            if is_here or (not names and mount.fs_type == "cgroup2"):
                return f"{top}{path}".rstrip("/")
    return top


def _tops(facts: Facts) -> list[str]:
    """Return the hierarchies that charge memory or huge pages."""
    if facts.cgroup.version == 2:
        return [entry.path for entry in facts.mounts if entry.fs_type == "cgroup2"][:1]
    wanted = ("memory", "hugetlb")
    return [
        entry.path
        for entry in facts.mounts
        if entry.fs_type == "cgroup" and any(entry.option(name) is not None for name in wanted)
    ]


def _complain(cgroup: CgroupFacts, folder: str, error: OSError) -> None:
    if cgroup.in_kubepods or cgroup.memory_limit_bytes is not None:
        raise FailedError(
            f"cannot leave cgroup {cgroup.path} for {folder}: {error.strerror}",
            reason="ChargedToPod",
            remedy="populate as root with the host's cgroup file system mounted writable",
        ) from error
