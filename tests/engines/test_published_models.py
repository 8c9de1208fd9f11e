"""Sizes of published models, as their files are: against facts from papers and engines' sources."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from testbed import model_configs
from tests.engines.published import published_or_skip
from tests.support.published_models import FACTS, REFUSED, Facts
from tests.support.published_table import kept_by_file

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


def test_there_is_a_row_for_every_model(
    published: Mapping[str, model_configs.PublishedModel],
) -> None:
    rows = {name for facts in FACTS for name in facts.names}
    assert rows | set(REFUSED) == set(published)
    assert len(rows) >= 40
