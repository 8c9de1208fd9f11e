"""How many bytes the elements of a cache take, scales included."""

from __future__ import annotations

from dataclasses import dataclass

from hostprep.errors import BadInputError

__all__ = ["AUTO", "DTYPES", "DType", "dtype_named"]

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
