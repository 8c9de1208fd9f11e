"""Small readers of what the kernel prints. None of them raises, whatever the text."""

from __future__ import annotations

import re

MAX_CPUS = 1 << 16
"""No kernel has more: NR_CPUS ends at 8192. Bounds what a broken list can make us build."""

_INT = re.compile(r"-?\d{1,20}|0[xX][0-9a-fA-F]{1,16}", re.ASCII)
_RANGE = re.compile(r"(\d{1,6})(?:-(\d{1,6}))?", re.ASCII)
_BRACKETED = re.compile(r"\[([a-z_+]{1,32})\]", re.ASCII)
_HUGE_FOLDER = re.compile(r"hugepages-(\d{1,12})kB", re.ASCII)
_POD = re.compile(r"pod([0-9a-f]{8}(?:[-_][0-9a-f]{4}){3}[-_][0-9a-f]{12})(?![0-9a-f])", re.ASCII)
_MEMINFO = re.compile(
    r"^(?:Node \d+ +)?(?P<key>[A-Za-z0-9_()]+): +(?P<value>\d{1,18})(?P<kib> kB)?[ \t]*$",
    re.ASCII | re.MULTILINE,
)


def parse_int(text: str) -> int | None:
    """Return a decimal or 0x-prefixed number of at most 64 bits."""
    if _INT.fullmatch(text) is None:
        return None
    return int(text, 16 if text[:2] in ("0x", "0X") else 10)


def parse_cpu_list(text: str) -> tuple[int, ...] | None:
    """Return the CPUs of a list such as `0-3,8`, ascending; the empty list is ().

    The format is that of Documentation/core-api/printk-formats.rst, %*pbl.
    """
    cpus: set[int] = set()
    for part in text.strip().split(",") if text.strip() else ():
        match = _RANGE.fullmatch(part)
        if match is None:
            return None
        first, last = int(match[1]), int(match[2] or match[1])
        if first > last or last >= MAX_CPUS:
            return None
        cpus.update(range(first, last + 1))
    return tuple(sorted(cpus))


def parse_meminfo(text: str) -> dict[str, int]:
    """Return the entries of /proc/meminfo or of a node's meminfo.

    Entries in kB are returned in bytes, the others (counts of huge pages) as they are.
    Lines of any other shape are skipped.
    """
    return {
        match["key"]: int(match["value"]) * (1024 if match["kib"] else 1)
        for match in _MEMINFO.finditer(text)
    }


def parse_keyed(text: str) -> dict[str, str]:
    """Return the `Name:<tab>value` lines of /proc/self/status."""
    pairs = (line.partition(":") for line in text.split("\n"))
    return {key: value.strip() for key, colon, value in pairs if colon}


def parse_bracketed(text: str) -> str | None:
    """Return the active choice of a knob such as `always [madvise] never`."""
    match = _BRACKETED.search(text)
    return match[1] if match else None


def parse_huge_folder(name: str) -> int | None:
    """Return the page size in bytes of a folder such as `hugepages-2048kB`."""
    match = _HUGE_FOLDER.fullmatch(name)
    return int(match[1]) * 1024 if match else None


def parse_pod_uid(text: str) -> str | None:
    """Return the UID of the Pod that a process is of, by its /proc/PID/cgroup; None without one.

    kubelet names a Pod's cgroup after its UID, with `_` for `-` where systemd drives it
    (pkg/kubelet/cm/cgroup_manager_linux.go).
    """
    match = _POD.search(text)
    return match[1].replace("_", "-") if match else None
