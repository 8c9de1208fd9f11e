"""No silent wrong number: each field of every example left out, changed and contradicted."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hostprep.errors import BadInputError
from tests.support.config_changes import (
    Change,
    Fields,
    changes_of,
    foreign_fields,
    kept_by,
    text_part,
    verdict,
)
from tests.unit.sizing.models import MODELS

pytestmark = pytest.mark.unit

_DEFAULTS = json.loads(
    (MODELS.parents[1] / "tests" / "unit" / "sizing" / "class_defaults.json").read_text("utf-8")
)
"""What transformers' classes fill in for each example's fields; tier engines asks them again."""
_CONFIGS: dict[str, Fields] = {
    path.stem: json.loads(path.read_text("utf-8")) for path in sorted(MODELS.glob("*.json"))
}


def _of_family(config: Fields) -> frozenset[str]:
    kind = text_part(config)["model_type"]
    same = (c for c in map(text_part, _CONFIGS.values()) if c["model_type"] == kind)
    names = (name for fields in same for name in fields)
    known = (n for n, d in _DEFAULTS.items() if text_part(_CONFIGS[n])["model_type"] == kind)
    return frozenset(names) | {field for name in known for field in _DEFAULTS[name]["known"]}


def _changes(name: str) -> Iterator[Change]:
    config = _CONFIGS[name]
    filled_in = _DEFAULTS.get(name, {}).get("filled_in")
    yield from changes_of(config, of_family=_of_family(config), defaults=filled_in)


@pytest.mark.parametrize("name", _CONFIGS)
def test_one_change_is_refused_by_name_or_changes_nothing_or_follows_from_a_rule(name: str) -> None:
    base = kept_by(json.dumps(_CONFIGS[name]).encode())
    count, wrong = 0, []
    for change in _changes(name):
        count += 1
        problem = verdict(base, change)
        if problem:
            wrong.append(f"{change.what}: {problem}")
    assert not wrong, "\n".join(wrong)
    assert count > 50


@given(data=st.data())
def test_two_fields_of_other_families_are_refused_by_the_name_of_one(data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(sorted(_CONFIGS)))
    config = _CONFIGS[name]
    known = _of_family(config) | set(text_part(config))
    strange = [pair for pair in foreign_fields(text_part(config)) if pair[0] not in known]
    chosen = data.draw(
        st.lists(st.sampled_from(strange), min_size=2, max_size=5, unique_by=lambda pair: pair[0])
    )
    both = json.loads(json.dumps(config))
    text_part(both).update(chosen)
    with pytest.raises(BadInputError) as caught:
        kept_by(json.dumps(both).encode())
    assert any(field in caught.value.message for field, _ in chosen)


_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=20),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=3)
    ),
    max_leaves=8,
)


@given(data=st.data(), value=_VALUES)
def test_no_value_of_any_field_is_anything_but_read_or_refused(
    data: st.DataObject, value: object
) -> None:
    name = data.draw(st.sampled_from(sorted(_CONFIGS)))
    config = json.loads(json.dumps(_CONFIGS[name]))
    field = data.draw(st.sampled_from(sorted(text_part(config))))
    text_part(config)[field] = value
    with suppress(BadInputError):
        kept = kept_by(json.dumps(config).encode())
        assert all(size_bytes > 0 for size_bytes in kept.values())
