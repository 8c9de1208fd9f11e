"""The same faults, of the machine that this process is on; told once, before they are met."""

from __future__ import annotations

import os

from hostprep.register.cost import Fault, known_faults

__all__ = ["VERSION_FILES", "driver_words", "faults_here", "warn_once"]

VERSION_FILES = ("/proc/driver/nvidia/version", "/sys/module/nvidia/version")
"""The first one also tells the open module from the proprietary one; containers may lack it."""
_LONGEST_BYTES = 4096
_told: set[str] = set()


def driver_words() -> str | None:
    """Return what the loaded NVIDIA module says of itself; None where none is loaded."""
    for path in VERSION_FILES:
        try:
            with open(path, "rb") as file:
                return file.read(_LONGEST_BYTES).decode("utf-8", "replace").partition("\n")[0]
        except OSError:
            continue
    return None


def faults_here(size_bytes: int, chunk_bytes: int | None = None) -> tuple[Fault, ...]:
    """Return the known faults that registering meets on this kernel and driver, worst first.

    `chunk_bytes` is the largest single call; None is one call over everything. Zones are the
    node's business (`hostprep doctor`): what is prepared lies outside of them. Takes some 50
    microseconds, and never fails.
    """
    import resource

    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    machine = os.uname()
    return known_faults(
        size_bytes=size_bytes,
        chunk_bytes=chunk_bytes,
        kernel_release=machine.release,
        driver_version=driver_words(),
        arch=machine.machine,
        base_page_bytes=os.sysconf("SC_PAGE_SIZE"),
        memlock_limit_bytes=None if limit == resource.RLIM_INFINITY else limit,
    )


def warn_once(size_bytes: int, chunk_bytes: int | None = None) -> tuple[Fault, ...]:
    """Log a warning of each fault that stalls or fails, once in a process; return those logged."""
    told = tuple(
        fault
        for fault in faults_here(size_bytes, chunk_bytes)
        if fault.severity != "info" and fault.name not in _told
    )
    if told:
        import logging

        for fault in told:
            _told.add(fault.name)
            logging.getLogger("hostprep.register").warning("%s; %s", fault.what, fault.remedy)
    return told
