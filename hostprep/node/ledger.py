"""The agent's own record of a pool: which boot it is of, and which huge pages it took.

Written ahead of every change, so that a run that is killed in between can tell afterwards what
it did: the kernel's counter says the rest.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from hostprep.linux.files import atomic_write
from hostprep.node.facts import LedgerEntry
from hostprep.paths import PoolPaths

_MAX_LEDGER_CHARACTERS = 1 << 16


@dataclass(frozen=True, slots=True)
class Pending:
    """A change of one node's huge pages that was begun: from `before` to `after` pages."""

    node_id: int
    page_bytes: int
    before: int
    after: int

    def outcome(self, now: int) -> int:
        """Return by how many pages the change had an effect, given the count now.

        Nobody else is assumed to have changed the pool since; whatever happened, the answer
        stays between nothing and all of the change.
        """
        low, high = sorted((0, self.after - self.before))
        return min(max(now - self.before, low), high)


@dataclass(frozen=True, slots=True)
class Record:
    """What `agent.json` holds."""

    boot_id: str
    pool_uid: str = ""
    generation: int = 0
    taken: tuple[LedgerEntry, ...] = ()
    pending: Pending | None = None

    def with_taken(self, node_id: int, page_bytes: int, change: int) -> Record:
        """Return the record with that many pages more (or fewer), and nothing pending."""
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


def read_record(paths: PoolPaths) -> Record | None:
    """Return the pool's record; None where there is none that can be read."""
    try:
        with open(paths.ledger, encoding="utf-8") as file:
            document = json.load(file)
        pending = document["pending"]
        return Record(
            boot_id=str(document["boot_id"]),
            pool_uid=str(document["pool_uid"]),
            generation=int(document["generation"]),
            taken=tuple(LedgerEntry(*map(int, entry)) for entry in document["taken"]),
            pending=Pending(*map(int, pending)) if pending else None,
        )
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None


def read_boot_ledger(paths: PoolPaths, boot_id: str) -> tuple[Pending, ...]:
    """Return what the boot script set out to add for this pool in that boot; lines it spoilt not.

    Its lines: page size in KiB, node, pages before, those of them that were free for the pool,
    pages that the pool needs.
    """
    try:
        with open(paths.boot_ledger, encoding="ascii") as file:
            boot, *lines = file.read(_MAX_LEDGER_CHARACTERS).splitlines() or [""]
    except (OSError, ValueError):
        return ()
    changes = []
    for line in lines if boot == boot_id else ():
        with contextlib.suppress(ValueError):
            page_kib, node_id, before, spare, need = (int(word) for word in line.split())
            added = max(0, need - spare)
            changes.append(Pending(node_id, page_kib * 1024, before, before + added))
    return tuple(changes)


@dataclass(slots=True)
class Recorder:
    """The record of a pool that is being worked on; every change is on disk before the next."""

    paths: PoolPaths
    record: Record
    write: Callable[..., None] = field(default=atomic_write)

    def update(self, **changes: Any) -> None:
        """Change fields of the record, on disk."""
        self.save(replace(self.record, **changes))

    def save(self, record: Record) -> None:
        """Write the record."""
        data = json.dumps(record.to_json()).encode()
        self.write(self.paths.ledger, data, mode=0o600)
        self.record = record
