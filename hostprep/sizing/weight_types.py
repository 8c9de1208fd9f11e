"""Bytes of a checkpoint's tensors, quantized or not, by what its configuration says.

Sources: the published checkpoints of DeepSeek-V3 and Qwen3 (FP8 in blocks), gpt-oss (MXFP4), and
those that NVIDIA's ModelOpt wrote; vLLM 0.32, model_executor/layers/quantization/modelopt.py.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Mapping
from math import prod
from typing import Any

from hostprep.sizing.weights import size_of, unknown_weights

_FP8_BLOCK = 128
_MXFP4_BLOCK = 32
_NVFP4_BLOCK = 16
_16_BIT = (
    "embed_tokens", "embeddings", "lm_head", ".gate.", "router", "norm", "conv1d", "visual",
    "indexer.weights_proj", "shared_expert_gate", "in_proj_a", "in_proj_b",
)  # fmt: skip
"""Parts of the names of what no way of quantizing changes."""


def tensor_sizes(
    quantization: Any,
    modelopt: Mapping[str, Any] | None,
    is_gpt_oss: bool,
    bits: int,
    source: str,
) -> Callable[[str, tuple[int, ...]], int]:
    """Return what tells a tensor's bytes, its scales included."""
    if quantization is None and modelopt is None:
        return lambda _, shape: size_of(shape, bits)
    if modelopt is not None:
        found = modelopt.get("quantization")
        return _modelopt(found, "exclude_modules", bits, source)
    if not isinstance(quantization, dict):
        raise unknown_weights(source, "quantization_config is no object")
    method = quantization.get("quant_method")
    if method == "modelopt":
        return _modelopt(quantization, "ignore", bits, source)
    kept = _names(quantization, "modules_to_not_convert", source)
    if method == "fp8" and quantization.get("weight_block_size") == [_FP8_BLOCK, _FP8_BLOCK]:
        return lambda name, shape: (
            _fp8(shape) if _is_linear(name, shape, kept) else size_of(shape, bits)
        )
    if method == "mxfp4" and is_gpt_oss:
        return lambda name, shape: (
            size_of(shape, 4) + size_of(shape, 8) // _MXFP4_BLOCK
            if ".experts." in name and len(shape) > 2
            else size_of(shape, bits)
        )
    raise unknown_weights(source, f"quantized in the way {str(method)[:40]!r}")


def _modelopt(
    quantization: Any, key: str, bits: int, source: str
) -> Callable[[str, tuple[int, ...]], int]:
    """Return what tells a tensor's bytes in ModelOpt's checkpoints.

    FP8: a byte, and a float32 scale for a matrix and for its inputs. NVFP4: half a byte, an FP8
    scale for 16 elements and the same two beside. Scales of caches (8 bytes a layer) are not
    counted.
    """
    if not isinstance(quantization, dict):
        raise unknown_weights(source, "hf_quant_config.json has no quantization")
    kept = _names(quantization, key, source)
    algorithm = quantization.get("quant_algo")
    if algorithm not in ("FP8", "NVFP4") or not kept:
        raise unknown_weights(source, f"quantized in the way {str(algorithm)[:40]!r}")
    if algorithm == "NVFP4" and quantization.get("group_size", _NVFP4_BLOCK) != _NVFP4_BLOCK:
        raise unknown_weights(source, "group_size is not 16")
    if any(re.search(r"experts\.[0-9]", name) for name in kept):
        raise unknown_weights(source, "some experts are quantized, and some are not")
    matches = re.compile("|".join(fnmatch.translate(name) for name in kept))

    def size(name: str, shape: tuple[int, ...]) -> int:
        if not _is_linear(name, shape, []) or matches.match(name.rpartition(".")[0]):
            return size_of(shape, bits)
        scalars = 8 * (prod(shape) // (shape[-1] * shape[-2]))
        if algorithm == "FP8":
            return size_of(shape, 8) + scalars
        return size_of(shape, 4) + size_of(shape, 8) // _NVFP4_BLOCK + scalars

    return size


def _names(quantization: Mapping[str, Any], key: str, source: str) -> list[str]:
    names = quantization.get(key) or []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise unknown_weights(source, f"{key} is no list of names")
    return names


def _is_linear(name: str, shape: tuple[int, ...], kept: list[str]) -> bool:
    """Whether FP8 checkpoints store a tensor in 8 bits: what multiplies, routers and ends aside."""
    if len(shape) < 2 or any(part in name for part in _16_BIT):
        return False
    module = name.rpartition(".")[0]
    return not any(module == one or f".{one}." in f".{module}." for one in kept)


def _fp8(shape: tuple[int, ...]) -> int:
    """Return the bytes with a float32 scale for each block of 128 x 128."""
    rows, columns = shape[-2:]
    blocks = -(-rows // _FP8_BLOCK) * -(-columns // _FP8_BLOCK)
    return size_of(shape, 8) + 4 * blocks * (size_of(shape, 8) // (rows * columns))
