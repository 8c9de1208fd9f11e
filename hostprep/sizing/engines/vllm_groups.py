"""From a model's layers to the groups that vLLM 0.32.0 gives blocks together.

Each layer's cache becomes a page of so many tokens; layers with equal ones share groups. Sources:
platforms/interface.py (states), v1/core/kv_cache_utils.py (groups), distributed/utils.py (stages),
models/deepseek_v4 and v1/attention/backends/mla (DeepSeek-V4's pages).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, replace

from hostprep.api.slot_layout import round_up
from hostprep.errors import BadInputError
from hostprep.sizing.groups import Limits
from hostprep.sizing.model import Kind, Model, Store

KERNEL_TOKENS = 16
"""Blocks of FlashAttention, FlashInfer and Triton are multiples of it (v1/attention/backends)."""
V4_TOKENS = 256
"""A block of DeepSeek-V4's compressed entries and index keys (mla/indexer.py)."""
_HYBRID_LATENT_TOKENS = 128
"""Blocks of latents beside states are multiples of it (platforms/interface.py)."""
_MANY_MORE_LAYERS = 1.5
"""Groups have as many layers as the largest kind, unless that has at least so many times the
layers of the smallest kind: then as many as the smallest (_get_kv_cache_groups_uniform_page_size).
"""
_KEEPS_ALL = frozenset({Kind.FULL, Kind.LATENT, Kind.INDEX, Kind.COMPRESSED})
_LATENTS = frozenset({Kind.LATENT, Kind.INDEX, Kind.COMPRESSED, Kind.COMPRESSOR})
_V4_WINDOW_TOKENS = 64
_V4_STATE_TOKENS = {4: 4, 128: 8}
"""By the tokens that become one entry: of a block of the compressor's sums (compressor.py)."""
_V4_ALIGN_BYTES = 576
"""Of each page, as FlashMLA reads them (models/deepseek_v4/attention.py)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Spec:
    """What vLLM notes of one layer's cache: layers with equal ones can share a group."""

    kind: Kind
    shape: Hashable
    """Heads, elements and types on a rank: layers of another shape are another kind to vLLM."""
    page_bytes: int
    """Of one layer and block, padding included."""
    tokens: int
    """Of a block; 0 for a state."""
    window: int | None = None
    """Tokens that are kept; with chunks, those of one."""


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer's cache. `stage`: of the pipeline."""

    stage: int
    spec: Spec


@dataclass(frozen=True, slots=True)
class Group:
    """Layers whose blocks are taken together."""

    layers: tuple[Layer, ...]

    @property
    def first(self) -> Spec:
        """What one of its layers has: blocks and requests are the same for all of them."""
        return self.layers[0].spec

    def stage_bytes(self, stage: int) -> int:
        """Return the bytes of a block of it in one pipeline stage."""
        return sum(layer.spec.page_bytes for layer in self.layers if layer.stage == stage)


def _stage_of_layers(count: int, stages: int) -> list[int]:
    """Return each layer's stage: the last has none of what is left over (distributed/utils.py)."""
    sizes = [count // stages] * stages
    for number in range(count % stages):
        sizes[-2 - number] += 1
    return [stage for stage, size in enumerate(sizes) for _ in range(size)]


def layers_of(model: Model, limits: Limits) -> tuple[list[Layer], list[str]]:
    """Return every layer's cache with its block size, and what is to be said of it."""
    stages = _stage_of_layers(len(model.layers), limits.pipeline_parallel)
    stores = [
        (stage, store) for stage, layer in zip(stages, model.layers, strict=True) for store in layer
    ]
    last = limits.pipeline_parallel - 1
    stores += [(last, store) for layer in model.draft_layers for store in layer]
    if any(store.kind is Kind.COMPRESSED for _, store in stores):
        found = [(stage, spec) for stage, one in stores for spec in _v4_specs(one, limits)]
        return [Layer(stage, spec) for stage, spec in found], []
    block, page_bytes = _aligned([store for _, store in stores], limits)
    notes = []
    if block != limits.tokens_per_block:
        notes.append(
            f"vLLM makes blocks of {block} tokens, and not of {limits.tokens_per_block}, so that "
            "one is as large as a state"
        )
    specs = [(stage, _spec(store, block, page_bytes, limits)) for stage, store in stores]
    if limits.speculative_tokens and any(spec.kind is Kind.CHUNK for _, spec in specs):
        notes.append("with drafts vLLM keeps chunked layers as if they were full")
        specs = [
            (stage, replace(spec, kind=Kind.FULL, window=None) if spec.kind is Kind.CHUNK else spec)
            for stage, spec in specs
        ]
    return [Layer(stage, spec) for stage, spec in specs], notes


def _spec(store: Store, block: int, state_page_bytes: int, limits: Limits) -> Spec:
    entry = store.rank_bytes(limits.tensor_parallel)
    return Spec(
        kind=store.kind,
        shape=_shape(store, limits),
        page_bytes=max(entry, state_page_bytes) if store.per_sequence else entry * block,
        tokens=0 if store.per_sequence else block,
        window=store.window,
    )


def _shape(store: Store, limits: Limits) -> Hashable:
    ranks = limits.tensor_parallel
    return tuple((part.heads_on_rank(ranks), part.elements, part.dtype) for part in store.parts)


def _aligned(stores: Sequence[Store], limits: Limits) -> tuple[int, int]:
    """Return the tokens of a block, and what a state's page is padded to; 0 for no padding.

    Where states and attention share a pool, a block has as many tokens as make it no smaller than
    a state (platforms/interface.py, _align_hybrid_block_size).
    """
    ranks, given = limits.tensor_parallel, limits.tokens_per_block
    state = max((s.rank_bytes(ranks) for s in stores if s.per_sequence), default=0)
    token = max((s.rank_bytes(ranks) for s in stores if not s.per_sequence), default=0)
    if not state or not token:
        return given, 0
    step = max(KERNEL_TOKENS, given)
    if any(store.kind is Kind.LATENT for store in stores):
        step = max(step, _HYBRID_LATENT_TOKENS)
    block = max(given, step * -(-state // (step * token)))
    return block, block * token


def _v4_specs(store: Store, limits: Limits) -> Iterable[Spec]:
    """Return DeepSeek-V4's pages: each kind has blocks of its own tokens, padded for FlashMLA."""
    ranks = limits.tensor_parallel
    if store.kind is Kind.COMPRESSOR:
        for part in store.parts:
            ratio = next((r for r in _V4_STATE_TOKENS if part.heads in (r, 2 * r)), None)
            if ratio is None:
                raise BadInputError(
                    f"compressor states of {part.heads} tokens are not known here",
                    reason="UnknownEngineRule",
                    remedy="leave --engine out: groups and floors hold for every engine",
                )
            tokens = _V4_STATE_TOKENS[ratio]
            page = tokens * part.dtype.size_bytes(part.elements)
            yield _v4_spec(store.kind, part.elements, page, tokens, part.heads)
        return
    tokens = V4_TOKENS if store.window is None else _V4_WINDOW_TOKENS
    page = tokens // store.ratio * store.rank_bytes(ranks)
    yield _v4_spec(store.kind, _shape(store, limits), page, tokens, store.window)


def _v4_spec(kind: Kind, shape: Hashable, page: int, tokens: int, window: int | None) -> Spec:
    aligned = round_up(page, _V4_ALIGN_BYTES)
    return Spec(kind=kind, shape=shape, page_bytes=aligned, tokens=tokens, window=window)


def grouped(layers: Sequence[Layer]) -> list[Group]:
    """Return the groups that vLLM makes (get_kv_cache_groups). Raises BadInputError."""
    specs = [layer.spec for layer in layers]
    if len(set(specs)) == 1 or _is_one_type(specs):
        return [Group(tuple(layers))]
    if any(spec.kind is Kind.COMPRESSED for spec in specs):
        return _packed(layers)
    buckets: dict[Spec, list[Layer]] = {}
    for layer in _of_one_page(layers):
        buckets.setdefault(layer.spec, []).append(layer)
    counts = [len(bucket) for bucket in buckets.values()]
    size = max(counts) if max(counts) < min(counts) * _MANY_MORE_LAYERS else min(counts)
    return [
        group for bucket in buckets.values() for group in _dealt(bucket, -(-len(bucket) // size))
    ]


def _dealt(layers: Sequence[Layer], number: int) -> list[Group]:
    """Deal layers out to so many groups, so that each pipeline stage has some of each."""
    return [Group(tuple(layers[index::number])) for index in range(number)]


def _is_one_type(specs: Sequence[Spec]) -> bool:
    """Whether all layers need blocks for the same tokens, of any size (is_uniform_type)."""
    first = specs[0]
    if len({spec.tokens for spec in specs}) > 1:
        return False
    if all(spec.kind in _KEEPS_ALL for spec in specs):
        return True
    if any(spec.kind is not first.kind for spec in specs):
        return False
    if first.kind is Kind.STATE:
        return len({spec.page_bytes for spec in specs}) == 1
    return len({spec.window for spec in specs}) == 1


def _of_one_page(layers: Sequence[Layer]) -> list[Layer]:
    """Make pages equally large (unify_kv_cache_spec_page_size).

    A smaller page gets more tokens where that comes out even, else padding; a state padding.
    Raises BadInputError for latents, whose pages vLLM does not pad.
    """
    page = max(layer.spec.page_bytes for layer in layers)
    made = []
    for layer in layers:
        spec = layer.spec
        if spec.page_bytes != page and spec.tokens and page % spec.page_bytes == 0:
            spec = replace(spec, tokens=spec.tokens * (page // spec.page_bytes))
        elif spec.page_bytes != page and spec.kind in _LATENTS:
            raise BadInputError(
                f"latents of {spec.page_bytes} bytes a block do not go into pages of {page}, and "
                "how vLLM lays them out then is not known here",
                reason="UnknownEngineRule",
                remedy="leave --engine out: groups and floors hold for every engine",
            )
        made.append(Layer(layer.stage, replace(spec, page_bytes=page)))
    return made


def _packed(layers: Sequence[Layer]) -> list[Group]:
    """Group pages of several sizes side by side in a block (_get_packed_kv_cache_groups).

    Layers of one type (`_is_one_type`) are a bucket. A bucket with as many layers of each of its
    page sizes repeats a pattern; such buckets are divided into groups of about as many repeats as
    the largest of those with several page sizes has. Others stay whole.
    """
    buckets: list[list[Layer]] = []
    for layer in layers:
        for bucket in buckets:
            if _is_one_type([*(known.spec for known in bucket), layer.spec]):
                bucket.append(layer)
                break
        else:
            buckets.append([layer])
    pages = [Counter(layer.spec.page_bytes for layer in bucket) for bucket in buckets]
    balanced = [len(set(count.values())) == 1 for count in pages]
    least = [
        max(c.values()) for c, even in zip(pages, balanced, strict=True) if even and len(c) > 1
    ]
    if not least:
        return [Group(tuple(bucket)) for bucket in buckets]
    repeats = _least_padding(
        [max(c.values()) for c, even in zip(pages, balanced, strict=True) if even], max(least)
    )
    groups = []
    for bucket, count, even in zip(buckets, pages, balanced, strict=True):
        number = -(-max(count.values()) // repeats) if even else 1
        by_page = [[la for la in bucket if la.spec.page_bytes == page] for page in count]
        for index in range(number):
            chosen = tuple(layer for same in by_page for layer in same[index::number])
            groups.append(Group(chosen if number > 1 else tuple(bucket)))
    return groups


def _least_padding(counts: Sequence[int], least: int) -> int:
    """Return the size, from `least` on, whose multiples pad the counts least; the largest such."""
    return min(
        range(least, max(*counts, least) + 1),
        key=lambda size: (sum(-count % size for count in counts), -size),
    )
