"""What can go wrong while a plan is carried out, beyond what every part can meet."""

from __future__ import annotations

from hostprep.backing import Backing
from hostprep.errors import FailedError

__all__ = ["ShortfallError"]


class ShortfallError(FailedError):
    """A backing turned out short of pages: plan again without it."""

    default_reason = "Shortfall"

    def __init__(self, pool: str, backing: Backing, why: str) -> None:
        super().__init__(f"{backing} for pool {pool}: {why}")
        self.pool = pool
        self.backing = backing
        self.why = why
