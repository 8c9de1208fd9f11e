"""Events about what regions keep for their owners: given up, or refused by an engine."""

from __future__ import annotations

from collections.abc import Iterator

from hostprep.api.node_resource import NodeStatus, RegionStatus
from hostprep_operator.reconcile.changes import EventNote

Key = tuple[str, str, str, float]
"""Pool, region, reason of the event, and when it happened."""

_SHOWN_FIELDS = 8
_WHY = {
    "AgeLimit": "it was kept for as long as retention.maxAgeSeconds allows",
    "Waiters": "others wait for memory, and it was kept longest",
    "Claimed": "another claim took the region, or its owner's own came too late",
}
"""By reasons of the agent; of the others nobody needs to be told."""


def kept_notes(status: NodeStatus) -> dict[Key, EventNote]:
    """Return the event for each thing that a status says happened, new or not."""
    return dict(
        found
        for pool in status.pools
        for region in pool.regions
        for found in _of(pool.name, region)
    )


def _of(pool: str, region: RegionStatus) -> Iterator[tuple[Key, EventNote]]:
    where, gone, kept = f"{region.name} of pool {pool}", region.given_up, region.kept
    if gone is not None and gone.reason in _WHY:
        note = EventNote(
            "Normal",
            "KeptContentsGivenUp",
            f"Region {where} no longer keeps {_named(gone.name)}: {_WHY[gone.reason]}.",
        )
        yield (pool, region.name, note.reason, gone.at_s or 0.0), note
    if kept is not None and kept.refused:
        more = len(kept.refused) - _SHOWN_FIELDS
        fields = ", ".join(kept.refused[:_SHOWN_FIELDS]) + (f" and {more} more" if more > 0 else "")
        note = EventNote(
            "Warning",
            "WarmRestartRefused",
            f"An engine began empty on region {where}, kept for {_named(kept.name)}, for what "
            f"differs or is unknown: {fields}. `hostprep status` on the node shows the values.",
        )
        yield (pool, region.name, note.reason, kept.reported_s or 0.0), note


def _named(name: str) -> str:
    return f'"{name}"' if name else "an owner without a name"
