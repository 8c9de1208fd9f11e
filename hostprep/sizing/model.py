"""What a model keeps of every sequence: layer by layer, as plain values."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from math import lcm

from hostprep.errors import BadInputError
from hostprep.sizing.dtypes import CacheTypes, DType


class Kind(str, Enum):
    """What a store holds, in the words of the papers and of engines' cache specifications."""

    FULL = "full attention"
    WINDOW = "sliding window"
    CHUNK = "chunked attention"
    """Llama 4: a token attends within its own chunk of `window` tokens."""
    LATENT = "latent"
    """Multi-head latent attention: one vector in place of keys and values."""
    COMPRESSED = "compressed latent"
    """DeepSeek-V4: one vector for `ratio` tokens."""
    INDEX = "index keys"
    """Of sparse attention: what selects the tokens that are attended to."""
    STATE = "state"
    """Recurrent: of Mamba, gated delta nets, linear attention, short convolutions."""
    COMPRESSOR = "compressor state"
    """DeepSeek-V4: sums of the tokens that are not yet one entry. `heads` of its parts are the
    tokens whose sums are kept, so engines may treat it as a window of that many tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Vectors:
    """Vectors that are stored together: `heads` of them, each of `elements`, for each entry."""

    heads: int
    elements: int
    dtype: DType
    split: bool = True
    """Whether tensor parallelism deals the heads out; else every rank keeps all of them."""
    repeat: bool = True
    """Whether ranks beyond the number of heads keep a copy of one; else there can be none."""
    name: str = "num_key_value_heads"
    """Field of the config that says how many heads there are, for messages."""

    def heads_on_rank(self, ranks: int) -> int:
        """Return the heads that one of so many tensor-parallel ranks keeps.

        Heads are dealt out evenly; where there are fewer than ranks, each is kept by several, as
        in vLLM and TensorRT-LLM: max(1, heads / ranks). Raises BadInputError, naming --tp, where
        they do not come out even.
        """
        if not self.split:
            return self.heads
        uneven = self.heads % ranks and ranks % self.heads
        if uneven or (ranks > self.heads and not self.repeat):
            nor = " nor is divided" if self.repeat else ""
            raise BadInputError(
                f"--tp: is {ranks}, which {'neither ' if nor else 'does not '}"
                f"divide{'s' if nor else ''} {self.heads} ({self.name}){nor}",
                remedy="give a number that does",
            )
        return max(1, self.heads // ranks)

    def rank_bytes(self, ranks: int) -> int:
        """Return the bytes of one entry on one of so many ranks. Raises as `heads_on_rank`."""
        return self.heads_on_rank(ranks) * self.dtype.size_bytes(self.elements)


@dataclass(frozen=True, slots=True, kw_only=True)
class Store:
    """What one layer keeps in one kind of cache."""

    name: str
    """Of the group: stores of one name, window, ratio and kind share slots."""
    kind: Kind
    parts: tuple[Vectors, ...]
    """Keys and values (in this order), or what else there is of one entry."""
    window: int | None = None
    """Tokens that are kept; None for all of them."""
    ratio: int = 1
    """Tokens that become one entry."""
    per_sequence: bool = False
    """A state of fixed size for each sequence, whatever its length."""

    def rank_bytes(self, ranks: int) -> int:
        """Return the bytes of one entry, or state, on one of so many tensor-parallel ranks."""
        return sum(part.rank_bytes(ranks) for part in self.parts)


Layer = tuple[Store, ...]
"""What one layer keeps; nothing for one that has no cache, or uses another's."""
Layers = tuple[Layer, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A model as far as its caches go."""

    name: str
    family: str
    layers: Layers
    """Of the model itself, in order."""
    draft_layers: Layers = ()
    """Of its own multi-token prediction; they run on the last pipeline stage."""
    max_positions: int | None
    types: CacheTypes
    notes: tuple[str, ...] = ()

    @property
    def dtype(self) -> DType:
        """What it computes in."""
        return self.types.model

    @property
    def stores(self) -> tuple[Store, ...]:
        """All that all layers keep, those of drafts last."""
        return tuple(store for layer in self.layers + self.draft_layers for store in layer)

    @property
    def ratios(self) -> frozenset[int]:
        """How many tokens become one entry, wherever that is more than one."""
        return frozenset(store.ratio for store in self.stores) - {1}

    @property
    def block_multiple(self) -> int:
        """What a block's tokens must be a multiple of, so that every entry is whole in a block."""
        return lcm(*self.ratios)
