"""What a model keeps of every sequence: layer by layer, as plain values."""

from __future__ import annotations

from dataclasses import dataclass
from math import lcm

from hostprep.sizing.config import DType


@dataclass(frozen=True, slots=True, kw_only=True)
class Vectors:
    """Vectors that are stored together: `heads` of them, each of `elements`, for each entry."""

    heads: int
    elements: int
    dtype: DType
    split: bool = True
    """Whether tensor parallelism deals the heads out; else every rank keeps all of them."""
    name: str = "num_key_value_heads"
    """Field of the config that says how many heads there are, for messages."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Store:
    """What one layer keeps in one kind of cache."""

    name: str
    """Of the group: stores of one name, window, ratio and kind share slots."""
    parts: tuple[Vectors, ...]
    window: int | None = None
    """Tokens that are kept; None for all of them."""
    ratio: int = 1
    """Tokens that become one entry."""
    per_sequence: bool = False
    """A state of fixed size for each sequence, whatever its length."""


Layers = tuple[tuple[Store, ...], ...]
"""For each layer what it keeps; nothing for one that has no cache, or uses another's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A model as far as its caches go."""

    name: str
    family: str
    layers: Layers
    max_positions: int | None
    dtype: DType
    notes: tuple[str, ...] = ()

    @property
    def ratios(self) -> frozenset[int]:
        """How many tokens become one entry, wherever that is more than one."""
        return frozenset(s.ratio for layer in self.layers for s in layer) - {1}

    @property
    def block_multiple(self) -> int:
        """What a block's tokens must be a multiple of, so that every entry is whole in a block."""
        return lcm(*self.ratios)
