"""The chart's schemas, and what the models read of them."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
from annotated_types import BaseMetadata
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from hostprep.api import names, schema
from hostprep.api import pool_checks as resource_checks
from hostprep.api.node_resource import POLICY_FIELDS, PoolEntry
from hostprep.api.pool_model import PolicyModel, SpecModel
from hostprep.api.pool_spec import DEFAULT_BACKINGS
from hostprep.api.versions import OLD_SPELLINGS, SERVED_API_VERSIONS, WRITTEN_VERSION
from hostprep.backing import Backing
from hostprep.layout import MAX_SLOTS
from hostprep.units import parse_quantity
from tests.support.host_memory_nodes import full_status

pytestmark = pytest.mark.unit

Json = dict[str, Any]
SCRIPT = Path(__file__).parents[3] / "scripts" / "crd_versions.py"
CRDS = {plural: schema.load_crd(plural) for plural in (names.POOL_PLURAL, names.NODE_PLURAL)}


def root_of(plural: str, name: str = WRITTEN_VERSION) -> Json:
    (version,) = (one for one in CRDS[plural]["spec"]["versions"] if one["name"] == name)
    root: Json = version["schema"]["openAPIV3Schema"]
    return root


def at(plural: str, *path: str) -> Json:
    node = root_of(plural)
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


FIELDS = [(plural, *field) for plural in CRDS for field in walk(root_of(plural), "")]


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
    versions = crd["spec"]["versions"]
    assert crd["metadata"]["name"] == f"{plural}.{names.GROUP}"
    assert [f"{names.GROUP}/{one['name']}" for one in versions] == [*SERVED_API_VERSIONS]
    assert [one["name"] for one in versions if one["storage"]] == [names.VERSION]
    assert all(one["served"] and one["subresources"] == {"status": {}} for one in versions)
    assert "conversion" not in crd["spec"]  # strategy None: only apiVersion differs
    assert crd["spec"]["scope"] == "Cluster"
    assert crd["spec"]["names"]["kind"] == kind
    assert crd["spec"]["names"]["shortNames"] == [short]
    assert crd["spec"]["names"]["categories"] == ["hostprep"]


def without_choices(node: Any) -> Any:
    """A schema without what the versions may differ in: which one it is, and spellings."""
    if isinstance(node, dict):
        return {key: without_choices(item) for key, item in node.items() if key != "enum"}
    if isinstance(node, list):
        return [without_choices(item) for item in node]
    return node.replace(WRITTEN_VERSION, names.VERSION) if isinstance(node, str) else node


@pytest.mark.parametrize("plural", CRDS)
def test_both_versions_have_one_structure_and_differ_in_old_spellings_alone(plural: str) -> None:
    written, stored = (root_of(plural, name) for name in (WRITTEN_VERSION, names.VERSION))
    assert without_choices(written) == without_choices(stored)
    new, old = dict(walk(written, "")), dict(walk(stored, ""))
    differing = {
        path: set(old[path]["enum"]) - set(new[path]["enum"])
        for path in new
        if old[path].get("enum") != new[path].get("enum")
    }
    expected = {f"spec.{'.'.join(path)}": set(known) for path, known in OLD_SPELLINGS.items()}
    assert differing == (expected if plural == names.POOL_PLURAL else {})


@pytest.mark.parametrize("path", OLD_SPELLINGS)
def test_a_choice_without_a_default_keeps_what_old_objects_say(path: tuple[str, ...]) -> None:
    assert "default" not in schema.pool_schema(f"spec.{'.'.join(path)}")


def test_the_files_are_what_the_script_makes_of_the_written_version() -> None:
    made = subprocess.run([sys.executable, SCRIPT, "--check"], capture_output=True, check=False)
    assert made.returncode == 0, made.stderr


@pytest.mark.parametrize("plural", CRDS)
def test_no_column_would_show_the_first_of_several_as_if_it_were_all(plural: str) -> None:
    first, second = (one["additionalPrinterColumns"] for one in CRDS[plural]["spec"]["versions"])
    assert first == second
    for column in first:
        assert "[*]" not in column["jsonPath"]  # the API server prints the first match alone


def model_of(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next(filter(None, map(model_of, get_args(annotation))), None)


def model_fields(model: type[BaseModel], path: str) -> Iterator[tuple[str, FieldInfo]]:
    for field in model.model_fields.values():
        here = f"{path}.{field.alias}"
        yield here, field
        inner = model_of(field.annotation)
        if inner is not None:
            yield from model_fields(inner, here)


MODEL_FIELDS = dict(model_fields(SpecModel, "spec"))
PATHS = {
    path.replace("[]", ""): path
    for path, _ in walk(at("hostmemorypools", "spec"), "spec")
    if path != "spec" and not path.endswith("[]")
}


def test_the_schema_has_the_fields_of_the_model() -> None:
    assert set(PATHS) == set(MODEL_FIELDS)


def bounds_of(field: FieldInfo) -> set[object]:
    return {one for one in field.metadata if isinstance(one, BaseMetadata | schema.Choices)}


@pytest.mark.parametrize("path", sorted(PATHS))
def test_a_field_has_what_the_schema_says_of_this_field_and_no_other(path: str) -> None:
    node, field = schema.pool_schema(PATHS[path]), MODEL_FIELDS[path]
    read = schema.constraints(PATHS[path])
    if path != "spec.nodeSelector":
        assert field.default == read.default
    if "enum" in node or node.get("type") in {"integer", "number"}:
        assert bounds_of(field) == bounds_of(read)
    else:
        assert bounds_of(field) in (bounds_of(read), set())


def test_what_the_engine_half_knows_of_itself_is_as_in_the_schema() -> None:
    assert schema.pool_schema("spec.sizing.groups[].slots")["maximum"] == MAX_SLOTS
    assert schema.pool_schema("spec.backings")["default"] == [b.value for b in DEFAULT_BACKINGS]
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
    assert f"<= {resource_checks.MAX_GROUPS_IN_ALL}" in rules(at("hostmemorypools", "spec"))
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
    if field == "percent":  # a node is told the fraction too that an earlier version stored
        assert (shape(of_pool), shape(of_node)) == (("integer", "int32"), ("number", None))
    else:
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
    entry = PoolEntry(name="kv", policy={"size": "8Gi"}, release_after_s=0).to_json()
    assert set(entry) == set(at("hostmemorynodes", "spec", "pools", "[]")["properties"])
