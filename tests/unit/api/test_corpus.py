"""The command line's half of the corpus: the API server judges the same files alike."""

from __future__ import annotations

import pytest
from hypothesis import given

from hostprep.api.pool_resource import load_pools
from hostprep.errors import BadInputError
from tests.support.pool_corpus import (
    BAD,
    GOOD,
    Case,
    JsonObject,
    mutated_pools,
    names,
    verdict_of_command_line,
)

pytestmark = pytest.mark.unit


def test_the_corpus_is_large_enough_to_mean_something() -> None:
    assert len(GOOD) >= 25
    assert len(BAD) >= 60
    assert all(case.field for case in BAD)


@pytest.mark.parametrize("case", GOOD, ids=lambda case: case.name)
def test_a_good_pool_is_accepted(case: Case) -> None:
    (spec,) = load_pools(case.text, source="pool.yaml")
    sizes = [spec.size_bytes, spec.percent, spec.region_size_bytes, spec.sizing]
    assert sizes.count(None) == 3


@pytest.mark.parametrize("case", BAD, ids=lambda case: case.name)
def test_a_bad_pool_is_refused_with_the_field_named(case: Case) -> None:
    with pytest.raises(BadInputError) as caught:
        load_pools(case.text, source="pool.yaml")
    assert names(str(caught.value), case.field), str(caught.value)
    assert "\n" not in str(caught.value)
    assert caught.value.remedy


@given(mutated_pools())
def test_a_spoilt_pool_is_a_pool_or_bad_input_in_one_line(document: JsonObject) -> None:
    assert "\n" not in verdict_of_command_line(document)
