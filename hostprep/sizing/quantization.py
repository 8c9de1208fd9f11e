"""What a checkpoint declares of its types: `dtype`, and the KV cache of its quantization."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from hostprep.sizing.config import ModelConfig, printable
from hostprep.sizing.dtypes import AUTO, DTYPES, DType, dtype_named

_ALGORITHMS = {"fp8": "fp8", "nvfp4": "nvfp4"}
"""ModelOpt's kv_cache_quant_algo. Source: vLLM 0.32, utils/torch_utils.py,
MODELOPT_TO_VLLM_KV_CACHE_DTYPE_MAP; what is not in it vLLM ignores with a warning."""
_SCHEMES = {("float", 8): "fp8", ("float", 4): "nvfp4"}
"""kv_cache_scheme of compressed-tensors and ModelOpt: type and bits. Source: the same file, and
compressed_tensors.py, validate_kv_cache_scheme."""
_DEFAULT = "bfloat16"
_DEEPEST = 4


def declared_model_dtype(config: ModelConfig) -> DType:
    """Return the model's published type. Raises BadInputError for one that is not known."""
    names = [key for key in ("dtype", "torch_dtype") if config.says(key)]
    found = [dtype_named(config.text(key), field=f"{config.source}: {key}") for key in names]
    if len(set(found)) > 1:
        raise config.wrong("dtype", "and torch_dtype contradict each other")
    return found[0] if found else DTYPES[_DEFAULT]


def declared_state_dtype(config: ModelConfig) -> DType | None:
    """Return what the config says that recurrent states are kept in; None if nothing."""
    found = {}
    for key in ("mamba_ssm_dtype", "mamba_ssm_cache_dtype"):
        if config.text(key, AUTO) != AUTO:
            found[key] = dtype_named(config.text(key), field=f"{config.source}: {key}")
    if len(set(found.values())) > 1:
        raise config.wrong("mamba_ssm_dtype", "and mamba_ssm_cache_dtype contradict each other")
    return next(iter(found.values()), None)


def declared_kv_dtype(config: ModelConfig) -> DType | None:
    """Return the type of the KV cache that the checkpoint's quantization declares; None for none.

    Read from `quantization_config` and from hf_quant_config.json: ModelOpt's `kv_cache_quant_algo`
    and the `kv_cache_scheme` of compressed-tensors. Raises BadInputError for one that is not known,
    and where the two files contradict each other.
    """
    found: dict[str, DType | None] = {}
    told: list[str] = []
    for key in ("quantization_config", "hf_quant_config"):
        held = config.value(key)
        if held is None:
            continue
        if not isinstance(held, dict):
            raise config.wrong(key, "is no object")
        said = [
            (path, dtype)
            for path, value in _kv_fields(held, key, 0)
            if (dtype := _kv_dtype(config, path, value)) is not None
        ]
        if len({dtype for _, dtype in said}) > 1:
            raise config.wrong(f"{said[0][0]} and {said[1][0]}", "contradict each other")
        found[key] = said[0][1] if said else None
        told.append(said[0][0] if said else key)
    if len(set(found.values())) > 1:
        # vLLM looks at the first alone where both are there, others at the second.
        raise config.wrong(
            " and ".join(told),
            "do not say the same of the KV cache, and engines differ in which they follow",
            "give --kv-dtype as your engine has it",
        )
    return next(iter(found.values()), None)


def is_modelopt(config: ModelConfig) -> bool:
    """Whether ModelOpt quantized the checkpoint: by a file of its own, or as config.json says."""
    held = config.value("quantization_config")
    method = held.get("quant_method") if isinstance(held, dict) else None
    return config.value("hf_quant_config") is not None or str(method).startswith("modelopt")


def _kv_fields(held: Mapping[str, Any], path: str, depth: int) -> Iterator[tuple[str, Any]]:
    """Yield what speaks of the KV cache, wherever it lies."""
    for key, value in held.items():
        if "kv_cache" in key.lower():
            yield printable(f"{path}.{key}"), value
        elif isinstance(value, dict) and depth < _DEEPEST:
            yield from _kv_fields(value, f"{path}.{key}", depth + 1)


def _kv_dtype(config: ModelConfig, path: str, value: Any) -> DType | None:
    if value is None or value in ("", "none", "None", "auto", False) or value in ([], {}):
        return None
    name = None
    if isinstance(value, str):
        name = _ALGORITHMS.get(value.lower())
    elif isinstance(value, dict) and not value.get("dynamic"):
        kind, bits = value.get("type"), value.get("num_bits")
        if isinstance(kind, str) and isinstance(bits, int):
            name = _SCHEMES.get((kind, bits))
    if name is None:
        raise config.unknown(
            printable(path), "is a KV cache's quantization that is not known", "choose --kv-dtype"
        )
    return DTYPES[name]
