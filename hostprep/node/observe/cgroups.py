"""Where this process is charged: its cgroup, the limits above it, and who may change them."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from hostprep.linux.processes import HOST_CGROUP_NAMESPACE, first_cgroup_namespace
from hostprep.linux.procfs import parse_int, parse_pod_uid
from hostprep.node.facts import CgroupFacts, Mount
from hostprep.node.observe.host import HostRoot, Warn, below, read_mounts

_MAX_CGROUP_BYTES = 64 << 10
_INIT_NAMESPACE = f"cgroup:[{HOST_CGROUP_NAMESPACE}]"
_NO_LIMIT = 1 << 62
"""Version 1 has no word for none: it shows the largest page-aligned number instead."""
_UNITS = {"KB": 10, "MB": 20, "GB": 30}
_HUGETLB_FILE = re.compile(
    r"hugetlb\.(\d{1,9})(KB|MB|GB)\.(?:rsvd\.)?(?:max|limit_in_bytes)", re.ASCII
)


@dataclass(frozen=True, slots=True)
class Hierarchy:
    """One cgroup hierarchy as it is mounted here, and this process's folder in it."""

    version: int
    path: str
    """The process's folder as the kernel names it, `/` being the top that it can see."""
    top: str
    """Folder of the highest cgroup that the mount shows."""
    own: str
    """Folder of the process's cgroup; the top where the mount does not reach it."""
    read_only: bool

    def folders(self) -> Iterator[str]:
        """Yield the folders from the process's own one to the top."""
        folder = self.own
        while folder != self.top:
            yield folder
            folder = folder.rpartition("/")[0]
        yield folder


def observe_cgroup(host: HostRoot, mounts: tuple[Mount, ...], euid: int, warn: Warn) -> CgroupFacts:
    """Return where memory that this process touches is charged; version 0 if that is not known.

    Neither the path nor the limits above can be seen from within a cgroup namespace: this process
    leaves it meanwhile, where it may.
    """
    namespace = host.link("/proc/self/ns/cgroup")
    namespaced = namespace is not None and namespace != _INIT_NAMESPACE
    if not namespaced or host.at("/") != "/":
        return _observe(host, mounts, euid, warn, namespaced=namespaced)
    with contextlib.ExitStack() as stack:
        crossed = False
        with contextlib.suppress(OSError):
            crossed = stack.enter_context(first_cgroup_namespace())
        if crossed:  # the roots of the mounts differ there
            mounts = read_mounts(host, warn)
        return _observe(host, mounts, euid, warn, namespaced=not crossed)


def _observe(
    host: HostRoot, mounts: tuple[Mount, ...], euid: int, warn: Warn, *, namespaced: bool
) -> CgroupFacts:
    paths = parse_own_paths(host.read_text("/proc/self/cgroup") or "")
    memory = _find(host, mounts, paths, "memory")
    if memory is None:
        warn("the memory controller's cgroup is unknown: limits on this process are not seen")
        return CgroupFacts(
            version=0, path=paths.get("", ""), memory_limit_bytes=None, namespaced=namespaced
        )
    hugetlb = _find(host, mounts, paths, "hugetlb")
    return CgroupFacts(
        version=memory.version,
        path=memory.path,
        memory_limit_bytes=_memory_limit(host, memory),
        hugetlb_limit_bytes=_hugetlb_limits(host, hugetlb) if hugetlb else (),
        writable=euid == 0
        and not (namespaced and memory.path == "/")  # CgroupFacts.is_shut_in
        and not memory.read_only
        and host.may_write(f"{memory.top}/cgroup.procs"),
        namespaced=namespaced,
    )


def parse_own_paths(text: str) -> dict[str, str]:
    """Return this process's path by controller, '' for the unified hierarchy.

    Lines of /proc/self/cgroup (cgroups(7)): hierarchy:controllers:path. Others are skipped.
    """
    paths: dict[str, str] = {}
    for line in text.split("\n"):
        number, _, rest = line.partition(":")
        controllers, colon, path = rest.partition(":")
        if not colon or not path.startswith("/") or (number == "0") != (controllers == ""):
            continue
        for controller in controllers.split(","):
            paths.setdefault(controller, path)
    return paths


def _find(
    host: HostRoot, mounts: Iterable[Mount], paths: dict[str, str], controller: str
) -> Hierarchy | None:
    """Return the hierarchy with that controller: the unified one, else one of version 1."""
    for mount in mounts:
        if mount.fs_type == "cgroup2" and "" in paths:
            controllers = host.read_text(f"{mount.path}/cgroup.controllers") or ""
            if controller in controllers.split():
                return _hierarchy(2, mount, paths[""])
    for mount in mounts:
        is_its = mount.fs_type == "cgroup" and controller in mount.options
        if is_its and controller in paths:
            return _hierarchy(1, mount, paths[controller])
    return None


def _hierarchy(version: int, mount: Mount, path: str) -> Hierarchy:
    top = mount.path
    relative = ""
    if ".." not in path.split("/") and below(path, mount.fs_root):
        relative = path[len(mount.fs_root.rstrip("/")) :].rstrip("/")
    return Hierarchy(
        version=version,
        path=path,
        top=top,
        own=top + relative,
        read_only="ro" in mount.options,
    )


def _memory_limit(host: HostRoot, hierarchy: Hierarchy) -> int | None:
    name = "memory.max" if hierarchy.version == 2 else "memory.limit_in_bytes"
    limits = (_limit(host, f"{folder}/{name}") for folder in hierarchy.folders())
    return min((limit for limit in limits if limit is not None), default=None)


def _hugetlb_limits(host: HostRoot, hierarchy: Hierarchy) -> tuple[tuple[int, int], ...]:
    """Return the tightest limit for each page size, on pages in use or on reservations."""
    limits: dict[int, int] = {}
    for folder in hierarchy.folders():
        for name in host.list_dir(folder):
            match = _HUGETLB_FILE.fullmatch(name)
            limit = _limit(host, f"{folder}/{name}") if match else None
            if match is not None and limit is not None:
                page_bytes = int(match[1]) << _UNITS[match[2]]
                limits[page_bytes] = min(limit, limits.get(page_bytes, limit))
    return tuple(sorted(limits.items()))


def _limit(host: HostRoot, path: str) -> int | None:
    """Return a limit in bytes; None for `max` and for version 1's largest number."""
    value = parse_int((host.read_text(path) or "").strip())
    return value if value is not None and 0 <= value < _NO_LIMIT else None


def pod_of(pid: int) -> str | None:
    """Return the UID of the Pod that a process is of; None where it is of none that can be seen."""
    try:
        with open(f"/proc/{pid}/cgroup", encoding="utf-8", errors="replace") as file:
            return parse_pod_uid(file.read(_MAX_CGROUP_BYTES))
    except OSError:
        return None
