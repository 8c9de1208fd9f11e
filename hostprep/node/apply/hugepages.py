"""The kernel's huge-page pools, node by node: add, read back, compact once, give back.

Documentation/admin-guide/mm/hugetlbpage.rst. A write that asks for more than the node can give
succeeds and gives less: only reading back tells.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterable, Iterator

from hostprep.errors import BadInputError, BusyError, FailedError, HostprepError
from hostprep.linux.files import write_control_file
from hostprep.linux.lock_holders import describe_holder
from hostprep.linux.locks import hold_lock, hold_own_lock
from hostprep.linux.processes import host_folder
from hostprep.node.facts import LedgerEntry, without_held
from hostprep.node.ledger import Ledger, LedgerWriter, PendingChange
from hostprep.node.observe.pools import held_pages

_NODES = "/sys/devices/system/node"
_MACHINE = "/sys/kernel/mm/hugepages"
_MACHINE_LOCK = "/run/.hostprep-huge-pages.lock"
_LOCK_TIMEOUT_S = 120.0
_OLD_LOCK_TIMEOUT_S = 1.0
_COMPACT_TIMEOUT_S = 5.0
_COMPACT = "import os, sys; os.write(os.open(sys.argv[1], os.O_WRONLY), b'1')"


def add_pages(writer: LedgerWriter, entry: LedgerEntry) -> int:
    """Add pages to the node's pool. Returns how many came.

    If they are short, free memory is compacted once, for at most five seconds, and asked for
    again. Raises HostprepError where the pool cannot be written.
    """
    node_id, page_bytes = entry.node_id, entry.page_bytes
    with _locked(node_id, page_bytes) as folder:
        before = _persistent(folder)
        change = PendingChange(node_id, page_bytes, before, before + entry.pages)
        with _recorded(writer, change, folder):
            _write(folder, change.after)
            if _persistent(folder) < change.after and _compact(node_id):
                _write(folder, change.after)
            came = change.outcome(_persistent(folder))
    return came


def give_back_pages(writer: LedgerWriter, entry: LedgerEntry) -> None:
    """Take pages out of the node's pool: at most as many as the ledger says we added.

    Only those that are free and not reserved, and none for what processes keep of our removed
    regions: in their place the kernel would take other pools' free pages, and make the rest
    surplus. What is not given back stays in the ledger, for the next run.
    """
    node_id, page_bytes = entry.node_id, entry.page_bytes
    ours = without_held(writer.ledger.taken, held_pages(writer.paths, writer.ledger.taken))
    most = min(entry.pages, sum(taken.pages for taken in ours if taken.is_of(entry)))
    if most <= 0:
        return
    with _locked(node_id, page_bytes) as folder:
        pages = min(most, _unused(folder, page_bytes))
        if pages <= 0:
            return
        before, surplus = _persistent(folder), _read(folder, "surplus_hugepages")
        change = PendingChange(node_id, page_bytes, before, max(0, before - pages))
        with _recorded(writer, change, folder):
            _write(folder, change.after)
            taken_since = _read(folder, "surplus_hugepages") - surplus
            if taken_since > 0:  # a process took pages in this instant: they stay as they were
                _write(folder, min(before, change.after + taken_since))


def adopt_boot_pages(ledger: Ledger, changes: Iterable[PendingChange]) -> Ledger:
    """Return the ledger with the pages that the boot script added for this pool.

    Call it before the pool adds any of its own: the counters do not tell the two apart.
    """
    for change in changes:
        with contextlib.suppress(OSError, ValueError):  # a node that is not there any more
            came = change.outcome(_persistent(_folder(change.node_id, change.page_bytes)))
            ledger = ledger.with_taken(change.node_id, change.page_bytes, came)
    return ledger


def replay_ledger(writer: LedgerWriter) -> None:
    """Account for a change during which an earlier run was killed."""
    pending = writer.ledger.pending
    if pending is None:
        return
    with _locked(pending.node_id, pending.page_bytes) as folder:
        writer.save(_after(writer, pending, folder))


def free_pages(node_id: int, page_bytes: int) -> int:
    """Return the node's unused pages."""
    return _read(_folder(node_id, page_bytes), "free_hugepages")


def _folder(node_id: int, page_bytes: int) -> str:
    return f"{_NODES}/node{node_id}/hugepages/hugepages-{page_bytes // 1024}kB"


@contextlib.contextmanager
def _locked(node_id: int, page_bytes: int) -> Iterator[str]:
    """Be the only one on the machine, of whatever root and container, to change these pages."""
    folder = _folder(node_id, page_bytes)

    def busy() -> BusyError:
        return BusyError(
            f"{describe_holder(_machine_lock())} changes huge pages", remedy="wait for it to end"
        )

    with contextlib.ExitStack() as stack:
        try:
            lock = hold_own_lock(_machine_lock(), timeout_s=_LOCK_TIMEOUT_S, busy=busy)
            stack.enter_context(lock)
        except (BadInputError, FailedError):
            pass  # a container whose own /run it would be, and read-only
        # Earlier versions lock the kernel's file itself. So may anybody, and for ever (it is
        # everybody's to read, and flock asks for no more): it is waited for briefly.
        with contextlib.suppress(BusyError):
            old = hold_lock(f"{folder}/nr_hugepages", timeout_s=_OLD_LOCK_TIMEOUT_S, busy=busy)
            stack.enter_context(old)
        yield folder


def _machine_lock() -> str:
    """Return the lock file's path: in the host's /run, which no engine has mounted.

    Not in sysfs: containers with a network namespace of their own see other files there.
    """
    try:
        return f"{host_folder().rstrip('/')}{_MACHINE_LOCK}"
    except OSError:  # not to be reached: it excludes others in this container only
        return _MACHINE_LOCK


def _write(folder: str, pages: int) -> None:
    path = f"{folder}/nr_hugepages"
    try:
        write_control_file(path, str(pages).encode())
    except OSError as error:
        raise FailedError(
            f"cannot write {path}: {error.strerror}",
            reason="HugePagesRefused",
            remedy="run it as root with a writable /sys, or choose Base",
        ) from error


def _compact(node_id: int) -> bool:
    """Compact the node's free memory; False if it could not be done in time.

    By a child, because the write returns only when the kernel is done with the whole node,
    and a process can be killed out of it where a thread cannot.
    """
    command = [sys.executable, "-I", "-S", "-c", _COMPACT, f"{_NODES}/node{node_id}/compact"]
    child = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    try:
        return child.wait(_COMPACT_TIMEOUT_S) == 0
    except subprocess.TimeoutExpired:
        return True
    finally:
        if child.poll() is None:
            child.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(1.0)


@contextlib.contextmanager
def _recorded(writer: LedgerWriter, change: PendingChange, folder: str) -> Iterator[None]:
    """Write a change to the ledger ahead, and its effect afterwards, refused or not.

    Only a run that is killed leaves it pending, for the next one to replay.
    """
    writer.update(pending=change)
    try:
        yield
    except HostprepError:
        writer.save(_after(writer, change, folder))
        raise
    writer.save(_after(writer, change, folder))


def _after(writer: LedgerWriter, change: PendingChange, folder: str) -> Ledger:
    outcome = change.outcome(_persistent(folder))
    return writer.ledger.with_taken(change.node_id, change.page_bytes, outcome)


def _unused(folder: str, page_bytes: int) -> int:
    """Return the node's free pages, less what the machine has reserved: that is met anywhere."""
    machine = f"{_MACHINE}/hugepages-{page_bytes // 1024}kB"
    spare = _read(machine, "free_hugepages") - _read(machine, "resv_hugepages")
    return max(0, min(_read(folder, "free_hugepages"), spare))


def _persistent(folder: str) -> int:
    """Return the pages that the pool holds for good, on this node: all but surplus ones.

    nr_hugepages reads with surplus pages and is written without (mm/hugetlb.c,
    set_max_huge_pages).
    """
    return _read(folder, "nr_hugepages") - _read(folder, "surplus_hugepages")


def _read(folder: str, name: str) -> int:
    with open(f"{folder}/{name}", encoding="ascii") as file:
        return int(file.read())
