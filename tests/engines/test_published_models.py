"""Sizes of published models, as their files are: against facts from papers and engines' sources."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from hostprep.errors import BadInputError
from testbed import model_configs
from tests.engines.published import published_or_skip
from tests.support.published_models import FACTS, REFUSED, Facts
from tests.support.published_table import DOCS, in_documentation, kept_by_file, published_section

pytestmark = pytest.mark.engines


@pytest.fixture(scope="module")
def published() -> Mapping[str, model_configs.PublishedModel]:
    return published_or_skip()


_CASES = [
    pytest.param(name, facts, ranks, id=f"{name}, TP {ranks}, {facts.kv_dtype}")
    for facts in FACTS
    for name in facts.names
    for ranks in (1, *facts.ranks)
]


@pytest.mark.parametrize(("name", "facts", "ranks"), _CASES)
def test_bytes_of_every_kind_of_cache_are_those_of_the_source(
    name: str, facts: Facts, ranks: int, published: Mapping[str, model_configs.PublishedModel]
) -> None:
    assert kept_by_file(published[name], ranks, facts.kv_dtype) == facts.on_rank(ranks)


_DRAFTING = [
    pytest.param(name, facts, id=f"{name}, {facts.kv_dtype}")
    for facts in FACTS
    for name in facts.names
    if facts.drafting or any(part.is_state and part.head_input_bytes for part in facts.kept)
]


@pytest.mark.parametrize(("name", "facts"), _DRAFTING)
def test_drafts_add_the_models_own_layer_and_the_inputs_of_convolutions(
    name: str, facts: Facts, published: Mapping[str, model_configs.PublishedModel]
) -> None:
    ranks = facts.ranks[-1]
    kept = kept_by_file(published[name], ranks, facts.kv_dtype, drafts=2)
    expected = facts.on_rank(ranks, drafts=2)
    compared = [key for key in expected if facts.drafting or key[2]]
    assert {key: kept[key] for key in compared} == {key: expected[key] for key in compared}


@pytest.mark.parametrize(("name", "why"), REFUSED.items())
def test_what_is_refused_is_refused_by_name(
    name: str, why: str, published: Mapping[str, model_configs.PublishedModel]
) -> None:
    with pytest.raises(BadInputError, match=why) as caught:
        kept_by_file(published[name], 1, "auto")
    assert caught.value.remedy


def test_there_is_a_row_for_every_model(
    published: Mapping[str, model_configs.PublishedModel],
) -> None:
    rows = {name for facts in FACTS for name in facts.names}
    assert rows | set(REFUSED) == set(published)
    assert len(rows) >= 40


def test_the_documentation_has_these_tables(
    published: Mapping[str, model_configs.PublishedModel],
) -> None:
    stale = "run .venv/bin/python -m tests.support.published_table"
    assert in_documentation(DOCS.read_text("utf-8")) == published_section(published), stale
