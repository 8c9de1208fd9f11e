"""The gates of the engines on this node, as their ranks' boards tell."""

from __future__ import annotations

import time
from typing import Any

from hostprep.cuda.board_layout import READY
from hostprep.cuda.board_view import RankView
from hostprep.errors import HostprepError
from hostprep.node.observe.gates import observe_gate
from hostprep.paths import PoolPaths
from hostprep.units import format_bytes, format_seconds

__all__ = ["GATE_COLUMNS", "gate_document", "gate_row"]

GATE_COLUMNS = ("POOL", "REGION", "GATE", "RANKS", "REGISTERED", "SINCE", "WHY")


def gate_document(paths: PoolPaths, region: str, *, leased: bool) -> dict[str, Any] | None:
    """Return what the board beside a region tells; None where no run is at it now.

    Nor for users who may not look beside the region. A run is, while one of its ranks lives or
    its lease does: a lease all of whose ranks ended is worth knowing of.
    """
    name = {"pool": paths.pool, "region": region}
    try:
        seen = observe_gate(paths, region, leased=leased)
    except HostprepError as error:
        if error.reason in ("NoBoard", "NoPermission"):
            return None
        return {**name, "state": "Unknown", "why": error.message, "ranks": []}
    if not seen.is_running:
        return None
    view = seen.view
    return {
        **name,
        "state": seen.state,
        "why": seen.why,
        "world": view.world,
        "generation": view.generation.hex(),
        "since_s": round(time.time() - view.created_at_s, 1),
        "ranks": [_rank(rank) for rank in view.ranks],
    }


def _rank(view: RankView) -> dict[str, Any]:
    slot = view.slot
    return {
        "rank": view.rank,
        "state": slot.state,
        "alive": view.alive,
        "reason": slot.reason,
        "pid": slot.process.pid,
        "took_s": slot.took_s,
        "done_bytes": slot.done_bytes,
        "size_bytes": slot.size_bytes,
        "longest_chunk_s": slot.longest_chunk_s,
    }


def gate_row(gate: dict[str, Any]) -> tuple[str, ...]:
    """Return the columns of one gate."""
    if "world" not in gate:
        return (gate["pool"], gate["region"], gate["state"], "", "", "", gate["why"])
    ranks = gate["ranks"]
    ready = sum(rank["state"] == READY and rank["alive"] for rank in ranks)
    ended = sum(not rank["alive"] for rank in ranks)
    done, size = (sum(rank[key] for rank in ranks) for key in ("done_bytes", "size_bytes"))
    return (
        gate["pool"],
        gate["region"],
        gate["state"],
        f"{ready} of {gate['world']} ready" + (f", {ended} ended" if ended else ""),
        f"{format_bytes(done)} of {format_bytes(size)}" if size else "",
        format_seconds(gate["since_s"]),
        gate["why"],
    )
