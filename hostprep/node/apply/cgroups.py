"""Being charged in a cgroup of the host's own, outside of kubelet's and any login's.

tmpfs pages stay charged to whoever touched them first, and kubelet sets the huge-page limit of
pods that request none to 0: populating must happen elsewhere. Attaching later is free.

The controllers of the host-level cgroup are left as they are. Where the root does not hand
`hugetlb` or `memory` down (cgroup.subtree_control is systemd's and kubelet's business), what is
populated is charged to the root, which has no limit: just as good.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator

from hostprep.errors import FailedError
from hostprep.linux.files import write_control_file
from hostprep.linux.processes import first_cgroup_namespace
from hostprep.node.facts import CgroupFacts, Facts, Mount
from hostprep.node.observe.cgroups import parse_own_paths
from hostprep.node.observe.host import HostRoot, read_mounts

NAME = "hostprep"


@contextlib.contextmanager
def host_cgroup(
    facts: Facts, *, on_return_failed: Callable[[str], None] = lambda _: None
) -> Iterator[None]:
    """Work in the host-level cgroup while the block runs, if where we are would be charged.

    Raises FailedError only where staying is bound to fail. The cgroup outlives the block, since
    what was populated in it stays charged to it. A process that is killed in the block leaves
    nothing behind but the cgroup, and the next one enters it. `on_return_failed` takes why this
    process cannot return: it is outside of all its limits then, and should end soon.
    """
    if facts.cgroup.is_top:
        yield
        return
    with contextlib.ExitStack() as stack:
        try:
            if facts.cgroup.is_shut_in:  # what looks like the top is a container's own cgroup
                raise PermissionError("its namespace ends there, and PID 1's cannot be entered")
            stack.enter_context(first_cgroup_namespace())
            for tops, path in _hierarchies(facts.cgroup.version):
                stack.callback(_return_to, _leave(tops, path), on_return_failed)
        except OSError as error:
            _check_may_stay(facts.cgroup, error)
        yield


def remove_host_cgroup(facts: Facts) -> None:
    """Remove the host-level cgroup once nothing is left in it; leave it otherwise."""
    with contextlib.ExitStack() as stack, contextlib.suppress(OSError):
        stack.enter_context(first_cgroup_namespace())
        for tops, _ in _hierarchies(facts.cgroup.version):
            for top in tops:
                with contextlib.suppress(OSError):
                    os.rmdir(f"{top}/{NAME}")


def _leave(tops: Iterable[str], path: str) -> str:
    """Enter the host-level cgroup. Returns the folder of the one that was left.

    Raises OSError, of the last way that was tried.
    """
    trouble = OSError("no mount shows the host's cgroups from their top, and can be written")
    for top in tops:
        try:
            os.makedirs(f"{top}/{NAME}", exist_ok=True)
            _move_to(f"{top}/{NAME}")
        except OSError as error:
            trouble = error
        else:
            return f"{top}{path}".rstrip("/")
    raise trouble


def _return_to(folder: str, on_return_failed: Callable[[str], None]) -> None:
    try:
        _move_to(folder)
    except OSError as error:  # gone with its container, it may be
        on_return_failed(f"cannot return to cgroup {folder}: {error.strerror}")


def _move_to(folder: str) -> None:
    """Move this process, with all its threads. Raises OSError."""
    write_control_file(f"{folder}/cgroup.procs", b"0")


def _hierarchies(version: int) -> list[tuple[tuple[str, ...], str]]:
    """Return the hierarchies that charge, as the present cgroup namespace shows them.

    Of each the folders that show all of it, and this process's folder below any of them.
    """
    paths = parse_own_paths(HostRoot().read_text("/proc/self/cgroup") or "")
    wanted = ("",) if version == 2 else ("memory", "hugetlb")
    return [
        (tuple(_tops(controller)), paths[controller])
        for controller in wanted
        if controller in paths
    ]


def _tops(controller: str) -> Iterator[str]:
    """Yield where the whole hierarchy can be written: here, else through PID 1's root.

    A container's own mount is read-only or begins at its own cgroup; the host's, mounted into a
    pod, shows everything. Where neither is there, PID 1's mount namespace has it.
    """
    for process, prefix in (("self", ""), ("1", "/proc/1/root")):
        for mount in read_mounts(process=process):
            if _is_whole(mount, controller):
                yield prefix + mount.path


def _is_whole(mount: Mount, controller: str) -> bool:
    if mount.fs_type != ("cgroup" if controller else "cgroup2"):
        return False
    has_controller = not controller or mount.option(controller) is not None
    return has_controller and mount.fs_root == "/" and "ro" not in mount.options


def _check_may_stay(cgroup: CgroupFacts, error: OSError) -> None:
    if cgroup.in_kubepods or cgroup.memory_limit_bytes is not None or cgroup.hugetlb_limit_bytes:
        raise FailedError(
            f"cannot leave cgroup {cgroup.path} for a host-level one: {error.strerror or error}",
            reason="ChargedToPod",
            remedy="populate as root outside of it, or in a privileged pod with hostPID: true and"
            " the host's /sys/fs/cgroup mounted writable (the chart's agent.mode: privileged)",
        ) from error
