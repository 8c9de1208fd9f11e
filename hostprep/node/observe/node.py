"""All probes together: the facts of this node."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TypeVar

from hostprep.node.facts import (
    CgroupFacts,
    Facts,
    KernelFacts,
    MemoryFacts,
    Mount,
    PoolFacts,
    ProcessFacts,
    RootFacts,
    ThpFacts,
)
from hostprep.node.observe.cgroups import observe_cgroup
from hostprep.node.observe.gpus import observe_gpus
from hostprep.node.observe.host import HostRoot
from hostprep.node.observe.kernel import observe_kernel, observe_page_bytes, observe_process
from hostprep.node.observe.memory import (
    observe_huge_page_totals,
    observe_memory,
    observe_nodes,
    observe_thp,
)
from hostprep.node.observe.mounts import (
    observe_root,
    read_mounts,
    relevant_mounts,
)

T = TypeVar("T")


class Probes:
    """Runs probes one by one; what fails becomes a warning and leaves its fallback."""

    def __init__(self) -> None:
        self._warnings: dict[str, None] = {}

    @property
    def warnings(self) -> tuple[str, ...]:
        """The warnings so far, each once, in order."""
        return tuple(self._warnings)

    def warn(self, message: str) -> None:
        """Note what could not be seen."""
        self._warnings[message] = None

    def run(self, name: str, probe: Callable[[], T], fallback: T) -> T:
        """Return the probe's answer, or the fallback if it raises OSError or ValueError."""
        try:
            return probe()
        except (OSError, ValueError) as error:
            self.warn(f"{name}: {error}")
            return fallback


def observe(*, host: HostRoot, root: str, pools: tuple[PoolFacts, ...] = ()) -> Facts:
    """Return the facts of the node below `host`; `root` is the pools' folder, `pools` its content.

    Never raises for what the host shows: what cannot be seen is in the facts' warnings.
    """
    probes = Probes()
    run, warn = probes.run, probes.warn
    page_bytes = run("page size", lambda: observe_page_bytes(host), os.sysconf("SC_PAGESIZE"))
    no_mounts: tuple[Mount, ...] = ()
    mounts = run("mounts", lambda: read_mounts(host, warn), no_mounts)
    process = run("process", lambda: observe_process(host, warn), _NO_PROCESS)
    kernel = run("kernel", lambda: observe_kernel(host, warn), _NO_KERNEL)
    return Facts(
        kernel=kernel,
        memory=run(
            "memory",
            lambda: observe_memory(host, page_bytes, warn),
            MemoryFacts(0, 0, 0, 0, page_bytes),
        ),
        nodes=run("NUMA nodes", lambda: observe_nodes(host, page_bytes, warn), ()),
        huge_pages=run("huge pages", lambda: observe_huge_page_totals(host, warn), ()),
        thp=run("THP", lambda: observe_thp(host), _NO_THP),
        mounts=relevant_mounts(mounts, os.path.realpath(root)),
        gpus=run("GPUs", lambda: observe_gpus(host), ()),
        cgroup=run("cgroup", lambda: observe_cgroup(host, mounts, process.euid, warn), _NO_CGROUP),
        process=process,
        root=run(
            "root folder",
            lambda: observe_root(root, warn),
            RootFacts(root, exists=False, fs_type="unknown", writable=False, free_bytes=0),
        ),
        pools=pools,
        warnings=probes.warnings,
    )


_NO_KERNEL = KernelFacts("", (0, 0), os.uname().machine, "", ())
_NO_THP = ThpFacts("unknown", "unknown", "unknown")
_NO_CGROUP = CgroupFacts(version=0, path="", memory_limit_bytes=None)
_NO_PROCESS = ProcessFacts(
    euid=os.geteuid(),
    can_mount=False,
    sees_all_processes=False,
    memlock_limit_bytes=0,
    cpus=(),
)
