"""Which machine this is, as far as registering depends on it; and its memory touched once."""

from __future__ import annotations

import contextlib
import mmap
import os
import platform
import re
import resource
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

from benchmarks.gpu_day.day import Case, Day, Figures
from benchmarks.gpu_day.sizes import available_here, text_of
from benchmarks.register.memory import NotHereError, populate_all
from benchmarks.register.pages_ledger import give_back_left_pages
from hostprep.backing import GIB
from hostprep.linux.memory import address_of
from hostprep.linux.mounts import mount, unmount

_DRIVER_FILES = ("/proc/driver/nvidia/version", "/sys/module/nvidia/version")
_POOLS = Path("/sys/kernel/mm/hugepages")
_PACKAGES = ("cuda-bindings", "torch", "pytest", "click", "pyyaml", "pydantic")
_PIECE_BYTES = 4 * GIB


def cases(day: Day) -> Iterator[Case]:
    """Facts first; memory last, which takes longest."""
    yield Case("machine", 2, _machine)
    yield Case("driver", 15, lambda: _driver(day))
    yield Case("memory", 2, _memory)
    yield Case("rights", 2, _rights)
    yield Case("nvidia-smi", 15, lambda: _nvidia_smi(day))
    yield Case("touching", 90, lambda: _touch(day))


def _machine() -> Figures:
    cpuinfo = text_of(Path("/proc/cpuinfo"))
    models = re.findall(r"^model name\s*: (.*)$", cpuinfo, re.MULTILINE)
    return {
        "kernel": platform.release(),
        "is_gvisor": _is_gvisor(),
        "arch": platform.machine(),
        "cpu": models[0] if models else platform.machine(),
        "cpus": len(models) or os.cpu_count(),
        "usable_cpus": len(os.sched_getaffinity(0)),
        "numa_nodes": len(list(Path("/sys/devices/system/node").glob("node[0-9]*"))),
        "is_virtual": "hypervisor" in cpuinfo,
        "python": platform.python_version(),
        **{name: _version(name) for name in _PACKAGES},
    }


def _is_gvisor() -> bool:
    """Tell whether the kernel is gVisor: only its log says so for certain."""
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        log = subprocess.run(["dmesg"], capture_output=True, text=True, timeout=10, check=False)
        if "gvisor" in log.stdout.lower():
            return True
    return "gvisor" in text_of(Path("/proc/version")).lower()


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def _driver(day: Day) -> Figures:
    found = dict(day.crew.rank().ask("open", device=0))
    version = next((text for path in _DRIVER_FILES if (text := text_of(Path(path)))), "unknown")
    return {
        **found,
        "module": version.strip(),
        "module_parameters": text_of(Path("/proc/driver/nvidia/params")).strip(),
        "iommu_groups": _count(Path("/sys/kernel/iommu_groups")),
        "gpu_free_bytes": day.crew.rank().ask("free_bytes")["free_bytes"],
    }


def _count(folder: Path) -> int:
    try:
        return len(list(folder.iterdir()))
    except OSError:
        return 0


def _memory() -> Figures:
    meminfo = dict(re.findall(r"^(\w+):\s+(\d+) kB$", text_of(Path("/proc/meminfo")), re.MULTILINE))
    zones = re.findall(
        r"^Node (\d+), zone\s+(\w+)$.*?^\s+managed\s+(\d+)$",
        text_of(Path("/proc/zoneinfo")),
        re.MULTILINE | re.DOTALL,
    )
    return {
        "total_bytes": int(meminfo.get("MemTotal", 0)) * 1024,
        "available_bytes": available_here(),
        "swap_bytes": int(meminfo.get("SwapTotal", 0)) * 1024,
        "zones": {f"node {node} {zone}": int(pages) * mmap.PAGESIZE for node, zone, pages in zones},
        "buddyinfo": text_of(Path("/proc/buddyinfo")),
        "huge_pages": {
            pool.name: int(text_of(pool / "nr_hugepages") or 0)
            for pool in sorted(_POOLS.glob("hugepages-*"))
        },
        "thp": text_of(Path("/sys/kernel/mm/transparent_hugepage/enabled")).strip(),
        "shmem_thp": text_of(Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")).strip(),
        "compact_memory": text_of(Path("/proc/sys/vm/compaction_proactiveness")).strip(),
    }


def _rights() -> Figures:
    locked = resource.getrlimit(resource.RLIMIT_MEMLOCK)[1]
    group = Path("/sys/fs/cgroup")
    return {
        "is_root": os.geteuid() == 0,
        "may_lock": "unlimited" if locked == resource.RLIM_INFINITY else locked,
        "cgroup_limit": text_of(group / "memory.max").strip() or "none",
        "hugetlb_2mi": _can_reserve(_POOLS / "hugepages-2048kB"),
        "hugetlb_1gi": _can_reserve(_POOLS / "hugepages-1048576kB"),
        "mount_tmpfs": _can_mount(),
        "huge_pages_given_back": give_back_left_pages(),
    }


def _can_reserve(pool: Path) -> str:
    """Return `yes`, or why one page cannot be added to the pool."""
    number = pool / "nr_hugepages"
    try:
        before = int(number.read_text())
        number.write_text(str(before + 1))
        added = int(number.read_text()) - before
        number.write_text(str(before))
    except (OSError, ValueError) as error:
        return str(error)
    return "yes" if added else "the kernel finds no free page"


def _can_mount() -> str:
    folder = tempfile.mkdtemp(prefix="hostprep-bench-")
    try:
        mount("tmpfs", folder, "size=4096")
        unmount(folder)
    except OSError as error:
        return str(error)
    finally:
        with contextlib.suppress(OSError):
            os.rmdir(folder)
    return "yes"


def _nvidia_smi(day: Day) -> Figures:
    """Keep what it says beside the rows."""
    if shutil.which("nvidia-smi") is None:
        raise NotHereError("nvidia-smi is not there")
    done = subprocess.run(
        ["nvidia-smi", "-q"], capture_output=True, text=True, timeout=60, check=False
    )
    (day.folder / "nvidia-smi.txt").write_text(done.stdout + done.stderr, encoding="utf-8")
    links = re.findall(r"^\s+(?:Current|Max)\s+: (\d+x?)$", done.stdout, re.MULTILINE)
    return {"status": done.returncode, "links": links}


def _touch(day: Day) -> Figures:
    """Make most of the memory present once: under a hypervisor the first time takes longer."""
    size_bytes = day.sizes.region_bytes if day.is_short else available_here() * 3 // 4
    rates = []
    for _ in range(2):
        held = []
        begin_s = time.monotonic()
        done_bytes = 0
        try:
            while done_bytes < size_bytes and day.left_s > 0:
                piece_bytes = min(_PIECE_BYTES, size_bytes - done_bytes)
                held.append(mmap.mmap(-1, piece_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
                populate_all(address_of(held[-1]), piece_bytes, write=True)
                done_bytes += piece_bytes
        finally:
            rates.append(done_bytes / GIB / (time.monotonic() - begin_s))
            for piece in held:
                piece.close()
    return {"size_bytes": size_bytes, "first_gib_s": rates[0], "second_gib_s": rates[1]}
