"""What a verification round finds of the engines' gates."""

from __future__ import annotations

import math

from hostprep.agent.messages import GateLook
from hostprep.cuda.board_layout import FAILED, OPEN
from hostprep.errors import HostprepError
from hostprep.node.observe.gates import GateObservation, observe_gate
from hostprep.paths import PoolPaths

__all__ = ["UNKNOWN", "look_at_gate"]

UNKNOWN = "Unknown"
_MOST_S = 1e9
"""Boards are written by engines: a figure that cannot be must not spoil a sum for good."""


def look_at_gate(paths: PoolPaths, region: str, *, leased: bool) -> GateLook | None:
    """Return the gate of the engine at a region; None where there is nothing to tell.

    A run that is over is told of where its gate was decided: it may have begun and ended since
    the last round. Never raises for what is in the board's place.
    """
    try:
        seen = observe_gate(paths, region, leased=leased)
    except (HostprepError, OSError) as error:
        is_missing = isinstance(error, HostprepError) and error.reason == "NoBoard"
        # What an engine left that has gone is nobody's gate: the next engine makes a new board.
        return GateLook(region=region, state=UNKNOWN) if leased and not is_missing else None
    if not seen.is_running and not seen.is_announced:
        return None
    return _gate_look(region, seen)


def _gate_look(region: str, seen: GateObservation) -> GateLook:
    view = seen.view
    slots = [rank.slot for rank in view.ranks if rank.alive]
    announced = view.gate
    return GateLook(
        region=region,
        state=seen.state,
        run=view.generation.hex(),
        is_running=seen.is_running,
        open_after_s=_sane_s(announced.took_s) if announced and seen.state == OPEN else None,
        # A rank that failed has taken back what it had registered.
        registered_bytes=sum(slot.done_bytes for slot in slots if slot.state != FAILED),
        longest_chunk_s=max((_sane_s(slot.longest_chunk_s) for slot in slots), default=0.0),
    )


def _sane_s(seconds: float) -> float:
    return min(max(seconds, 0.0), _MOST_S) if math.isfinite(seconds) else 0.0
