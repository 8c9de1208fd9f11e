"""One codec between dataclasses and JSON: custom resources, saved state, messages of the agent.

A field's key is its name in camelCase. `json_field` says what differs, in the field's metadata.
Reading is lenient towards what another version wrote: keys that are not known are ignored, and a
missing one becomes the field's default. A missing key without a default is an error.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass
from enum import Enum
from functools import cache, partial
from typing import Any, Literal, Self, TypeVar, Union, get_args, get_origin, get_type_hints

_T = TypeVar("_T")
_Convert = Callable[[Any], Any]
_PLAIN = (str, int, float, bool)
_EMPTY: tuple[Any, ...] = (None, "", (), {})


class JsonObject:
    """A dataclass that is read from a JSON object, and written as one."""

    __slots__ = ()

    @classmethod
    def from_json(cls, document: Mapping[str, Any] | None) -> Self:
        """Read an object; None counts as an empty one.

        Raises KeyError, TypeError, ValueError or AttributeError for one that cannot be read.
        """
        return decode(cls, document or {})

    def to_json(self) -> dict[str, Any]:
        """Return the object."""
        document: dict[str, Any] = encode(self)
        return document


def json_field(
    *,
    key: str = "",
    fallback: Any = MISSING,
    omit_empty: bool = False,
    encode: _Convert | None = None,
    decode: _Convert | None = None,
) -> dict[str, Any]:
    """Return the metadata of a field that is not written under its name, or not as it is.

    `fallback` stands for a value that is missing, null, or none that the type knows.
    """
    return {
        "json": {
            "key": key,
            "fallback": fallback,
            "omit_empty": omit_empty,
            "encode": encode,
            "decode": decode,
        }
    }


def encode(value: Any) -> Any:
    """Return a value as JSON has it: dataclasses as objects, enums by their value."""
    if value is None or type(value) in _PLAIN:
        return value
    if isinstance(value, (list, tuple)):
        return [encode(item) for item in value]
    if isinstance(value, Enum):
        return value.value
    if not is_dataclass(value):
        return dict(value)
    document = {}
    for one in _fields_of(type(value)):
        item = getattr(value, one.name)
        if not (one.omit_empty and item in _EMPTY):
            document[one.key] = one.encode(item)
    return document


def decode(kind: type[_T], document: Mapping[str, Any]) -> _T:
    """Return a JSON object as that dataclass."""
    values = {}
    for one in _fields_of(kind):
        value = document.get(one.key)
        if value is not None or (one.is_nullable and one.key in document):
            values[one.name] = one.decode(value)
        elif one.fallback is not MISSING:
            values[one.name] = one.fallback
        elif one.is_required:
            raise KeyError(one.key)
    return kind(**values)


@dataclass(frozen=True, slots=True)
class _Field:
    name: str
    key: str
    encode: _Convert
    decode: _Convert
    fallback: Any
    omit_empty: bool
    is_nullable: bool
    is_required: bool


def _inspect(kind: Any) -> tuple[_Field, ...]:
    hints = get_type_hints(kind)
    found = []
    for one in fields(kind):
        how = one.metadata.get("json") or json_field()["json"]
        head, *rest = one.name.split("_")
        found.append(
            _Field(
                name=one.name,
                key=how["key"] or head + "".join(word.capitalize() for word in rest),
                encode=how["encode"] or encode,
                decode=how["decode"] or _decoder(hints[one.name], how["fallback"]),
                fallback=how["fallback"],
                omit_empty=how["omit_empty"],
                is_nullable=types.NoneType in get_args(hints[one.name]),
                is_required=one.default is MISSING and one.default_factory is MISSING,
            )
        )
    return tuple(found)


_fields_of: Callable[[Any], tuple[_Field, ...]] = cache(_inspect)


def _decoder(kind: Any, fallback: Any = MISSING) -> _Convert:
    """Return what makes a value of that type from JSON."""
    origin, arguments = get_origin(kind), get_args(kind)
    if origin in (types.UnionType, Union):
        some = _decoder(next(one for one in arguments if one is not types.NoneType), fallback)
        return lambda value: None if value is None else some(value)
    if origin is tuple:
        return _tuple_decoder(arguments)
    if origin is Mapping:
        return _mapping
    if isinstance(kind, type) and is_dataclass(kind):
        return partial(decode, kind)
    if origin is Literal or (isinstance(kind, type) and issubclass(kind, Enum)):
        known = {word: word for word in arguments} or {one.value: one for one in kind}
        return lambda value: known[value] if fallback is MISSING else known.get(value, fallback)
    return kind if kind in _PLAIN else lambda value: value


def _tuple_decoder(kinds: tuple[Any, ...]) -> _Convert:
    if kinds[1:] == (Ellipsis,):
        item = _decoder(kinds[0])
        return lambda value: tuple(map(item, _list(value)))
    items = [_decoder(kind) for kind in kinds]
    return lambda value: tuple(one(part) for one, part in zip(items, _list(value), strict=True))


def _list(value: Any) -> Any:
    if not isinstance(value, (list, tuple)):
        raise TypeError(f"{type(value).__name__} instead of a list")
    return value


def _mapping(value: Any) -> Any:
    if not isinstance(value, Mapping):
        raise TypeError(f"{type(value).__name__} instead of an object")
    return value
