"""HostMemoryNodes: what is written comes back, and what is not known does no harm."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hostprep.api.node_resource import (
    POLICY_FIELDS,
    NodeStatus,
    Phase,
    PoolEntry,
    PoolStatus,
    entries_of,
    policy_of,
)
from tests.support.host_memory_nodes import full_status, node_statuses

pytestmark = pytest.mark.unit

entries = st.builds(
    PoolEntry,
    name=st.text(min_size=1, max_size=8),
    uid=st.text(max_size=8),
    generation=st.integers(0, 1 << 40),
    absent=st.booleans(),
    policy=st.dictionaries(st.sampled_from(POLICY_FIELDS), st.text(max_size=5)),
)


@given(node_statuses)
def test_a_status_comes_back_as_it_was_written(status: NodeStatus) -> None:
    assert NodeStatus.from_json(status.to_json()) == status


@given(st.lists(entries, max_size=3))
def test_entries_come_back_as_they_were_written(items: list[PoolEntry]) -> None:
    document = {"spec": {"pools": [item.to_json() for item in items]}}
    assert entries_of(document) == tuple(items)


@pytest.mark.parametrize("document", [{}, {"spec": None}, {"spec": {"pools": None}}])
def test_no_entries_are_none(document: dict[str, object]) -> None:
    assert entries_of(document) == ()


@pytest.mark.parametrize("state", ["Present", "absent", "Gone", "", None])
def test_only_the_very_word_absent_releases_memory(state: str | None) -> None:
    assert not PoolEntry.from_json({"name": "kv", "state": state}).absent


def test_an_entry_without_a_name_is_an_error() -> None:
    with pytest.raises(KeyError):
        PoolEntry.from_json({"state": "Absent"})


@pytest.mark.parametrize("document", [None, {}, {"pools": None, "conditions": None}])
def test_no_status_is_an_empty_one(document: dict[str, object] | None) -> None:
    assert NodeStatus.from_json(document) == NodeStatus()


def test_a_phase_of_a_newer_agent_is_not_ready() -> None:
    assert PoolStatus.from_json({"name": "kv", "phase": "Polished"}).phase is Phase.PENDING


def test_a_pool_is_found_by_its_name() -> None:
    status = full_status()
    assert status.pool("kv") is status.pools[0]
    assert status.pool("other") is None


def test_a_policy_is_the_nodes_part_of_the_spec_and_nothing_else() -> None:
    spec = {"size": "8Gi", "reserve": 0, "readiness": {}, "rollout": {}, "nodeSelector": {}}
    assert policy_of(spec) == {"size": "8Gi", "reserve": 0}
