"""Pydantic's first complaint in plain words: the field, what is wrong, what to write."""

from __future__ import annotations

import difflib
from typing import TYPE_CHECKING, get_args

from pydantic import BaseModel

from hostprep.api.pool_model import PoolResource

if TYPE_CHECKING:
    from pydantic import ValidationError
    from pydantic_core import ErrorDetails

__all__ = ["WHOLE", "explain"]

WHOLE = "the document"
"""The path of an error that no field is to blame for."""

_TYPES = {
    "int": "a whole number",
    "float": "a number",
    "string": "text (put it in quotes)",
    "bool": "true or false",
    "dict": "a mapping",
    "model": "a mapping",
    "tuple": "a list",
    "list": "a list",
}
_SHOWN = 40


def explain(error: ValidationError) -> tuple[str, str, str]:
    """Return the first error as (field path, what is wrong, remedy).

    The path is written as in `kubectl explain`, such as spec.access.mode or spec.backings[1].
    """
    first = error.errors(include_url=False)[0]
    within = first.get("ctx", {}).get("field") or ""
    location = (*first["loc"], within) if within else first["loc"]
    return _path(location), *_words(first)


def _words(error: ErrorDetails) -> tuple[str, str]:
    """Return what is wrong, and the remedy."""
    kind = error["type"]
    if kind == "hostprep":
        return str(error["ctx"]["why"]), str(error["ctx"]["remedy"])
    fixed = {
        "missing": ("is missing", "add it"),
        "extra_forbidden": ("is no field that exists", _known_fields(error["loc"])),
        "invalid_key": (f"{_shown(error)} is no name of a field", "write it as text"),
    }
    if kind in fixed:
        return fixed[kind]
    if kind == "literal_error":
        return f"{_shown(error)} is not allowed", f"write {error['ctx']['expected']}"
    for prefix, words in _TYPES.items():
        if kind.startswith((f"{prefix}_type", f"{prefix}_parsing", f"{prefix}_from")):
            return f"{_shown(error)} is not {words}", f"write {words}"
    return f"{_shown(error)} is out of range", _plain(error["msg"])


def _plain(message: str) -> str:
    return message.replace("Input should be", "it must be").replace("String should", "it should")


def _shown(error: ErrorDetails) -> str:
    text = " ".join(repr(error["input"])[: 2 * _SHOWN].split())
    return text if len(text) <= _SHOWN else text[: _SHOWN - 3] + "..."


def _path(location: tuple[int | str, ...]) -> str:
    path = ""
    for step in location:
        if isinstance(step, int):
            path += f"[{step}]"
        elif not step.startswith("constrained-") and step not in ("int", "str", "[key]"):
            shown = " ".join(step.split())[:_SHOWN]
            path += f".{shown}" if path else shown
    return path or WHOLE


def _known_fields(location: tuple[int | str, ...]) -> str:
    model: type[BaseModel] | None = PoolResource
    for step in location[:-1]:
        model = _model_of(model, str(step))
    if model is None:
        return "remove it"
    fields = [field.alias or name for name, field in model.model_fields.items()]
    close = difflib.get_close_matches(str(location[-1]), fields, n=1)
    return f"did you mean {close[0]}?" if close else "choose from " + ", ".join(fields)


def _model_of(model: type[BaseModel] | None, field: str) -> type[BaseModel] | None:
    fields = model.model_fields.values() if model else ()
    annotation = next((known.annotation for known in fields if known.alias == field), None)
    for candidate in (annotation, *get_args(annotation)):
        if isinstance(candidate, type) and issubclass(candidate, BaseModel):
            return candidate
    return None
