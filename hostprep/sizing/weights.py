"""A model's weights: how many bytes, and how many of them on one rank.

From the tensors' own sizes where safetensors files are there, from their index, or reckoned from
config.json for kinds of models whose every tensor is known. What a rank gets is an estimate
between two bounds, for engines differ in what they keep on every rank.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from hostprep.errors import BadInputError
from hostprep.units import format_bytes

MAX_HEADER_BYTES = 100_000_000
"""What the format allows a file's header. Source: safetensors, src/tensor.rs, MAX_HEADER_SIZE."""
MAX_INDEX_BYTES = 64 << 20
"""Kimi-K2's, with 384 experts in 61 layers, has 9 MiB."""
_MOST_BYTES = 1 << 60
_MOST_DIMS = 16
_FULL_CHECKPOINT = "download the model's files again, or give --weights"


@dataclass(frozen=True, slots=True)
class Tensor:
    """One tensor of a checkpoint, or several alike."""

    name: str
    size_bytes: int
    dims: int
    """Number of dimensions: those with one are never divided."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankWeights:
    """The weights of the fullest rank."""

    total_bytes: int
    """Of the whole model, drafting layers that are not used left out."""
    rank_bytes: int
    """An estimate: what is known to be kept by every rank is, all else is divided."""
    least_bytes: int
    """If everything were divided evenly."""
    most_bytes: int
    """If every tensor of unknown kind were kept whole by every rank."""
    source: str
    """Where the sizes are from, in words."""


_ELEMENT_BITS = {
    "BOOL": 8, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8,
    "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8, "I16": 16, "U16": 16, "F16": 16, "BF16": 16,
    "I32": 32, "U32": 32, "F32": 32, "C64": 64, "F64": 64, "I64": 64, "U64": 64,
}  # fmt: skip
"""Source: safetensors 0.7, src/tensor.rs, Dtype."""


def read_header(data: bytes, *, source: str, tensor_bytes: int) -> tuple[Tensor, ...]:
    """Return the tensors that a safetensors file's header lists.

    `tensor_bytes`: of the file, behind its header. Raises BadInputError where it is none, or says
    what cannot be: the tensors lie one behind the other, fill the file, and each takes what its
    type and shape say (src/tensor.rs, Metadata::validate).
    """
    document = _document(data, source)
    found, places = [], []
    for name, entry in document.items():
        if name == "__metadata__":
            continue
        shape = _numbers(entry, "shape")
        offsets = _numbers(entry, "data_offsets")
        if shape is None or offsets is None or len(offsets) != 2:
            raise _no_checkpoint(source, f"lists {name[:60]!r} without a shape and offsets")
        begin, end = offsets
        if not begin <= end <= _MOST_BYTES:
            raise _no_checkpoint(source, f"has offsets of {name[:60]!r} that cannot be")
        dtype = str(entry.get("dtype"))[:20]
        if dtype not in _ELEMENT_BITS:
            raise _no_checkpoint(source, f"has {name[:60]!r} of type {dtype!r}, which is not known")
        if end - begin != (wanted := size_of(shape, _ELEMENT_BITS[dtype])):
            why = f"has {end - begin} bytes for {name[:60]!r}, of which its shape makes {wanted}"
            raise _no_checkpoint(source, why)
        found.append(Tensor(name, end - begin, len(shape)))
        places.append((begin, end, name))
    last = 0
    for begin, end, name in sorted(places):
        if begin != last:
            raise _no_checkpoint(source, f"has {name[:60]!r} at {begin}, and not at {last}")
        last = end
    if last != tensor_bytes:
        raise _no_checkpoint(source, f"has {tensor_bytes} bytes of tensors, and lists {last}")
    return tuple(found)


_MOST_APART = 2
"""How many times more or less than what is reckoned a sum can be: encoders and drafting layers are
not reckoned for every kind of model, and some tensors are quantized where others are not."""


def check_total(total_bytes: int, reckoned: RankWeights, *, source: str) -> None:
    """Raise BadInputError where an index's sum contradicts what config.json makes of it."""
    least, most = sorted((total_bytes, reckoned.total_bytes))
    if most > least * _MOST_APART:
        raise BadInputError(
            f"{source}: says that the weights have {format_bytes(total_bytes)}, and config.json "
            f"makes {format_bytes(reckoned.total_bytes)}",
            remedy=_FULL_CHECKPOINT,
        )


def _numbers(entry: Any, key: str) -> list[int] | None:
    value = entry.get(key) if isinstance(entry, dict) else None
    if not isinstance(value, list) or len(value) > _MOST_DIMS:
        return None
    return value if all(type(item) is int and 0 <= item <= _MOST_BYTES for item in value) else None


@dataclass(frozen=True, slots=True)
class WeightIndex:
    """model.safetensors.index.json."""

    total_bytes: int | None
    """As its metadata says; None where they do not."""
    files: tuple[str, ...]
    """Names of the files beside it."""


def read_index(data: bytes, *, source: str) -> WeightIndex:
    """Read an index. Raises BadInputError where it is none, or names files elsewhere."""
    document = _document(data, source)
    weight_map = document.get("weight_map")
    if not isinstance(weight_map, dict):
        raise _no_checkpoint(source, "has no weight_map")
    files = sorted({str(file) for file in weight_map.values()})
    strange = next((file for file in files if "/" in file or file in ("", ".", "..")), None)
    if strange is not None:
        raise _no_checkpoint(source, f"names a file {strange[:60]!r} that is not beside it")
    metadata = document.get("metadata")
    total = metadata.get("total_size") if isinstance(metadata, dict) else None
    if isinstance(total, float) and total.is_integer():  # DeepSeek-V3's has a fraction of 0
        total = int(total)
    if type(total) is not int or not 0 < total <= _MOST_BYTES:
        total = None
    return WeightIndex(total, tuple(files))


def _document(data: bytes, source: str) -> dict[str, Any]:
    try:
        document = json.loads(data.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        why = " ".join(str(error).split())[:120]
        raise _no_checkpoint(source, f"is not JSON that can be used: {why}") from error
    if not isinstance(document, dict):
        raise _no_checkpoint(source, "holds no object")
    return document


def _no_checkpoint(source: str, why: str) -> BadInputError:
    return BadInputError(f"{source}: {why}", remedy=_FULL_CHECKPOINT)


_LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks)\.([0-9]{1,5})\.", re.ASCII)
_NOT_TEXT = re.compile(r"(?:^|\.)(?:visual|vision\w*|audio\w*|speech\w*|multi_modal\w*|mm_\w+|"
                       r"embed_vision|embed_audio|connector|aligner)\.")  # fmt: skip
_DRAFT = re.compile(r"(?:^|\.)(?:mtp|nextn|eagle|medusa)\w*\.")
_EMBEDDING = re.compile(
    r"(?:^|\.)(?:embed_tokens|wte|word_embeddings|embeddings?|tok_embeddings)\."
)
_EVERY_RANK = re.compile(
    r"norm|(?:^|\.)ln_|layernorm|router|indexer|compressor|\.gate\.|shared_expert_gate|"
    r"kv_a_proj|q_a_proj|wkv_a|e_score|correction_bias|per_layer_(?:model_)?projection|"
    r"input_scale|k_scale|v_scale|weight_scale_2"
)
"""Kept whole by every rank: norms, routers, the projections down to MLA's latents, indexers,
scales of a whole tensor. Sources: vLLM 0.32, models with ReplicatedLinear (deepseek_v2.py,
qwen3_moe.py, gemma3n.py); SGLang 0.5.23, the same names."""
_KEY_VALUE = re.compile(r"\.(?:k_proj|v_proj|wk|wv|k|v)\.(?:weight|bias)")
"""Each rank has a head at least."""
_DIVIDED = re.compile(
    r"proj|embed|wte|lm_head|output|experts?\b|\.w[123qkvo]\.|qkv|dense|fc[12]|c_attn|c_proj|"
    r"conv1d|A_log|dt_bias|\.D$|linear|attn|mlp"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Division:
    """Among what ranks weights are divided."""

    layers: int
    """Of the model, those that draft aside."""
    kv_heads: int
    tensor_parallel: int
    pipeline_parallel: int
    drafts: bool
    """Whether drafting layers are loaded: what a checkpoint has beyond `layers`."""

    @property
    def ranks(self) -> int:
        """All of them."""
        return self.tensor_parallel * self.pipeline_parallel


def divide(tensors: Iterable[Tensor], by: Division, *, source: str) -> RankWeights:
    """Return what the fullest of all ranks holds.

    Pipeline stages hold adjacent layers, the first ones one more where it does not come out even;
    the first holds the embeddings and what sees and hears as well, the last the output's weights
    and the drafting layers.
    """
    stages = [0] * by.pipeline_parallel
    most = [0] * by.pipeline_parallel
    total = 0
    last = by.pipeline_parallel - 1
    for tensor in tensors:
        stage = _stage_of(tensor.name, by.layers, by.pipeline_parallel)
        if stage is None:
            if not by.drafts:
                continue
            stage = last
        total += tensor.size_bytes
        ranks, is_known = _ranks_of(tensor, by)
        stages[stage] += -(-tensor.size_bytes // ranks)
        most[stage] += -(-tensor.size_bytes // (ranks if is_known else 1))
    return RankWeights(
        total_bytes=total,
        rank_bytes=max(stages),
        least_bytes=-(-total // by.ranks),
        most_bytes=max(most),
        source=source,
    )


def _stage_of(name: str, layers: int, stages: int) -> int | None:
    """Return the pipeline stage that holds a tensor; None for one of a drafting layer."""
    if _DRAFT.search(name):
        return None
    layer = _LAYER.search(name)
    if _NOT_TEXT.search(name) or (layer is None and _EMBEDDING.search(name)):
        return 0
    if layer is None:
        return stages - 1
    index = int(layer[1])
    if index >= layers:
        return None
    each, more = divmod(layers, stages)
    longer = more * (each + 1)
    return index // (each + 1) if index < longer else more + (index - longer) // each


def _ranks_of(tensor: Tensor, by: Division) -> tuple[int, bool]:
    """Return among how many ranks a tensor is divided, and whether that is known."""
    if by.tensor_parallel == 1:
        return 1, True
    if tensor.dims < 2 or _EVERY_RANK.search(tensor.name):
        return 1, True
    if _KEY_VALUE.search(tensor.name) and not _NOT_TEXT.search(tensor.name):
        return min(by.tensor_parallel, by.kv_heads), True
    return by.tensor_parallel, _DIVIDED.search(tensor.name) is not None


def divide_total(
    total_bytes: int, by: Division, *, source: str, alike: RankWeights | None = None
) -> RankWeights:
    """Return a rank's part where only the sum is known.

    `alike`: the same model's weights, reckoned: what every rank keeps is in the same proportion.
    """
    even = -(-total_bytes // by.ranks)
    rank = most = even
    if alike is not None and alike.total_bytes:
        rank = max(even, -(-total_bytes * alike.rank_bytes // alike.total_bytes))
        most = max(rank, -(-total_bytes * alike.most_bytes // alike.total_bytes))
    return RankWeights(
        total_bytes=total_bytes, rank_bytes=rank, least_bytes=even, most_bytes=most, source=source
    )


def size_of(shape: Sequence[int], bits: int) -> int:
    """Return the bytes of a tensor, rounded up."""
    return -(-prod(shape) * bits // 8)


def unknown_weights(source: str, why: str) -> BadInputError:
    """Return the error for weights that config.json does not tell, asking for --weights."""
    return BadInputError(
        f"{source}: the size of the weights cannot be reckoned: {why}",
        reason="UnknownWeights",
        remedy="give the model's folder with model.safetensors.index.json, or --weights "
        "with their bytes",
    )
