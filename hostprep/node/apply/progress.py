"""What apply tells while it works; the command line draws it, tests and the agent record it."""

from __future__ import annotations

from typing import Protocol

from hostprep.node.plan.actions import Action

__all__ = ["NoProgress", "Progress"]


class Progress(Protocol):
    """Called from several threads."""

    def begin(self, action: Action) -> None:
        """Hear that an action starts."""

    def advance(self, action: Action, size_bytes: int) -> None:
        """Hear that so many more bytes of the action are done."""

    def end(self, action: Action, *, took_s: float) -> None:
        """Hear that the action is done, after so many seconds."""


class NoProgress:
    """Says nothing."""

    def begin(self, action: Action) -> None:
        """Say nothing."""

    def advance(self, action: Action, size_bytes: int) -> None:
        """Say nothing."""

    def end(self, action: Action, *, took_s: float) -> None:
        """Say nothing."""
