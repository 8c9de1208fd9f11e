"""One item of a HostMemoryNode's spec.pools, made a spec by the agent."""

from __future__ import annotations

from typing import Any

import pytest

from hostprep.api.node_resource import policy_of
from hostprep.api.pool_resource import load_pools, spec_from_policy
from hostprep.api.pool_spec import DEFAULT_BACKINGS, PoolSpec, PoolState, RegionLayout
from hostprep.backing import GIB, Backing
from hostprep.errors import BadInputError
from tests.support.pool_corpus import GOOD, Case

pytestmark = pytest.mark.unit


@pytest.mark.parametrize("case", GOOD, ids=lambda case: case.name)
def test_a_policy_asks_for_what_the_pool_asks_for(case: Case) -> None:
    (pool,) = load_pools(case.text, source="pool.yaml")
    assert spec_from_policy(pool.name, "", policy_of(case.document["spec"])) == pool


def test_a_policy_keeps_the_pools_uid() -> None:
    policy = {"size": 8 * GIB, "regions": 2, "backings": ["Base"]}
    assert spec_from_policy("kv", "0a1b", policy) == PoolSpec(
        name="kv",
        uid="0a1b",
        size_bytes=8 * GIB,
        backings=(Backing.BASE,),
        layout=RegionLayout.COUNT,
        region_count=2,
        reserve_bytes=None,
    )


@pytest.mark.parametrize("policy", [{}, {"size": "lots"}])
def test_an_absent_pool_needs_no_policy_to_be_released(policy: dict[str, Any]) -> None:
    spec = spec_from_policy("kv", "0a1b", policy, absent=True)
    assert spec.state is PoolState.ABSENT
    assert (spec.name, spec.uid) == ("kv", "0a1b")
    assert not spec.force


def test_what_an_earlier_version_stored_is_taken() -> None:
    """New pools must have a whole share: stored ones stay what they are."""
    policy = {"percent": 62.5, "attach": {"mode": "devicePlugin"}, "boot": "systemd"}
    assert spec_from_policy("kv", "", policy).percent == 62.5
    assert policy["attach"] == {"mode": "devicePlugin"}
    for spelling in ({"boot": "None"}, {"boot": "none"}, {"attach": {"mode": "HostPath"}}):
        assert spec_from_policy("kv", "", {"size": 1, **spelling}).size_bytes == 1


def test_what_a_newer_operator_knows_is_ignored() -> None:
    spec = spec_from_policy("kv", "", {"size": "8Gi", "new": 1, "access": {"new": 1}})
    assert spec.backings == DEFAULT_BACKINGS


@pytest.mark.parametrize(
    ("policy", "words"),
    [
        ({}, "spec.pools[kv].policy: there is no size"),
        ({"size": "lots"}, "spec.pools[kv].policy.size: size 'lots'"),
        ({"size": "8Gi", "percent": 5}, "spec.pools[kv].policy: size and percent exclude"),
        ({"size": "8Gi", "access": {"mode": 432}}, "spec.pools[kv].policy.access.mode: "),
        ({"size": "8Gi", "backings": ["X"]}, "spec.pools[kv].policy.backings[0]: "),
        ({"sizing": {"model": "x"}}, "spec.pools[kv].policy.sizing.tokensPerBlock: is missing"),
    ],
)
def test_a_bad_policy_is_refused_with_the_field_named(policy: dict[str, Any], words: str) -> None:
    with pytest.raises(BadInputError) as caught:
        spec_from_policy("kv", "", policy)
    assert str(caught.value).startswith(words)
    assert caught.value.remedy


@pytest.mark.parametrize("absent", [False, True])
def test_a_name_that_would_leave_the_folder_is_refused(absent: bool) -> None:
    with pytest.raises(BadInputError, match="name: pool name"):
        spec_from_policy("../etc", "", {"size": "8Gi"}, absent=absent)
