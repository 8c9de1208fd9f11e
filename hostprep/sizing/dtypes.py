"""Data types of caches: what an element takes, and what `auto` means for a checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from hostprep.errors import BadInputError

AUTO = "auto"


@dataclass(frozen=True, slots=True)
class DType:
    """A data type, and the scales that are kept beside its elements."""

    name: str
    bits: int
    scale_bytes: int = 0
    scale_elements: int = 0
    """Elements that share a scale; 0 with `scale_bytes`: all of one head and token."""

    def size_bytes(self, elements: int) -> int:
        """Return the bytes of one vector: a head's elements for one token."""
        plain = -(-elements * self.bits // 8)
        if not self.scale_bytes:
            return plain
        scales = -(-elements // self.scale_elements) if self.scale_elements else 1
        return plain + scales * self.scale_bytes


_ALL = (
    DType("float32", 32),
    DType("bfloat16", 16),
    DType("float16", 16),
    # A scale for each tensor or head, not for each token: nothing that grows with the cache.
    # Source: vLLM, docs/features/quantization/quantized_kvcache.
    DType("fp8", 8),
    DType("int8", 8),
    # vLLM's kv_cache_dtype *_per_token_head: a float32 scale for each token and head.
    DType("fp8_per_token_head", 8, 4),
    DType("int8_per_token_head", 8, 4),
    # One FP8 scale for 16 elements. Source: NVIDIA, NVFP4 KV cache (TensorRT-LLM, features/
    # quantization).
    DType("nvfp4", 4, 1, 16),
    # A float32 scale for 128 elements: DeepSeek's index keys (128 + 4 bytes), and the part
    # without positions of its FP8 latents (512 + 16 bytes).
    DType("fp8_block128", 8, 4, 128),
    # Blocks of 32 elements with a float16 scale. Source: llama.cpp, ggml-common.h.
    DType("q8_0", 8, 2, 32),
    DType("q4_0", 4, 2, 32),
)
DTYPES = {dtype.name: dtype for dtype in _ALL}
"""Data types by name, `fp8_ds_mla` aside, which is a way to store whole latents."""
_ALIASES = {"bf16": "bfloat16", "fp16": "float16", "half": "float16", "float": "float32"}
_ALIASES |= {"fp32": "float32", "fp8_e4m3": "fp8", "fp8_e5m2": "fp8"}

DS_MLA = "fp8_ds_mla"
"""DeepSeek's own way to store latents in FP8: the part with positions stays in 16 bits."""


def dtype_named(name: str, *, field: str) -> DType:
    """Return the data type. Raises BadInputError, naming the field, where it is not known."""
    plain = name.removeprefix("torch.").lower()
    found = DTYPES.get(_ALIASES.get(plain, plain))
    if found is None:
        shown = name if len(name) <= 40 else name[:37] + "..."
        raise BadInputError(
            f"{field}: there is no data type {shown!r}", remedy=f"choose from {', '.join(DTYPES)}"
        )
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class TypeChoice:
    """The engine's data type options; `auto` leaves it to the model.

    Raises BadInputError, naming the option, for a data type that is not known.
    """

    kv: str = AUTO
    index: str = AUTO
    """Of the keys that sparse attention selects tokens by."""
    state: str = AUTO
    """Of recurrent states."""

    def __post_init__(self) -> None:
        if self.kv not in (AUTO, DS_MLA):
            dtype_named(self.kv, field="--kv-dtype")
        for name, option in ((self.index, "--index-dtype"), (self.state, "--state-dtype")):
            if name != AUTO:
                dtype_named(name, field=option)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeclaredTypes:
    """What a checkpoint says of its types, and which kinds of caches its family has."""

    family: str
    model: DType
    """`dtype` or `torch_dtype`, as published."""
    kv: DType | None = None
    """What the checkpoint's quantization says of its KV cache; None where it says nothing."""
    state: DType | None = None
    """`mamba_ssm_dtype` or `mamba_ssm_cache_dtype`; None where it says nothing."""
    is_latent: bool = False
    """Layers keep one latent vector in place of keys and values."""
    has_index: bool = False
    """Some layers keep index keys of sparse attention."""
    is_compressed: bool = False
    """As DeepSeek-V4 does."""
    index_is_plain: bool = False
    """Index keys have the model's type and no scales: MiniMax-M3."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheTypes:
    """The data types that a model's caches have."""

    model: DType
    """What activations are computed in: convolutions' inputs have it."""
    kv: DType
    index: DType
    state: DType
    ds_mla: bool = False
    """Latents are stored as `fp8_ds_mla`; `kv` then counts for other layers only."""
    notes: tuple[str, ...] = ()
    """What `auto` became and why, one sentence each."""


Resolver = Callable[[DeclaredTypes, TypeChoice], CacheTypes]
"""How an engine turns what a checkpoint declares and what is chosen into types."""


def resolve_types(declared: DeclaredTypes, choice: TypeChoice) -> CacheTypes:
    """Return the types where no engine is named.

    Engines differ in `auto`; an engine's own rules may resolve it otherwise. Here:

    - The model's type: the published one; float32 is computed in bfloat16 (vLLM 0.32,
      config/model.py, _resolve_auto_dtype; SGLang and TensorRT-LLM do likewise).
    - Keys and values: what the checkpoint's quantization says (vLLM 0.32, utils/torch_utils.py,
      resolve_kv_cache_dtype_string; attention.py for compressed-tensors), else the model's type.
    - Latents of models with an indexer (DeepSeek-V3.2, GLM-5), and DeepSeek-V4: `fp8_ds_mla`,
      also where FP8 is chosen or declared (vLLM's DeepSeek-V3.2 recipe; mla_attention.py,
      _canonicalize_sparse_mla_kv_cache_dtype; models/deepseek_v4/attention.py).
    - Index keys: FP8 with a scale for 128 elements whatever the others have (vLLM 0.32,
      DeepseekV32Indexer and DeepseekV4Indexer: 128 + 4 bytes).
    - States: what the config says, else float32, the larger of what engines choose.

    Raises BadInputError for `fp8_ds_mla` without latents.
    """
    notes: list[str] = []
    model = declared.model
    if model.name == "float32":
        model = DTYPES["bfloat16"]
        notes.append("published in float32, which engines compute and cache in bfloat16")
    kv, ds_mla = _resolve_kv(declared, choice.kv, model, notes)
    index = model if declared.index_is_plain else DTYPES["fp8_block128"]
    if choice.index != AUTO:
        index = dtype_named(choice.index, field="--index-dtype")
    elif declared.has_index and not declared.index_is_plain:
        notes.append("index keys are FP8 with a scale (--index-dtype), whatever --kv-dtype says")
    state = declared.state or DTYPES["float32"]
    if choice.state != AUTO:
        state = dtype_named(choice.state, field="--state-dtype")
    return CacheTypes(
        model=model, kv=kv, index=index, state=state, ds_mla=ds_mla, notes=tuple(notes)
    )


def _resolve_kv(
    declared: DeclaredTypes, chosen: str, model: DType, notes: list[str]
) -> tuple[DType, bool]:
    """Return the type of keys and values, and whether latents are stored as `fp8_ds_mla`."""
    fp8 = DTYPES["fp8"]
    packs = declared.is_compressed or (declared.is_latent and declared.has_index)
    if chosen == DS_MLA:
        check_ds_mla(declared)
        return fp8, True
    if chosen != AUTO:
        kv = dtype_named(chosen, field="--kv-dtype")
        if packs and kv is fp8:
            notes.append(f"--kv-dtype {chosen} stores latents as {DS_MLA}, scales included")
            return fp8, True
        return kv, False
    if packs and declared.kv in (None, fp8):
        notes.append(
            f"--kv-dtype auto is {DS_MLA} for these latents; engines on some GPUs keep bfloat16 "
            "then: if yours does, give --kv-dtype bfloat16"
        )
        return fp8, True
    if declared.kv is not None:
        notes.append(f"--kv-dtype auto is {declared.kv.name}: the checkpoint's quantization")
        return declared.kv, False
    return model, False


def check_ds_mla(declared: DeclaredTypes) -> None:
    """Raise BadInputError where `fp8_ds_mla` is chosen for a model without latents."""
    if not declared.is_latent and not declared.is_compressed:
        raise BadInputError(
            f"--kv-dtype: {DS_MLA} is a way to store latents, and {declared.family} has none",
            remedy="choose fp8",
        )
