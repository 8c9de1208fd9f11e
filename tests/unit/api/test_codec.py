"""The codec: keys, defaults, and what is refused."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import pytest

from hostprep.api.codec import JsonObject, json_field

pytestmark = pytest.mark.unit


class Colour(Enum):
    RED = "red"
    BLUE = "blue"


@dataclass(frozen=True, slots=True)
class Part(JsonObject):
    name: str
    weight_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Whole(JsonObject):
    name: str
    colour: Colour = Colour.RED
    known: Colour = field(default=Colour.RED, metadata=json_field(fallback=Colour.BLUE))
    reserve_bytes: int | None = 0
    parts: tuple[Part, ...] = field(default=(), metadata=json_field(omit_empty=True))
    steps: tuple[tuple[str, float], ...] = ()
    more: Mapping[str, Any] = field(default_factory=dict, metadata=json_field(key="MORE"))


def test_keys_are_camel_case_unless_they_are_given() -> None:
    whole = Whole(name="w", parts=(Part("p", 3),), steps=(("a", 1.5),), more={"x": 1})
    assert whole.to_json() == {
        "name": "w",
        "colour": "red",
        "known": "red",
        "reserveBytes": 0,
        "parts": [{"name": "p", "weightBytes": 3}],
        "steps": [["a", 1.5]],
        "MORE": {"x": 1},
    }
    assert Whole.from_json(whole.to_json()) == whole
    assert "parts" not in Whole(name="w").to_json()


def test_null_is_a_value_only_where_the_type_has_it() -> None:
    read = Whole.from_json({"name": "w", "reserveBytes": None, "parts": None, "colour": None})
    assert read == Whole(name="w", reserve_bytes=None, known=Colour.BLUE)
    assert Whole.from_json({"name": "w"}).reserve_bytes == 0


def test_a_word_that_is_not_known_is_refused_without_a_fallback() -> None:
    assert Whole.from_json({"name": "w", "known": "green"}).known is Colour.BLUE
    with pytest.raises(KeyError):
        Whole.from_json({"name": "w", "colour": "green"})


@pytest.mark.parametrize(
    "document",
    [
        None,
        {},
        {"name": "w", "parts": {}},
        {"name": "w", "parts": [{}]},
        {"name": "w", "parts": ["p"]},
        {"name": "w", "steps": [["a"]]},
        {"name": "w", "MORE": []},
        {"name": "w", "reserveBytes": "much"},
    ],
)
def test_what_cannot_be_read_is_an_error(document: dict[str, Any] | None) -> None:
    with pytest.raises((KeyError, TypeError, ValueError, AttributeError)):
        Whole.from_json(document)
