"""Where an engine's host buffers lie in a rank's share of a region: pure arithmetic.

An engine allocates a few large buffers as it starts, each host pool one or more, and gives them
back together or not at all: so they follow one another, and what is given back can be had again
once all that was taken after it is back as well.
"""

from __future__ import annotations

from dataclasses import dataclass

from hostprep.errors import BadInputError
from hostprep.units import format_bytes

__all__ = ["Asker", "Part", "Parts"]


@dataclass(frozen=True)
class Asker:
    """Whose buffers they are, for people."""

    engine: str
    lower: str
    """Its options by which it asks for less."""


@dataclass(frozen=True)
class Part:
    """What one buffer has, in bytes from the region's start; whole pages."""

    offset_bytes: int
    size_bytes: int


class Parts:
    """A share of a region, handed out from its start to its end. Not for several threads at once.

    Every part begins and ends on a page, since it is registered as a slice of its own.
    """

    def __init__(
        self, offset_bytes: int, size_bytes: int, page_bytes: int, *, asker: Asker
    ) -> None:
        self._asker = asker
        self._end_bytes = offset_bytes + size_bytes
        self._page_bytes = page_bytes
        self._start_bytes = self._top_bytes = offset_bytes
        self._taken: list[Part] = []
        self._back: set[int] = set()

    @property
    def free_bytes(self) -> int:
        """What can still be had, in one part."""
        return self._end_bytes - self._top_bytes

    def take(self, size_bytes: int) -> Part:
        """Return a part of at least this size.

        Raises BadInputError where it does not fit: what is asked for and what is left are named.
        """
        if size_bytes <= 0:
            raise BadInputError(f"a buffer of {size_bytes} bytes cannot be", reason="BadSize")
        whole_bytes = -(-size_bytes // self._page_bytes) * self._page_bytes
        if whole_bytes > self.free_bytes:
            raise self.too_small(size_bytes)
        part = Part(self._top_bytes, whole_bytes)
        self._taken.append(part)
        self._top_bytes += whole_bytes
        return part

    def give_back(self, part: Part) -> None:
        """Take a part back, once; nothing that is not out."""
        if part in self._taken:
            self._back.add(part.offset_bytes)
        while self._taken and self._taken[-1].offset_bytes in self._back:
            last = self._taken.pop()
            self._back.remove(last.offset_bytes)
            self._top_bytes = last.offset_bytes

    def too_small(self, size_bytes: int) -> BadInputError:
        """Return the refusal of that many bytes."""
        share_bytes = self._end_bytes - self._start_bytes
        return BadInputError(
            f"{self._asker.engine} asks for {_both(size_bytes)} of host memory, and this rank's "
            f"part of the region has {_both(self.free_bytes)} left of {_both(share_bytes)} "
            f"(pages of {format_bytes(self._page_bytes)})",
            reason="RegionTooSmall",
            remedy=f"lower {self._asker.lower}, or claim a larger region (`hostprep exec --size`)",
        )


def _both(size_bytes: int) -> str:
    return f"{size_bytes} bytes ({format_bytes(size_bytes)})"
