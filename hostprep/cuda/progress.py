"""How far a registration is."""

from __future__ import annotations

import time
from dataclasses import dataclass

__all__ = ["Progress", "Tally"]


@dataclass(frozen=True)
class Progress:
    """How far a registration is. `state` is one of the words of `Registration.state`."""

    state: str
    done_bytes: int
    """Registered now: none after a failure, which takes all back."""
    size_bytes: int
    chunks: int
    """Calls made to register."""
    longest_chunk_s: float
    elapsed_s: float
    note: str = ""
    """What else is worth knowing, for people."""


class Tally:
    """What the working thread writes down, for others to read; single fields, hence no lock."""

    def __init__(self, size_bytes: int) -> None:
        self.state = "Idle"
        self.note = ""
        self.done_bytes = 0
        self.calls = 0
        self._size_bytes = size_bytes
        self._longest_s = 0.0
        self._began_s: float | None = None
        self._ended_s: float | None = None

    @property
    def has_begun(self) -> bool:
        """Whether work began, ever."""
        return self._began_s is not None

    def begin(self) -> None:
        """Start the clock."""
        self._began_s = time.monotonic()
        self.state = "Registering"

    def end(self, outcome: str) -> None:
        """Stop the clock."""
        self._ended_s = time.monotonic()
        self.state = outcome

    def add(self, size_bytes: int, took_s: float) -> None:
        """Count a chunk that is registered."""
        self.done_bytes += size_bytes
        self._longest_s = max(self._longest_s, took_s)

    def progress(self) -> Progress:
        """Return it as a value."""
        end_s = self._ended_s or time.monotonic()
        return Progress(
            state=self.state,
            done_bytes=self.done_bytes,
            size_bytes=self._size_bytes,
            chunks=self.calls,
            longest_chunk_s=self._longest_s,
            elapsed_s=end_s - self._began_s if self._began_s is not None else 0.0,
            note=self.note,
        )
