"""Liveness and readiness."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

_STUCK_S = 300.0
"""A key that waits for a worker for so long: all of them are stuck, a restart helps."""


@dataclass(slots=True)
class Health:
    """What the probes ask. Every field is set by whoever knows."""

    synced: bool = False
    standby: bool = False
    """Another replica holds the Lease, and we wait for it: ready, not working."""
    stopping: bool = False
    watching: bool = True
    """False while kopf's watches are down and wait to be started again."""
    oldest_key_s: Callable[[], float] = field(default=lambda: 0.0)

    def alive(self) -> str:
        """Return what is wrong, or nothing. That we answer at all proves that the loop turns."""
        oldest_s = self.oldest_key_s()
        if oldest_s > _STUCK_S:
            return f"a key has waited {oldest_s:.0f} s for a worker"
        return ""

    def ready(self) -> str:
        """Return why not ready, or nothing."""
        if self.stopping:
            return "stopping"
        if self.standby:
            return ""
        if not self.synced:
            return "not yet in sync with the API server"
        return "" if self.watching else "the watches are down"
