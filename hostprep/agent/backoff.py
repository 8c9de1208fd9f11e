"""How long to wait before trying again."""

from __future__ import annotations

import random
from dataclasses import dataclass

__all__ = ["Backoff"]


@dataclass(slots=True)
class Backoff:
    """Pauses that double from `first_s` to `most_s`, each shortened by chance to spread a crowd."""

    first_s: float
    most_s: float
    failures: int = 0

    def next_s(self) -> float:
        """Count a failure; return how long to wait."""
        pause_s = min(self.most_s, self.first_s * 2.0 ** min(self.failures, 30))
        self.failures += 1
        return pause_s * random.uniform(0.5, 1.0)  # noqa: S311 - no secret

    def reset(self) -> None:
        """Begin anew: it worked."""
        self.failures = 0
