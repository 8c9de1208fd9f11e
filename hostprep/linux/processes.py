"""Processes and their namespaces, as procfs shows them."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
from collections.abc import Collection, Iterator
from dataclasses import dataclass

from hostprep.linux.files import closing_fd

HOST_PID_NAMESPACE = 0xEFFFFFFC
"""PROC_PID_INIT_INO of include/linux/proc_ns.h: the inode of the first PID namespace."""

HOST_CGROUP_NAMESPACE = 0xEFFFFFFB
"""PROC_CGROUP_INIT_INO of include/linux/proc_ns.h: the inode of the first one."""

_CLONE_NEWCGROUP = 0x02000000  # linux/sched.h
_PF_EXITING = 0x4  # include/linux/sched.h
# Not /proc/self: that is the main thread, and each thread has a namespace of its own.
_OWN = "/proc/thread-self/ns/cgroup"
_FIRST = "/proc/1/ns/cgroup"

_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True)
class ProcessId:
    """A process by its number, its start (clock ticks since boot) and its PID namespace."""

    pid: int
    start_ticks: int
    namespace: int


def boot_id() -> str:
    """Return this boot's identity (random(4)); it changes with every boot."""
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        return file.read().strip()


def current_process() -> ProcessId:
    """Return the caller's own identity."""
    pid = os.getpid()
    return ProcessId(pid, _start_ticks("self") or 0, _pid_namespace())


def sees_all_processes() -> bool:
    """Tell whether this process is in the host's PID namespace."""
    return _pid_namespace() == HOST_PID_NAMESPACE


def host_folder() -> str:
    """Return where the host's own files lie: below PID 1's root where we have another.

    In a container that takes the host's process ids, and the right to look at others' processes
    (proc(5), /proc/PID/root). Raises OSError without that right.
    """
    if os.stat("/proc/self/ns/mnt").st_ino == os.stat("/proc/1/ns/mnt").st_ino:
        return "/"
    os.stat("/proc/1/root/etc")
    return "/proc/1/root"


def may_scrub(owner_uid: int) -> bool:
    """Tell whether this process can judge that a file of that user has no user left.

    It must be in the host's PID namespace, and be root or the file's owner: others are refused
    the read lease that the judgement rests on.
    """
    return os.geteuid() in (0, owner_uid) and sees_all_processes()


def first_alive(processes: Collection[ProcessId]) -> ProcessId | None:
    """Return one of the processes that still exists; dying ones do until all is released.

    Processes of other PID namespaces are looked up by the number that they have there
    (NSpid in /proc/PID/status) and by their start: one walk over /proc for all of them.
    """
    own = _pid_namespace()
    for process in processes:
        if process.namespace == own and _start_ticks(str(process.pid)) == process.start_ticks:
            return process
    foreign = {(p.pid, p.start_ticks): p for p in processes if p.namespace != own}
    if not foreign:
        return None
    starts = {start for _, start in foreign}
    for entry in os.listdir("/proc"):
        start = _start_ticks(entry) if entry.isdigit() else None
        if start in starts:
            found = foreign.get((_innermost_pid(entry) or 0, start or 0))
            if found is not None:
                return found
    return None


def pid_here(process: ProcessId) -> int | None:
    """Return the number that a living process has in our PID namespace; None where it has none."""
    if is_of_our_namespace(process):
        return process.pid if _start_ticks(str(process.pid)) == process.start_ticks else None
    for entry in os.listdir("/proc"):
        is_it = entry.isdigit() and _start_ticks(entry) == process.start_ticks
        if is_it and _innermost_pid(entry) == process.pid:
            return int(entry)
    return None


def is_ending(process: ProcessId) -> bool:
    """Tell whether a process of our PID namespace has ended, is exiting, or was killed.

    One that was killed may take many seconds more: its memory is unmapped, and what a driver
    pinned is unpinned, before its files are closed.
    """
    if _start_ticks(str(process.pid)) != process.start_ticks:
        return True
    fields = _read(f"/proc/{process.pid}/stat").rpartition(")")[2].split()
    if len(fields) < 7 or fields[0] in ("Z", "X") or int(fields[6]) & _PF_EXITING:
        return True
    pending = (
        int(line.split()[1], 16)
        for line in _read(f"/proc/{process.pid}/status").splitlines()
        if line.startswith(("SigPnd:", "ShdPnd:"))
    )
    return any(signals >> (signal.SIGKILL - 1) & 1 for signals in pending)


def end_with_parent() -> bool:
    """Send this process SIGTERM once the process that started it by multiprocessing has ended.

    Returns False where there is no such process: then nothing is done.
    """
    import multiprocessing  # late: only engines that start processes need it
    import threading

    parent = multiprocessing.parent_process()
    if parent is None:
        return False

    def watch() -> None:
        parent.join()
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, name="hostprep-parent", daemon=True).start()
    return True


def is_of_our_namespace(process: ProcessId) -> bool:
    """Tell whether the process's number means the same here as where it was recorded."""
    return process.namespace == _pid_namespace()


def _start_ticks(entry: str) -> int | None:
    """Return the start of a process; None for one that is gone, or that only waits to be reaped.

    A zombie has let go of its memory and files (kernel/exit.c: exit_mm and exit_files come
    before exit_notify), and containers are full of them. One whose other threads still run has
    not.
    """
    text = _read(f"/proc/{entry}/stat")
    # The command's name is in brackets and may itself hold brackets and spaces.
    fields = text.rpartition(")")[2].split()
    if len(fields) < 20:
        return None
    state, threads, start_ticks = fields[0], int(fields[17]), int(fields[19])
    return None if state in ("Z", "X") and threads <= 1 else start_ticks


def _innermost_pid(entry: str) -> int | None:
    for line in _read(f"/proc/{entry}/status").splitlines():
        if line.startswith("NSpid:"):
            return int(line.split()[-1])
    return None


def _pid_namespace() -> int:
    try:
        return os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return 0


def _read(path: str) -> str:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read()
    except OSError:
        return ""


@contextlib.contextmanager
def first_cgroup_namespace() -> Iterator[bool]:
    """Put the calling thread, and threads that it starts, into PID 1's while the block runs.

    Yields False where it was there before. The kernel shows paths of cgroups (/proc/*/cgroup,
    the roots in mountinfo) as the reading thread's namespace has them, and with `nsdelegate`
    refuses, by ENOENT, to move a process out of the namespace in which cgroup.procs was opened
    (cgroup_namespaces(7); admin-guide/cgroup-v2.rst, Delegation).

    Raises OSError where it may not: that takes CAP_SYS_ADMIN, and to see the host's PID 1.
    """
    inode = os.stat(_OWN).st_ino
    if inode == HOST_CGROUP_NAMESPACE or inode == os.stat(_FIRST).st_ino:
        yield False
        return
    with closing_fd(os.open(_OWN, os.O_RDONLY | os.O_CLOEXEC)) as own:
        with closing_fd(os.open(_FIRST, os.O_RDONLY | os.O_CLOEXEC)) as first:
            _enter(first)
        try:
            yield True
        finally:
            _enter(own)


def _enter(fd: int) -> None:
    """Call setns(2), which Python has as of 3.12 only. Raises OSError."""
    if _libc.setns(fd, _CLONE_NEWCGROUP) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
