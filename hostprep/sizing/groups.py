"""From a model's layers to groups: what one slot of each holds on one rank."""

from __future__ import annotations

from dataclasses import dataclass

from hostprep.api.slot_layout import round_up
from hostprep.errors import BadInputError
from hostprep.sizing.limits import Limits
from hostprep.sizing.model import Model, Part, Store

__all__ = ["CacheGroup", "groups_of"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheGroup:
    """Layers that keep the same tokens, and so share slots."""

    name: str
    slot_bytes: int
    """Of one block of tokens (of one state, where it is per sequence), on the fullest rank."""
    layers: int = 1
    """Of the whole model."""
    window: int | None = None
    ratio: int = 1
    per_sequence: bool = False


def groups_of(model: Model, limits: Limits) -> tuple[CacheGroup, ...]:
    """Return the groups of a model, those that keep all tokens first.

    Pipeline stages hold adjacent layers, the first ones one more where it does not come out even
    (torch.tensor_split, which TensorRT-LLM uses). Each group's slot is that of the stage that
    holds most of it: one layout then serves every rank.
    A window that is no shorter than the longest request never closes: all its tokens stay.
    Raises BadInputError naming the option where ranks and heads, or blocks and compression, do
    not go together.
    """
    if limits.pipeline_parallel > len(model.layers):
        raise BadInputError(
            f"--pp: is {limits.pipeline_parallel} for {len(model.layers)} layers",
            remedy="give at most one stage a layer",
        )
    found: dict[tuple[int | None, int, bool], _Found] = {}
    for stage in _stages(model, limits.pipeline_parallel):
        here: dict[tuple[int | None, int, bool], int] = {}
        for store in (store for layer in stage for store in layer):
            key = _key(store, limits)
            here[key] = here.get(key, 0) + _store_bytes(store, limits)
            known = found.setdefault(key, _Found(_name(store, key)))
            known.layers += 1
        for key, size_bytes in here.items():
            found[key].slot_bytes = max(found[key].slot_bytes, size_bytes)
    if not found:
        raise BadInputError(f"{model.name}: no layer has a cache", remedy="give another model")
    return tuple(_group(key, found[key]) for key in sorted(found, key=_order))


@dataclass(slots=True)
class _Found:
    name: str
    layers: int = 0
    slot_bytes: int = 0


def _key(store: Store, limits: Limits) -> tuple[int | None, int, bool]:
    open_ended = store.window is not None and store.window >= limits.max_seq_len
    return (None if open_ended else store.window, store.ratio, store.per_sequence)


def _name(store: Store, key: tuple[int | None, int, bool]) -> str:
    return "full" if store.window is not None and key[0] is None else store.name


def _group(key: tuple[int | None, int, bool], found: _Found) -> CacheGroup:
    window, ratio, per_sequence = key
    return CacheGroup(
        name=found.name,
        slot_bytes=found.slot_bytes,
        layers=found.layers,
        window=window,
        ratio=ratio,
        per_sequence=per_sequence,
    )


def _order(key: tuple[int | None, int, bool]) -> tuple[bool, bool, int, int]:
    window, ratio, per_sequence = key
    return per_sequence, window is not None, ratio, -(window or 0)


def _stages(model: Model, count: int) -> list[tuple[tuple[Store, ...], ...]]:
    each, more = divmod(len(model.layers), count)
    stages, begin = [], 0
    for stage in range(count):
        end = begin + each + (stage < more)
        stages.append(model.layers[begin:end])
        begin = end
    return stages


def _store_bytes(store: Store, limits: Limits) -> int:
    """Return the bytes of one layer's part of a slot, on one rank."""
    entry = sum(_part_bytes(part, limits.tensor_parallel) for part in store.parts)
    if store.per_sequence:
        return entry
    if limits.tokens_per_block % store.ratio:
        raise BadInputError(
            f"--tokens-per-block: is {limits.tokens_per_block}, no multiple of the "
            f"{store.ratio} tokens that become one entry of {store.name}",
            remedy=f"give a multiple of {store.ratio}, such as {round_up(256, store.ratio)}",
        )
    return entry * (limits.tokens_per_block // store.ratio)


def _part_bytes(part: Part, ranks: int) -> int:
    """Return the bytes of one entry, on one rank.

    Heads are dealt out evenly; where there are fewer than ranks, each is kept by several, as in
    vLLM and TensorRT-LLM: max(1, heads / ranks).
    """
    heads = part.heads
    if part.split:
        if heads % ranks and ranks % heads:
            raise BadInputError(
                f"--tp: is {ranks}, which neither divides {heads} ({part.name}) nor is divided",
                remedy="give a number that does",
            )
        heads = max(1, heads // ranks)
    return heads * part.dtype.size_bytes(part.elements)
