"""What the rules of an engine are asked, and what they answer: plain values.

Each engine divides memory in its own way: pads pages, groups layers, rounds blocks, resolves data
types. Its rules are read from the source of one release, which they name, and say what that
release does, where it differs from the plain reckoning of `hostprep.sizing.groups` too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from hostprep.errors import BadInputError
from hostprep.sizing.config import ModelConfig
from hostprep.sizing.dtypes import TypeChoice
from hostprep.sizing.groups import Limits
from hostprep.sizing.model import Model
from hostprep.sizing.size import Memory
from hostprep.units import format_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """A GPU as far as engines choose by it."""

    name: str
    capability: int
    """CUDA's compute capability, ten times: 90 for H200, 100 for B200."""
    memory_bytes: int


DEFAULT_DEVICE = Device(name="H200", capability=90, memory_bytes=141 << 30)
"""What rules assume where no GPU is named; they say so."""


@dataclass(frozen=True, slots=True)
class Default:
    """What an engine takes where its user says nothing."""

    value: int
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineDefaults:
    """An engine's own limits for one model on one kind of GPU."""

    max_batch_size: Default
    max_num_tokens: Default
    tokens_per_block: Default
    gpu_memory_utilization: float
    """Part of each GPU's memory that the engine uses for all that it does, weights included."""
    utilization_why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineGroup:
    """Layers that an engine gives blocks together: one block of a group holds all of them."""

    name: str
    layers: int
    """Of the whole model."""
    padded_layers: int
    """Layers of memory that a block has on the fullest rank: those of the group, and empty ones."""
    tokens_per_block: int
    """0 for a state, which is one a request and not one for so many tokens."""
    page_bytes: int
    """Of one layer and block, on one rank; the largest where they differ."""
    blocks_per_request: int
    """That the engine reserves for a request of `max_seq_len`."""
    window: int | None = None
    """Tokens that its layers look back on; None for all."""
    is_chunked: bool = False
    """Whether they look back to the beginning of a chunk of `window` tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineTier:
    """GPU memory as the engine divides it: what it can hold, and what it will log."""

    blocks: int
    block_bytes: int
    """On the fullest rank; 0 where pools have blocks of their own."""
    tokens: int
    """As the engine counts them, which may be fewer than blocks x tokens of a block."""
    concurrency: float
    """Requests of `max_seq_len` at once, as the engine reckons them."""
    size_bytes: int
    """Of memory given; blocks use at most that."""
    log_lines: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineHost:
    """Host memory as one way of attaching divides it."""

    way: str
    """As `hostprep exec --engine` calls it, or the engine's own name for its host tier."""
    blocks: int
    block_bytes: int
    """Of one block in all ranks' parts together, padding included."""
    copies: int
    """Ranks that keep parts of their own."""
    size_bytes: int
    """Of memory given to all ranks of the engine."""
    blocks_per_request: int
    """That one usual request (`typical_seq_len`) leaves behind."""
    notes: tuple[str, ...] = ()

    @property
    def requests(self) -> int:
        """Usual requests whose caches it holds."""
        return self.blocks // max(1, self.blocks_per_request)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSizing:
    """What one engine does with a model, limits and memory."""

    engine: str
    version: str
    """The release whose source the rules were read from."""
    model: Model
    limits: Limits
    groups: tuple[EngineGroup, ...]
    block_bytes: int
    """GPU memory of one block on the fullest rank; 0 where pools have blocks of their own."""
    least_bytes: int
    """GPU memory of each rank for caches with less than which no request of `max_seq_len` is
    served; vLLM does not even start then."""
    gpu: EngineTier | None
    host: tuple[EngineHost, ...]
    """Each way that its host tier can be attached; empty where no host memory is given."""
    notes: tuple[str, ...] = ()

    def host_by(self, way: str) -> EngineHost | None:
        """Return what host memory holds that is attached in that way; None where there is none."""
        return next((host for host in self.host if host.way == way), None)


class EngineRules(Protocol):
    """The rules of one engine."""

    @property
    def name(self) -> str:
        """Return the engine's name, as `--engine` has it."""

    @property
    def version(self) -> str:
        """Return the release that the rules were read from."""

    def types(self, config: ModelConfig, choice: TypeChoice, device: Device) -> TypeChoice:
        """Return the choice with each `auto` that the engine resolves in its own way.

        Raises BadInputError, naming the option, for a type that the engine does not have.
        """

    def defaults(self, model: Model, limits: Limits | None, device: Device) -> EngineDefaults:
        """Return the engine's own limits. `limits`: those that are served, if they are known.

        Its share of memory may depend on them; what it takes where none are given does not depend
        on `max_num_tokens`, `max_batch_size` and `tokens_per_block`.
        """

    def size(self, model: Model, limits: Limits, memory: Memory, device: Device) -> EngineSizing:
        """Return what the engine does with it.

        Raises BadInputError, naming the option or the kind of layer, for what it refuses itself
        and for what its rules here do not cover.
        """


def check_room(engine: str, limits: Limits, memory: Memory, least_bytes: int) -> None:
    """Raise BadInputError where one request of the longest kind does not fit into GPU memory."""
    if memory.gpu_bytes is not None and memory.gpu_bytes < least_bytes:
        raise BadInputError(
            f"--gpu-memory: with {format_bytes(memory.gpu_bytes)} {engine} has no room for "
            f"one request of {limits.max_seq_len} tokens, which takes {format_bytes(least_bytes)}",
            remedy=f"give --gpu-memory {-(-least_bytes >> 20)}Mi, or a shorter --max-seq-len",
        )


def unknown_family(engine: str, model: Model) -> BadInputError:
    """Return the error for a kind of model that an engine's rules here do not cover."""
    return BadInputError(
        f"{model.name}: the rules of {engine} for {model.family} are not known here",
        reason="UnknownArchitecture",
        remedy="leave --engine out: the plain reckoning holds for any engine that keeps "
        "windows and states apart",
    )
