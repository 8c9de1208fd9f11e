"""The kernel's huge-page pools, node by node: add, read back, compact once, give back.

Documentation/admin-guide/mm/hugetlbpage.rst. A write that asks for more than the node can give
succeeds and gives less: only reading back tells.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterable, Iterator

from hostprep.errors import BusyError, FailedError, HostprepError
from hostprep.linux.files import write_control_file
from hostprep.linux.locks import hold_lock
from hostprep.node.facts import LedgerEntry
from hostprep.node.ledger import Ledger, LedgerWriter, PendingChange
from hostprep.units import format_bytes

_NODES = "/sys/devices/system/node"
_LOCK_TIMEOUT_S = 120.0
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

    Pages that are still mapped become surplus and vanish when they are unmapped.
    """
    node_id, page_bytes = entry.node_id, entry.page_bytes
    taken = {(ours.node_id, ours.page_bytes): ours.pages for ours in writer.ledger.taken}
    pages = min(entry.pages, taken.get((node_id, page_bytes), 0))
    if pages <= 0:
        return
    with _locked(node_id, page_bytes) as folder:
        before = _persistent(folder)
        change = PendingChange(node_id, page_bytes, before, max(0, before - pages))
        with _recorded(writer, change, folder):
            _write(folder, change.after)


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
    """Hold the lock on the very file that is changed: it serves all roots on the machine."""
    folder = _folder(node_id, page_bytes)
    busy = BusyError(
        f"another hostprep changes the {format_bytes(page_bytes)} pages of node {node_id}",
        remedy="wait for it to end",
    )
    with hold_lock(f"{folder}/nr_hugepages", timeout_s=_LOCK_TIMEOUT_S, busy=busy):
        yield folder


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


def _persistent(folder: str) -> int:
    """Return the pages that the pool holds for good, on this node: all but surplus ones.

    nr_hugepages reads with surplus pages and is written without (mm/hugetlb.c,
    set_max_huge_pages).
    """
    return _read(folder, "nr_hugepages") - _read(folder, "surplus_hugepages")


def _read(folder: str, name: str) -> int:
    with open(f"{folder}/{name}", encoding="ascii") as file:
        return int(file.read())
