"""Slots in vLLM's configuration: what may be said, and what contradicts."""

from __future__ import annotations

from typing import Any

import pytest

from hostprep.engines.vllm.launch import OFFLOADING, SIMPLE, TIERING, Connector, check_config
from hostprep.engines.vllm.settings import Settings
from hostprep.errors import BadInputError

pytestmark = pytest.mark.unit

_SLOTS = {"hostprep.slots": True}


def test_slots_are_the_default_where_they_can_be() -> None:
    assert not Settings.read({}).slots
    assert Settings.read({}, can_have_slots=True).slots
    assert Settings.read({"secondary_tiers": [], "store_threshold": 2}, can_have_slots=True).slots
    assert Settings.read(_SLOTS, can_have_slots=True).slots


@pytest.mark.parametrize(
    "asked",
    [
        {"hostprep.slots": False},
        {"hostprep.slots": False, "eviction_policy": "arc"},
        {"eviction_policy": "lru"},
        {"cache_policy_module_path": "my.policies"},
        {"secondary_tiers": [{"type": "fs"}]},
    ],
)
def test_vllms_own_manager_stays_where_a_setting_asks_for_it(asked: dict[str, Any]) -> None:
    assert not Settings.read(asked, can_have_slots=True).slots


def test_what_slots_have_too_goes_with_them() -> None:
    fitting = {
        "eviction_policy": "lru",
        "store_threshold": 2,
        "cache_policy_module_path": None,
        "secondary_tiers": [],
        "max_tracker_size": 7,
    }
    assert Settings.read({**fitting, **_SLOTS}, can_have_slots=True).slots
    assert Settings.read({"eviction_policy": "arc", **_SLOTS}, can_have_slots=True).slots


@pytest.mark.parametrize(
    ("key", "given"),
    [
        ("eviction_policy", "mine"),
        ("eviction_policy", None),
        ("eviction_policy", ["arc"]),
        ("cache_policy_module_path", "my.policies"),
        ("max_tracker_size", "large"),
        ("store_threshold", "often"),
        ("secondary_tiers", [{"type": "fs"}]),
    ],
)
def test_what_vllms_own_manager_alone_can_do_is_refused_by_name(key: str, given: Any) -> None:
    with pytest.raises(BadInputError, match=key) as refused:
        Settings.read({key: given, **_SLOTS}, can_have_slots=True)
    assert "hostprep.slots does not go with" in str(refused.value)
    assert "leave that out, or leave out hostprep.slots" in str(refused.value)
    assert refused.value.exit_code == 2


def test_all_that_contradicts_is_named_at_once() -> None:
    extra = {"eviction_policy": "mine", "secondary_tiers": [3], **_SLOTS}
    with pytest.raises(BadInputError, match=r"eviction_policy 'mine' and secondary_tiers \[3\]"):
        Settings.read(extra, can_have_slots=True)


@pytest.mark.parametrize("given", [1, "true", "yes", None, []])
def test_it_is_true_or_false(given: Any) -> None:
    with pytest.raises(BadInputError, match="hostprep.slots is") as refused:
        Settings.read({"hostprep.slots": given}, can_have_slots=True)
    assert "true or false" in str(refused.value)


def test_a_connector_without_such_a_manager_refuses_them() -> None:
    with pytest.raises(BadInputError, match="HostprepOffloadingSpec alone"):
        Settings.read(_SLOTS)


@pytest.mark.parametrize("connector", [TIERING, SIMPLE])
def test_other_ways_refuse_them_before_the_claim(connector: Connector) -> None:
    with pytest.raises(BadInputError, match="--engine vllm-offloading"):
        check_config({"kv_connector_extra_config": _SLOTS}, connector)
    check_config({"kv_connector_extra_config": _SLOTS}, OFFLOADING)


def test_what_contradicts_is_refused_before_the_claim() -> None:
    extra = {"eviction_policy": "mine", **_SLOTS}
    with pytest.raises(BadInputError, match="does not go with eviction_policy"):
        check_config({"kv_connector_extra_config": extra}, OFFLOADING)


def test_memory_is_used_unpinned_only_where_that_is_asked_for() -> None:
    assert not Settings.read({}, can_have_slots=True).is_unpinned_allowed
    gpu_only = {"hostprep.fallback": "gpu-only"}
    assert not Settings.read(gpu_only).is_unpinned_allowed
    unpinned = {"hostprep.fallback": "unpinned"}
    assert Settings.read(unpinned, can_have_slots=True).is_unpinned_allowed
    check_config({"kv_connector_extra_config": unpinned}, OFFLOADING)
    with pytest.raises(BadInputError, match="'pinned'; give gpu-only or unpinned"):
        Settings.read({"hostprep.fallback": "pinned"}, can_have_slots=True)


@pytest.mark.parametrize("connector", [SIMPLE, TIERING])
def test_copies_that_need_registered_memory_are_refused_it(connector: Connector) -> None:
    unpinned = {"hostprep.fallback": "unpinned"}
    for read in (
        lambda: check_config({"kv_connector_extra_config": unpinned}, connector),
        lambda: Settings.read(unpinned),
    ):
        with pytest.raises(BadInputError, match="need registered memory; leave it out, or use"):
            read()
