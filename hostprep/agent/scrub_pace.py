"""How often a pool may be scrubbed or repaired: an engine can call for that again and again."""

from __future__ import annotations

from dataclasses import dataclass, field

PAUSES = "its regions become dirty faster than they may be scrubbed: scrubbing pauses"

_REST_PER_SCRUB = 4.0
"""Seconds for each second of work: a pool takes a quarter of root's time at most."""
_BURST_S = 60.0
"""How far a pool may be ahead: 20 s of scrubs, some hundred GiB, are done without a pause."""


@dataclass
class ScrubPace:
    """Counts what scrubs of each pool took, and repairs, and says which pools have to rest.

    Without it an engine that claims, writes (or truncates) and gives back in a loop keeps all of
    root's threads at work, and other pools' regions dirty meanwhile. Times are monotonic seconds.
    """

    _rested_at_s: dict[str, float] = field(default_factory=dict)

    def count(self, pool: str, took_s: float, *, now_s: float) -> None:
        """Count a scrub that has ended now."""
        begin_s = max(now_s, self._rested_at_s.get(pool, 0.0))
        self._rested_at_s[pool] = begin_s + took_s * _REST_PER_SCRUB

    def rests(self, pool: str, *, now_s: float) -> bool:
        """Whether the pool is not to be scrubbed yet."""
        return self._rested_at_s.get(pool, 0.0) - now_s > _BURST_S
