"""A model's config.json, read without trust: every field by type and range, or refused by name."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from hostprep.errors import BadInputError

__all__ = ["MAX_CONFIG_BYTES", "ModelConfig", "load_config"]

MAX_CONFIG_BYTES = 4 << 20
"""The largest published ones have about 100 KiB (a quantization entry for each tensor)."""
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

        With `extra` further items (of layers that draft tokens) are let pass.
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
            remedy="give the model's own config.json, as its publisher wrote it",
        )

    def wrong(self, key: str, why: str, remedy: str = "") -> BadInputError:
        """Return the error for a field that cannot be."""
        return BadInputError(
            f"{self.source}: {self._path}{key} {why}",
            remedy=remedy or "give the model's own config.json, as its publisher wrote it",
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
