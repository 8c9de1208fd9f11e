"""Events about what regions keep for their owners: given up, or refused by an engine."""

from __future__ import annotations

from collections.abc import Iterator

from hostprep.api.node_resource import NodeStatus, RegionStatus, field_label
from hostprep_operator.reconcile.changes import EventNote

Key = tuple[str, str, str]
"""Pool, region and reason of the event."""

EVERY_S = 600.0
"""In this time at most one WarmRestartRefused a region: engines write what it is about."""
MOST_GIVEN_UP = 16
"""And so many KeptContentsGivenUp a pool, of all its regions on the node: an engine that writes
another owner into its sidecar each round would give one up each round."""

_REFUSED = "WarmRestartRefused"
_SHOWN_FIELDS = 8
_WHY = {
    "AgeLimit": "it was kept for as long as retention.maxAgeSeconds allows",
    "Waiters": "others wait for memory, and it was kept longest",
    "Claimed": "another claim took the region, or its owner's own came too late",
}
"""By reasons of the agent; of the others nobody needs to be told."""


class KeptNews:
    """What one HostMemoryNode reported so far: each thing is told once.

    Not what was there when it was first seen. A pool or a region that a status leaves out has
    reported nothing new once it is back.
    """

    def __init__(self) -> None:
        self._is_first = True
        self._seen: dict[Key, float] = {}
        """When the last one happened, as the status says."""
        self._told_s: dict[Key, tuple[float, ...]] = {}
        """When events that are limited were posted lately; a limit of a pool's has no region."""

    def take(self, status: NodeStatus, *, now_s: float) -> tuple[EventNote, ...]:
        """Return the events of what is new. `now_s`: of any clock that only goes forward."""
        notes = kept_notes(status)
        new = [key for key, (at_s, _note) in notes.items() if self._seen.get(key) != at_s]
        self._seen.update((key, at_s) for key, (at_s, _note) in notes.items())
        if self._is_first:
            self._is_first = False
            return ()
        return tuple(notes[key][1] for key in new if self._is_due(key, now_s))

    def _is_due(self, key: Key, now_s: float) -> bool:
        """Whether an event is within its limit; if it is, it counts."""
        pool, _region, reason = key
        limited, most = (key, 1) if reason == _REFUSED else ((pool, "", reason), MOST_GIVEN_UP)
        lately = tuple(at_s for at_s in self._told_s.get(limited, ()) if now_s - at_s < EVERY_S)
        is_due = len(lately) < most
        self._told_s[limited] = (*lately, now_s) if is_due else lately
        return is_due


def kept_notes(status: NodeStatus) -> dict[Key, tuple[float, EventNote]]:
    """Return each thing that a status says happened, new or not: when, and its event."""
    return dict(
        found
        for pool in status.pools
        for region in pool.regions
        for found in _of(pool.name, region)
    )


def _of(pool: str, region: RegionStatus) -> Iterator[tuple[Key, tuple[float, EventNote]]]:
    where, gone, kept = f"{region.name} of pool {pool}", region.given_up, region.kept
    if gone is not None and gone.reason in _WHY:
        note = EventNote(
            "Normal",
            "KeptContentsGivenUp",
            f"Region {where} no longer keeps {_named(gone.name)}: {_WHY[gone.reason]}.",
        )
        yield (pool, region.name, note.reason), (gone.at_s or 0.0, note)
    if kept is not None and kept.refused:
        labels = sorted({field_label(name) for name in kept.refused})
        more = len(labels) - _SHOWN_FIELDS
        fields = ", ".join(labels[:_SHOWN_FIELDS]) + (f" and {more} more" if more > 0 else "")
        note = EventNote(
            "Warning",
            _REFUSED,
            f"An engine began empty on region {where}, kept for {_named(kept.name)}, for what "
            f"differs or is unknown: {fields}. `hostprep status` on the node shows the values.",
        )
        yield (pool, region.name, note.reason), (kept.reported_s or 0.0, note)


def _named(name: str) -> str:
    return f'"{name}"' if name else "an owner without a name"
