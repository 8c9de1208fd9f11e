"""The whole of it: a model and the limits that it serves, and memory for both tiers."""

from __future__ import annotations

from dataclasses import dataclass

from hostprep.api.schema import pool_schema
from hostprep.api.slot_layout import SlotLayout
from hostprep.errors import BadInputError
from hostprep.layout import ATTENTION, RECURRENT, Group
from hostprep.sizing.groups import (
    CacheGroup,
    Limits,
    Tier,
    floor_of,
    groups_of,
    tier_of_bytes,
    tier_of_tokens,
)
from hostprep.sizing.model import Model


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """What there is, or is wanted, on each rank.

    Raises BadInputError where both of the host's are set.
    """

    gpu_bytes: int | None = None
    host_bytes: int | None = None
    host_tokens: int | None = None

    def __post_init__(self) -> None:
        if self.host_bytes is not None and self.host_tokens is not None:
            raise BadInputError(
                "--host-memory and --host-tokens exclude each other", remedy="give one of them"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizing:
    """What a model takes on one rank."""

    model: Model
    limits: Limits
    groups: tuple[CacheGroup, ...]
    smallest: Tier
    """Serves the longest request, one at a time: with less, nothing works."""
    floor: Tier
    """Serves `max_batch_size` requests without any of them waiting for ever."""
    gpu: Tier | None
    host: Tier
    layout: SlotLayout
    """Of the host tier: what a region of it holds where."""
    notes: tuple[str, ...] = ()


def size_model(model: Model, limits: Limits, memory: Memory) -> Sizing:
    """Return both tiers' groups, slots and bytes on the fullest rank.

    The host tier has the floor too: what the scheduler pauses must fit into it as a whole.
    Raises BadInputError naming the option for limits that no memory satisfies, or too little of
    it.
    """
    groups = groups_of(model, limits)
    if len(groups) > (most := pool_schema("spec.sizing.groups")["maxItems"]):
        raise BadInputError(
            f"{model.name}: has {len(groups)} groups, and {most} can be",
            remedy="give another model",
        )
    gpu = None
    if memory.gpu_bytes is not None:
        gpu = tier_of_bytes(groups, limits, memory.gpu_bytes, option="--gpu-memory")
    host = _host(groups, limits, memory)
    return Sizing(
        model=model,
        limits=limits,
        groups=groups,
        smallest=floor_of(groups, limits.for_batch(1)),
        floor=floor_of(groups, limits),
        gpu=gpu,
        host=host,
        layout=slot_layout(host, limits, model.name),
        notes=(*model.notes, *_notes(model, limits)),
    )


def _host(groups: tuple[CacheGroup, ...], limits: Limits, memory: Memory) -> Tier:
    if memory.host_bytes is not None:
        return tier_of_bytes(
            groups, limits, memory.host_bytes, option="--host-memory", has_directory=True
        )
    if memory.host_tokens is not None:
        return tier_of_tokens(groups, limits, memory.host_tokens, has_directory=True)
    return floor_of(groups, limits, has_directory=True)


def slot_layout(tier: Tier, limits: Limits, name: str) -> SlotLayout:
    """Return the layout of a region that holds the tier. Raises BadInputError."""
    return SlotLayout.of(
        [
            Group(
                name=sized.group.name,
                slot_bytes=sized.group.slot_bytes,
                slots=sized.slots,
                window_tokens=sized.group.window,
                kind=RECURRENT if sized.group.per_sequence else ATTENTION,
            )
            for sized in tier.groups
        ],
        min_slots=[sized.min_slots for sized in tier.groups],
        tokens_per_block=limits.tokens_per_block,
        model=name,
        has_directory=tier.has_directory,
    )


def _notes(model: Model, limits: Limits) -> tuple[str, ...]:
    notes = []
    windows = {store.window for store in model.stores if store.window is not None}
    for window in sorted(windows):
        if window >= limits.max_seq_len:
            notes.append(
                f"the window of {window} never closes within {limits.max_seq_len} tokens: "
                "its layers keep all of them"
            )
    if model.max_positions is not None and limits.max_seq_len > model.max_positions:
        notes.append(
            f"the model was made for {model.max_positions} tokens, and {limits.max_seq_len} "
            "are to be served"
        )
    return tuple(notes)
