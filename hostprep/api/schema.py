"""Fields of a HostMemoryPool, as the CustomResourceDefinition has them: bounds, choices, defaults.

The YAML is the source: the API server enforces it, `kubectl explain` shows it, models read it. What
it says in CEL rules stands once more in `pool_checks`, with messages of its own. Models read
v1beta1, the version that people write; v1alpha1 follows from it (scripts/crd_versions.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from pydantic import Field, GetCoreSchemaHandler
from pydantic.fields import FieldInfo
from pydantic_core import CoreSchema, core_schema

from hostprep.api.names import POOL_PLURAL, VERSION

_PACKAGED = Path(__file__).parent / "crds"
_IN_CHECKOUT = Path(__file__).parents[2] / "charts" / "hostprep" / "files" / "crds"
Loader: type[yaml.SafeLoader] = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_CONSTRAINTS = {
    "minimum": "ge",
    "maximum": "le",
    "minLength": "min_length",
    "maxLength": "max_length",
}


@cache
def load_crd(plural: str) -> dict[str, Any]:
    """Return a CustomResourceDefinition: a wheel has it in the package, a checkout in the chart."""
    crd: dict[str, Any] = yaml.load(_text(plural), Loader=Loader)  # noqa: S506 - a SafeLoader
    return crd


@cache
def _pool_root() -> dict[str, Any]:
    """Return the pool's schema in the version that people write, which comes first in the file.

    The other one is as long, and every start of a program would read it in vain.
    """
    written = _text(POOL_PLURAL).partition(f"    - name: {VERSION}\n")[0]
    crd = yaml.load(written, Loader=Loader)  # noqa: S506 - a SafeLoader
    root: dict[str, Any] = crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    return root


def _text(plural: str) -> str:
    folder = _PACKAGED if _PACKAGED.is_dir() else _IN_CHECKOUT
    return (folder / f"{plural}.yaml").read_text(encoding="utf-8")


def pool_schema(path: str) -> dict[str, Any]:
    """Return the schema of one field, such as spec.sizing.groups[].slots. Raises KeyError."""
    return _find(path)[0]


def constraints(path: str) -> FieldInfo:
    """Return the default, the bounds and the choices of a field, as pydantic's annotation."""
    schema, _ = _find(path)
    field = default(path)
    given = {name: schema[key] for key, name in _CONSTRAINTS.items() if key in schema}
    if schema.get("exclusiveMinimum"):
        given["gt"] = given.pop("ge")
    field.metadata += Field(**given).metadata
    if "enum" in schema:
        field.metadata.append(Choices(tuple(schema["enum"])))
    return field


def default(path: str) -> FieldInfo:
    """Return the default of a field alone, where a function of `pool_checks` does the rest."""
    schema, required = _find(path)
    if "default" in schema:
        info = Field(default=schema["default"], validate_default=True)
    else:
        info = Field() if required else Field(default=None)
    field: FieldInfo = info
    return field


@dataclass(frozen=True, slots=True)
class Choices:
    """One of these values; errors read as those of a Literal."""

    values: Sequence[str]

    def __get_pydantic_core_schema__(
        self, source: type[Any], handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        del source, handler
        return core_schema.literal_schema(list(self.values))


def _find(path: str) -> tuple[dict[str, Any], bool]:
    """Return the field's schema, and whether it must be given."""
    schema = _pool_root()
    required = True
    for step in path.split("."):
        name = step.removesuffix("[]")
        required = name in schema.get("required", ())
        schema = schema["properties"][name]
        if step != name:
            schema = schema["items"]
    return schema, required
