"""A model's config.json, read without trust, and the data types of its caches."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hostprep.errors import BadInputError

MAX_CONFIG_BYTES = 4 << 20
"""The largest published ones have about 100 KiB (a quantization entry for each tensor)."""
PUBLISHED_CONFIG = "give the model's own config.json, as its publisher wrote it"
"""The remedy for fields that are missing or wrong."""
_MAX_NUMBER = 1 << 31
_MAX_LAYERS = 4096
_TEXT_PARTS = ("text_config", "language_config", "llm_config", "thinker_config")
"""Where models that also see or hear keep the language model's fields; may be nested."""


class ModelConfig:
    """The language model's part of a config.json."""

    def __init__(self, fields: Mapping[str, Any], *, source: str, path: str = "") -> None:
        self._fields = fields
        self._path = path
        self.source = source

    def has(self, key: str) -> bool:
        """Whether the field is there and not null."""
        return self._fields.get(key) is not None

    def integer(self, key: str, *, least: int = 1, most: int = _MAX_NUMBER) -> int:
        """Return a number. Raises BadInputError where there is none, or none in range."""
        if not self.has(key):
            raise self.missing(key)
        value = self._fields[key]
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            raise self.wrong(key, f"is {_shown(value)}, not an integer from {least} to {most}")
        return value

    def optional(self, key: str, default: int, *, least: int = 1, most: int = _MAX_NUMBER) -> int:
        """Return a number, or the default where the field is missing or null."""
        return self.integer(key, least=least, most=most) if self.has(key) else default

    def flag(self, key: str, *, default: bool) -> bool:
        """Return true or false."""
        value = self._fields.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.wrong(key, f"is {_shown(value)}, not true or false")
        return value

    def text(self, key: str, default: str = "") -> str:
        """Return a line of text."""
        value = self._fields.get(key)
        if value is None:
            return default
        if not isinstance(value, str) or len(value) > 4096 or not value.isprintable():
            raise self.wrong(key, f"is {_shown(value)}, not a line of text")
        return value

    def layers(self) -> int:
        """Return the number of layers."""
        return self.integer("num_hidden_layers", most=_MAX_LAYERS)

    def per_layer(self, key: str, of: type, *, extra: bool = False) -> tuple[Any, ...] | None:
        """Return a list with one item of that type for each layer; None where there is none.

        With `extra` further items (of layers that draft tokens) are ignored.
        """
        value = self._fields.get(key)
        if value is None:
            return None
        if not isinstance(value, list) or not all(type(item) is of for item in value):
            raise self.wrong(key, f"is not a list of {of.__name__}s")
        count = self.layers()
        if len(value) != count and not (extra and len(value) > count):
            raise self.wrong(key, f"has {len(value)} items for {count} layers")
        return tuple(value[:count])

    def missing(self, *keys: str) -> BadInputError:
        """Return the error for fields that are not there."""
        names = ", ".join(self._path + key for key in keys)
        verb = "is" if len(keys) == 1 else "are"
        return BadInputError(
            f"{self.source}: {names} {verb} missing",
            reason="UnknownArchitecture",
            remedy=PUBLISHED_CONFIG,
        )

    def wrong(self, key: str, why: str, remedy: str = "") -> BadInputError:
        """Return the error for a field that cannot be."""
        return BadInputError(
            f"{self.source}: {self._path}{key} {why}",
            remedy=remedy or PUBLISHED_CONFIG,
        )


def load_config(data: bytes, *, source: str) -> ModelConfig:
    """Read a config.json. `source` names it in messages.

    Raises BadInputError for more than 4 MiB, what is no JSON object, or a text model's part that
    is none.
    """
    if len(data) > MAX_CONFIG_BYTES:
        raise BadInputError(
            f"{source}: is larger than {MAX_CONFIG_BYTES >> 20} MiB",
            remedy="give a model's config.json, not its weights or tokenizer",
        )
    try:
        document = json.loads(data.decode("utf-8"), parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        why = " ".join(str(error).split())[:120]
        raise BadInputError(
            f"{source}: is not JSON that can be used: {why}", remedy="give a model's config.json"
        ) from error
    if not isinstance(document, dict):
        raise BadInputError(f"{source}: holds no object", remedy="give a model's config.json")
    return _text_part(document, source)


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _text_part(document: Mapping[str, Any], source: str) -> ModelConfig:
    fields, path = document, ""
    while True:
        key = next((key for key in _TEXT_PARTS if fields.get(key) is not None), None)
        if key is None:
            return ModelConfig(_inherited(document, fields), source=source, path=path)
        part = fields[key]
        if not isinstance(part, dict):
            raise BadInputError(
                f"{source}: {path}{key} is no object", remedy="give a model's config.json"
            )
        fields, path = part, f"{path}{key}."


def _inherited(document: Mapping[str, Any], fields: Mapping[str, Any]) -> Mapping[str, Any]:
    """Let the part have the whole's data type and kind, where it has none of its own."""
    keys = ("dtype", "torch_dtype", "model_type", "architectures")
    kept = {key: document[key] for key in keys if key in document}
    return {**kept, **fields}


def _shown(value: object) -> str:
    text = " ".join(repr(value)[:80].split())
    return text if len(text) <= 40 else text[:37] + "..."


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


DS_MLA = "fp8_ds_mla"
"""DeepSeek's own way to store latents in FP8: the part with positions stays in 16 bits."""
_8_BIT = 8
_DEFAULT = "bfloat16"


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
class CacheTypes:
    """The data types that a model's caches have."""

    model: DType
    kv: DType
    index: DType
    state: DType
    ds_mla: bool = False

    @classmethod
    def of(cls, config: ModelConfig, choice: TypeChoice) -> CacheTypes:
        """Resolve `auto`. Raises BadInputError for a data type that is not known.

        Keys and values have the model's type by default; index keys follow them, as
        FP8 with a scale for 128 elements where those have 8 bits or fewer (vLLM and SGLang store
        128 + 4 bytes). States have the config's `mamba_ssm_dtype`, else float32, the larger of
        what engines choose (SGLang float32; vLLM the model's type).
        """
        key = "dtype" if config.has("dtype") else "torch_dtype"
        model = dtype_named(config.text(key, _DEFAULT), field=f"{config.source}: {key}")
        ds_mla = choice.kv == DS_MLA
        kv = model if choice.kv == AUTO else DTYPES["fp8"]
        if choice.kv != AUTO and not ds_mla:
            kv = dtype_named(choice.kv, field="--kv-dtype")
        index = DTYPES["fp8_block128"] if kv.bits <= _8_BIT else kv
        if choice.index != AUTO:
            index = dtype_named(choice.index, field="--index-dtype")
        where, state = f"{config.source}: mamba_ssm_dtype", "float32"
        if choice.state != AUTO:
            where, state = "--state-dtype", choice.state
        elif config.text("mamba_ssm_dtype", AUTO) != AUTO:
            state = config.text("mamba_ssm_dtype")
        return cls(
            model=model, kv=kv, index=index, state=dtype_named(state, field=where), ds_mla=ds_mla
        )
