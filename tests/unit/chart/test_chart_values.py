"""The chart's files agree with each other: values, their schema and the README."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import jsonschema
import pytest
import yaml

pytestmark = pytest.mark.unit

_ROOT = Path(__file__).parents[3]
_CHART = _ROOT / "charts" / "hostprep"
_SCHEMA = json.loads((_CHART / "values.schema.json").read_text())
_VALUES = yaml.safe_load((_CHART / "values.yaml").read_text())


@pytest.fixture(scope="module")
def chart_readme() -> ModuleType:
    spec = importlib.util.spec_from_file_location(
        "chart_readme", _ROOT / "scripts" / "chart_readme.py"
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["chart_readme"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def _properties(schema: dict[str, Any], prefix: str = "") -> Iterator[str]:
    for name, child in schema.get("properties", {}).items():
        yield f"{prefix}{name}"
        yield from _properties(child, f"{prefix}{name}.")


def _keys(values: Any, prefix: str = "") -> Iterator[str]:
    if isinstance(values, dict):
        for name, child in values.items():
            yield f"{prefix}{name}"
            yield from _keys(child, f"{prefix}{name}.")


def test_the_default_values_fit_their_schema() -> None:
    jsonschema.validate(_VALUES, _SCHEMA)


def test_every_value_of_the_schema_has_a_default() -> None:
    optional = {
        "global",
        "autoscaler.nodeReadinessRule.nodeSelector.matchLabels",
        "autoscaler.nodeReadinessRule.nodeSelector.matchExpressions",
    }
    assert set(_properties(_SCHEMA)) - set(_keys(_VALUES)) == optional


def test_no_part_of_the_schema_lets_unknown_names_pass() -> None:
    def check(schema: dict[str, Any], path: str) -> None:
        if "properties" in schema:
            assert schema["additionalProperties"] is False, path
        for name, child in schema.get("properties", {}).items():
            check(child, f"{path}.{name}")

    check(_SCHEMA, "values")


def test_the_readme_is_current(chart_readme: ModuleType) -> None:
    assert chart_readme.main(["--check"]) == 0, "run python scripts/chart_readme.py"


def test_a_value_without_an_explanation_is_named(chart_readme: ModuleType) -> None:
    with pytest.raises(ValueError, match=r"a\.b in values\.yaml has no comment"):
        chart_readme.values_of("a:\n  b: 1\n")


def test_an_explanation_may_take_several_lines_and_defaults_are_json(
    chart_readme: ModuleType,
) -> None:
    text = "a:\n  # -- one\n  # two\n  b: {c: [1, x]}\n  # no mark\n  # -- three\n  d: true\n"
    rows = [(v.key, v.default, v.meaning) for v in chart_readme.values_of(text)]
    assert rows == [("a.b", '{"c": [1, "x"]}', "one two"), ("a.d", "true", "three")]


def test_the_docs_rights_are_those_that_are_tried() -> None:
    from tests.support.rights import PAGE, security_page

    page = PAGE.read_text(encoding="utf-8")
    assert security_page(page) == page, "run python -m tests.support.rights"


def test_the_table_of_rights_uses_every_identity_and_body() -> None:
    from tests.support.rights import FORBIDDEN, IDENTITIES, PERMITTED

    assert {act.who for act in (*FORBIDDEN, *PERMITTED)} == set(IDENTITIES)
    titles = [(act.title, act.method) for act in (*FORBIDDEN, *PERMITTED)]
    assert len(titles) == len(set(titles))
