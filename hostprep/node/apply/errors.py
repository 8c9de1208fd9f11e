"""What apply raises beyond hostprep.errors."""

from __future__ import annotations

from hostprep.errors import FailedError
from hostprep.node.plan.actions import Shortfall

__all__ = ["ShortfallError"]


class ShortfallError(FailedError):
    """A backing turned out short of pages: plan again without it, or without it on that node."""

    default_reason = "Shortfall"

    def __init__(self, short: Shortfall) -> None:
        super().__init__(f"{short.backing} for pool {short.pool}: {short.why}")
        self.short = short
