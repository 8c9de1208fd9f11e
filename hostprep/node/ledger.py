"""The ledger of a pool (agent.json): which boot it is of, and which huge pages the pool added.

It is written ahead of every change. After a run that was killed in between, the ledger and the
kernel's counter together tell how much of the change took effect:
hostprep.node.apply.hugepages.replay_ledger.
"""

from __future__ import annotations

import contextlib
import json
from dataclasses import dataclass, replace
from typing import Any

from hostprep.client.untrusted import read_file, read_object
from hostprep.errors import NotReadableError
from hostprep.linux.files import atomic_write
from hostprep.node.facts import LedgerEntry
from hostprep.paths import PoolPaths

_MAX_LEDGER_BYTES = 1 << 16
_MOST = (1 << 63) - 1


@dataclass(frozen=True, slots=True)
class PendingChange:
    """A change of one node's huge pages that was begun: from `before` to `after` pages."""

    node_id: int
    page_bytes: int
    before: int
    after: int

    def outcome(self, now: int) -> int:
        """Return by how many pages the change had an effect, given the count now.

        This assumes that no other program changed the count since; in any case the result is
        between nothing and the whole change.
        """
        low, high = sorted((0, self.after - self.before))
        return min(max(now - self.before, low), high)


@dataclass(frozen=True, slots=True)
class Ledger:
    """What `agent.json` holds."""

    boot_id: str
    pool_uid: str = ""
    generation: int = 0
    taken: tuple[LedgerEntry, ...] = ()
    pending: PendingChange | None = None

    def with_taken(self, node_id: int, page_bytes: int, change: int) -> Ledger:
        """Return the ledger with that many pages more (or fewer), and nothing pending."""
        pages = {(entry.node_id, entry.page_bytes): entry.pages for entry in self.taken}
        key = (node_id, page_bytes)
        pages[key] = max(0, pages.get(key, 0) + change)
        taken = tuple(LedgerEntry(*key, count) for key, count in sorted(pages.items()) if count)
        return replace(self, taken=taken, pending=None)

    def to_json(self) -> dict[str, Any]:
        """Return the file's content."""
        pending = self.pending
        return {
            "version": 1,
            "boot_id": self.boot_id,
            "pool_uid": self.pool_uid,
            "generation": self.generation,
            "taken": [[entry.node_id, entry.page_bytes, entry.pages] for entry in self.taken],
            "pending": pending
            and [pending.node_id, pending.page_bytes, pending.before, pending.after],
        }


def read_ledger(paths: PoolPaths) -> Ledger | None:
    """Return the pool's ledger; None where there is none that can be read.

    Only root writes it, and yet it is read as what others may have left: a FIFO in its place, by an
    engine that runs as root, must not hang the work on all pools.
    """
    try:
        fields = read_object(paths.ledger, _MAX_LEDGER_BYTES)
        taken, pending = fields.get("taken"), fields.get("pending")
        return Ledger(
            boot_id=fields.text("boot_id"),
            pool_uid=fields.text("pool_uid"),
            generation=fields.integer("generation", most=_MOST),
            taken=tuple(LedgerEntry(*_numbers(entry, 3)) for entry in _list(taken)),
            pending=PendingChange(*_numbers(pending, 4)) if pending else None,
        )
    except NotReadableError:
        return None


def _list(value: object) -> list[Any]:
    if not isinstance(value, list):
        raise NotReadableError("it holds no list")
    return value


def _numbers(value: object, count: int) -> list[int]:
    """Return a list of that many numbers that the kernel's files can hold."""
    numbers = [n for n in _list(value) if type(n) is int and 0 <= n <= _MOST]
    if len(numbers) != count or len(_list(value)) != count:
        raise NotReadableError(f"it holds no list of {count} numbers")
    return numbers


def read_boot_ledger(paths: PoolPaths, boot_id: str) -> tuple[PendingChange, ...]:
    """Return the pages that the boot script set out to add for this pool in that boot.

    A line has: page size in KiB, node, pages before, those of them that were free for the pool,
    pages that the pool needs. Malformed lines are skipped.
    """
    try:
        text = read_file(paths.boot_ledger, _MAX_LEDGER_BYTES).decode("ascii")
    except (NotReadableError, ValueError):
        return ()
    boot, *lines = text.splitlines() or [""]
    changes = []
    for line in lines if boot == boot_id else ():
        with contextlib.suppress(ValueError):
            page_kib, node_id, before, spare, need = (int(word) for word in line.split())
            added = max(0, need - spare)
            changes.append(PendingChange(node_id, page_kib * 1024, before, before + added))
    return tuple(changes)


@dataclass(slots=True)
class LedgerWriter:
    """Writes a pool's ledger; every change is on disk before the next."""

    paths: PoolPaths
    ledger: Ledger

    def update(self, **changes: Any) -> None:
        """Change fields of the ledger, on disk."""
        self.save(replace(self.ledger, **changes))

    def save(self, ledger: Ledger) -> None:
        """Write the ledger."""
        data = json.dumps(ledger.to_json()).encode()
        atomic_write(self.paths.ledger, data, mode=0o600)
        self.ledger = ledger
