"""The chart's schemas and our models: the same fields, bounds, choices and defaults."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import annotated_types as bounds
import pytest
import yaml
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from hostprep.api import names
from hostprep.api import pool_checks as resource_checks
from hostprep.api import pool_resource as resource
from hostprep.api.node_resource import PoolEntry
from hostprep.api.pool_model import PolicyModel, SpecModel
from hostprep.api.pool_policy import POLICY_FIELDS
from hostprep.backing import Backing
from hostprep.units import parse_quantity
from tests.support.host_memory_nodes import full_status

pytestmark = pytest.mark.unit

Json = dict[str, Any]
_CRDS = Path(__file__).parents[3] / "charts" / "hostprep" / "files" / "crds"
CRDS = {
    plural: yaml.safe_load((_CRDS / f"{plural}.yaml").read_text())
    for plural in (names.POOL_PLURAL, names.NODE_PLURAL)
}


def schema(plural: str) -> Json:
    (version,) = CRDS[plural]["spec"]["versions"]
    root: Json = version["schema"]["openAPIV3Schema"]
    return root


def at(plural: str, *path: str) -> Json:
    node = schema(plural)
    for step in path:
        node = node["items"] if step == "[]" else node["properties"][step]
    return node


def walk(node: Json, path: str) -> Iterator[tuple[str, Json]]:
    """Every field below, with its path; metadata is Kubernetes's own."""
    yield path, node
    for name, child in node.get("properties", {}).items():
        if (path, name) != ("", "metadata"):
            yield from walk(child, f"{path}.{name}" if path else name)
    for name in ("items", "additionalProperties"):
        if name in node:
            yield from walk(node[name], f"{path}[]")


FIELDS = [(plural, *field) for plural in CRDS for field in walk(schema(plural), "")]


@pytest.mark.parametrize(("plural", "path", "node"), FIELDS, ids=lambda value: str(value)[:60])
def test_every_field_says_what_it_is_for(plural: str, path: str, node: Json) -> None:
    del plural
    if not path.endswith("[]"):
        assert len(node.get("description", "")) > 15, path


@pytest.mark.parametrize(("plural", "path", "node"), FIELDS, ids=lambda value: str(value)[:60])
def test_every_list_is_bounded_and_says_how_it_merges(plural: str, path: str, node: Json) -> None:
    del plural, path
    if node.get("type") == "array":
        assert 0 < node["maxItems"] <= 4096
        assert node["x-kubernetes-list-type"] in {"atomic", "map"}


@pytest.mark.parametrize(
    ("plural", "kind", "short"),
    [
        (names.POOL_PLURAL, names.POOL_KIND, "hmp"),
        (names.NODE_PLURAL, names.NODE_KIND, "hmn"),
    ],
)
def test_resources_have_the_names_that_the_programs_use(plural: str, kind: str, short: str) -> None:
    crd = CRDS[plural]
    (version,) = crd["spec"]["versions"]
    assert crd["metadata"]["name"] == f"{plural}.{names.GROUP}"
    assert f"{crd['spec']['group']}/{version['name']}" == names.API_VERSION == resource.API_VERSION
    assert crd["spec"]["scope"] == "Cluster"
    assert crd["spec"]["names"]["kind"] == kind
    assert crd["spec"]["names"]["shortNames"] == [short]
    assert crd["spec"]["names"]["categories"] == ["hostprep"]
    assert version["subresources"] == {"status": {}}
    assert names.POOL_KIND == resource.KIND


@pytest.mark.parametrize("plural", CRDS)
def test_no_column_would_show_the_first_of_several_as_if_it_were_all(plural: str) -> None:
    (version,) = CRDS[plural]["spec"]["versions"]
    for column in version["additionalPrinterColumns"]:
        assert "[*]" not in column["jsonPath"]  # the API server prints the first match alone


def model_of(annotation: Any) -> type[BaseModel] | None:
    for candidate in (annotation, *get_args(annotation)):
        if isinstance(candidate, type) and issubclass(candidate, BaseModel):
            return candidate
    return None


def model_fields(model: type[BaseModel], path: str) -> Iterator[tuple[str, FieldInfo]]:
    for field in model.model_fields.values():
        here = f"{path}.{field.alias}"
        yield here, field
        inner = model_of(field.annotation)
        if inner is not None:
            yield from model_fields(inner, here)


MODEL_FIELDS = dict(model_fields(SpecModel, "spec"))
SPEC_NODES = {
    path.replace("[]", ""): node
    for path, node in walk(at("hostmemorypools", "spec"), "spec")
    if path != "spec" and not path.endswith("[]")
}


def test_the_schema_has_the_fields_of_the_model() -> None:
    assert set(SPEC_NODES) == set(MODEL_FIELDS)


def written(path: str, default: object) -> object:
    """A model's default as YAML writes it; nothing for what stays unset."""
    if path == "spec.access.mode":
        return f"{default:04o}"
    if isinstance(default, tuple):
        return [item.value for item in default]
    if isinstance(default, BaseModel):
        return None if path == "spec.lease" else {}  # an empty lease would say nothing
    return None if default in ({}, PydanticUndefined) else default


@pytest.mark.parametrize("path", sorted(MODEL_FIELDS))
def test_a_default_is_the_same_on_both_sides(path: str) -> None:
    assert SPEC_NODES[path].get("default") == written(path, MODEL_FIELDS[path].default)


@pytest.mark.parametrize("path", sorted(MODEL_FIELDS))
def test_choices_are_the_same_on_both_sides(path: str) -> None:
    annotation = MODEL_FIELDS[path].annotation
    choices = list(get_args(annotation)) if get_origin(annotation) is Literal else None
    assert SPEC_NODES[path].get("enum") == choices


@pytest.mark.parametrize("path", sorted(MODEL_FIELDS))
def test_bounds_are_the_same_on_both_sides(path: str) -> None:
    node = SPEC_NODES[path]
    least = node.get("minimum")
    expected = {
        bounds.Ge: None if node.get("exclusiveMinimum") else least,
        bounds.Gt: least if node.get("exclusiveMinimum") else None,
        bounds.Le: node.get("maximum"),
        bounds.MinLen: node.get("minLength"),
    }
    found: dict[type, Any] = dict.fromkeys(expected)
    for bound in MODEL_FIELDS[path].metadata:
        if type(bound) in expected:
            (found[type(bound)],) = vars_of(bound)
    assert found == expected


def vars_of(bound: Any) -> list[Any]:
    return [getattr(bound, slot) for slot in type(bound).__dataclass_fields__]


def test_backings_are_the_same_on_both_sides() -> None:
    assert at("hostmemorypools", "spec", "backings", "[]")["enum"] == [b.value for b in Backing]


def rules(node: Json) -> str:
    return " ".join(rule["rule"] for rule in node["x-kubernetes-validations"])


def test_patterns_and_bounds_in_rules_are_those_of_the_model() -> None:
    spec = at("hostmemorypools", "spec")["properties"]
    key = f"^{resource_checks.QUALIFIED_KEY}$"
    assert key in rules(spec["nodeSelector"])
    assert key in rules(spec["readiness"]["properties"]["taintKey"])
    value = spec["nodeSelector"]["additionalProperties"]
    assert f"^{resource_checks.LABEL_VALUE}$" in rules(value)
    assert f"self <= {resource_checks.MAX_REGIONS}" in rules(spec["regions"])
    assert "quantity('1Pi')" in rules(spec["size"])
    assert parse_quantity("1Pi") == resource_checks.MAX_SIZE_BYTES
    for layout in resource_checks.LAYOUTS:
        assert f"'{layout}'" in rules(spec["regions"])


@pytest.mark.parametrize(("plural", "path", "node"), FIELDS, ids=lambda value: str(value)[:60])
def test_every_rule_says_in_its_message_which_field_is_meant(
    plural: str, path: str, node: Json
) -> None:
    del plural
    for rule in node.get("x-kubernetes-validations", ()):
        named = "metadata.name" if path == "" else re.sub(r"\[\].*", "", path)
        assert named in rule["message"], rule
        assert ";" in rule["message"] or "must" in rule["message"]


def test_the_nodes_policy_is_the_part_that_the_model_names() -> None:
    aliases = [field.alias for field in PolicyModel.model_fields.values()]
    assert tuple(aliases) == POLICY_FIELDS
    policy = at("hostmemorynodes", "spec", "pools", "[]", "policy")["properties"]
    assert tuple(policy) == POLICY_FIELDS


def shape(node: Json) -> Any:
    """What can be stored there: types and names, without bounds, choices and defaults."""
    if "properties" in node:
        return {name: shape(child) for name, child in node["properties"].items()}
    if "items" in node:
        return [node["x-kubernetes-list-type"], shape(node["items"])]
    return node.get("type", "int-or-string"), node.get("format")


@pytest.mark.parametrize("field", POLICY_FIELDS)
def test_the_nodes_policy_can_hold_what_the_pool_holds(field: str) -> None:
    of_pool = at("hostmemorypools", "spec", field)
    of_node = at("hostmemorynodes", "spec", "pools", "[]", "policy", field)
    assert shape(of_node) == shape(of_pool)
    assert "default" not in of_node
    assert "enum" not in of_node


def fields_of(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: fields_of(item) for name, item in value.items()}
    if isinstance(value, list):
        merged: Json = {}
        for item in value:
            merged |= item if isinstance(item, dict) else {}
        return fields_of(merged) if merged else None
    return None


def schema_fields(node: Json) -> Any:
    inner = node.get("items", node)
    if "properties" not in inner:
        return None
    return {name: schema_fields(child) for name, child in inner["properties"].items()}


def test_the_nodes_schema_has_the_fields_that_the_agent_writes() -> None:
    assert fields_of(full_status().to_json()) == schema_fields(at("hostmemorynodes", "status"))


def test_the_nodes_schema_has_the_fields_that_the_operator_writes() -> None:
    entry = PoolEntry(name="kv", policy={"size": "8Gi"}).to_json()
    assert set(entry) == set(at("hostmemorynodes", "spec", "pools", "[]")["properties"])
