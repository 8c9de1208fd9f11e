"""Where a region's pages lie."""

from __future__ import annotations

import re
from dataclasses import dataclass

from hostprep.errors import BadInputError

__all__ = ["INTERLEAVE", "Placement"]

_NAME = re.compile(r"(?:node(?P<node>\d{1,5})|interleave)-(?P<index>\d{1,5})", re.ASCII)


@dataclass(frozen=True, slots=True, order=True)
class Placement:
    """On one NUMA node, or spread over all of them page by page (`node` is None)."""

    node: int | None

    def __str__(self) -> str:
        return "interleave" if self.node is None else f"node:{self.node}"

    def region_name(self, index: int) -> str:
        """Return the name of the index-th region with this placement, such as node0-1."""
        return f"{'interleave' if self.node is None else f'node{self.node}'}-{index}"

    @classmethod
    def parse(cls, text: str) -> Placement:
        """Read `node:N` or `interleave`. Raises BadInputError."""
        if text == "interleave":
            return INTERLEAVE
        prefix, _, number = text.partition(":")
        if prefix != "node" or not (number.isascii() and number.isdigit()):
            raise BadInputError(f"placement {text!r} is neither node:N nor interleave")
        return cls(int(number))

    @classmethod
    def of_region(cls, name: str) -> tuple[Placement, int] | None:
        """Return placement and index that a region's name tells; None if it is none of ours."""
        match = _NAME.fullmatch(name)
        if match is None:
            return None
        node = match["node"]
        return cls(None if node is None else int(node)), int(match["index"])


INTERLEAVE = Placement(None)
