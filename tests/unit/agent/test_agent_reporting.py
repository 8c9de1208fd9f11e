"""When the status is written, and what of it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hostprep.agent.reporter import (
    PROGRESS_AT_LEAST_S,
    PROGRESS_EVERY_S,
    PROGRESS_STEP_PERCENT,
    due_at,
    merge_patch,
)
from hostprep.api.conditions import Condition
from hostprep.api.node_resource import HugePageStatus, NodeStatus, Phase, PoolStatus, RegionStatus
from hostprep.kube.backoff import Backoff

pytestmark = pytest.mark.unit

PREPARING = PoolStatus(name="kv", phase=Phase.PREPARING, reason="Preparing", progress_percent=1)
READY = PoolStatus(name="kv", phase=Phase.READY, reason="Ready", regions=())


def _status(pool: PoolStatus, **changes: Any) -> NodeStatus:
    return replace(NodeStatus(boot_id="b", pools=(pool,)), **changes)


def _region(state: str) -> RegionStatus:
    return RegionStatus(
        name="node0-0", size_bytes=1, backing="Base", placement="node:0", state=state
    )


def _due(old: NodeStatus, new: NodeStatus, *, last: float | None = 99.0) -> float | None:
    return due_at(old, new, now_s=100.0, last_write_s=last)


def test_what_is_there_already_is_never_written() -> None:
    assert _due(_status(READY), _status(READY)) is None


@pytest.mark.parametrize(
    "new",
    [
        _status(replace(PREPARING, progress_percent=2)),
        _status(replace(PREPARING, message="other words")),
        _status(PREPARING, summary="kv preparing 2 %"),
        _status(PREPARING, huge_pages=(HugePageStatus(page_bytes=2, total=3, held=1),)),
        _status(replace(PREPARING, regions=(_region("Unfinished"),))),
        _status(replace(PREPARING, regions=(_region("Free"),), ready_bytes=1)),
    ],
)
def test_progress_without_a_step_is_written_once_a_minute(new: NodeStatus) -> None:
    assert _due(_status(PREPARING), new) == 99.0 + PROGRESS_AT_LEAST_S


@pytest.mark.parametrize("percent", [10, 99, None])
def test_a_step_of_ten_percent_is_written_at_most_every_ten_seconds(percent: int | None) -> None:
    new = _status(replace(PREPARING, progress_percent=percent))
    assert _due(_status(PREPARING), new) == 99.0 + PROGRESS_EVERY_S


@given(st.lists(st.floats(0.1, 30.0), min_size=1, max_size=200))
def test_a_preparation_costs_few_reports_however_long_it_takes(pauses_s: list[float]) -> None:
    now_s, last_s, server, written = 0.0, 0.0, _status(PREPARING), 0
    for number, pause_s in enumerate(pauses_s):
        now_s += pause_s
        percent = 1 + 98 * number // len(pauses_s)
        wanted = _status(replace(PREPARING, progress_percent=percent))
        due_s = due_at(server, wanted, now_s=now_s, last_write_s=last_s)
        if due_s is not None and due_s <= now_s:
            server, last_s, written = wanted, now_s, written + 1
    steps = 100 / PROGRESS_STEP_PERCENT
    assert written <= min(steps + now_s / PROGRESS_AT_LEAST_S, now_s / PROGRESS_EVERY_S)


@pytest.mark.parametrize(
    "new",
    [
        _status(READY),
        _status(replace(PREPARING, reason="AlreadyRunning")),
        _status(replace(PREPARING, generation=2)),
        _status(PREPARING, boot_id="c"),
        _status(PREPARING, observed_generation=2),
        _status(PREPARING, pools=()),
        _status(PREPARING, conditions=(Condition(type="Ready", status="True", reason="Ready"),)),
    ],
)
def test_what_matters_is_written_at_once(new: NodeStatus) -> None:
    assert _due(_status(PREPARING), new) == 100.0


def _says(condition: str, message: str) -> NodeStatus:
    said = Condition(type=condition, status="True", reason="Because", message=message)
    return _status(PREPARING, conditions=(said,))


@pytest.mark.parametrize(
    ("condition", "due_s"),
    [
        ("BootUnit", 100.0),
        ("ResizeBlocked", 100.0),
        ("Damaged", 100.0),
        ("Ready", 99.0 + PROGRESS_AT_LEAST_S),
        ("Releasing", 99.0 + PROGRESS_AT_LEAST_S),
    ],
)
def test_a_condition_that_quotes_no_pool_says_its_news_at_once(
    condition: str, due_s: float
) -> None:
    """One more boot script, or one more region that is waited for, is no progress."""
    assert _due(_says(condition, "kv"), _says(condition, "kv, other")) == due_s


def test_a_region_that_changes_its_state_is_written_at_once() -> None:
    free = _status(replace(READY, regions=(_region("Free"),)))
    leased = _status(replace(READY, regions=(_region("Leased"),), regions_leased=1))

    assert _due(free, leased) == 100.0


def test_the_first_report_is_written_at_once() -> None:
    assert _due(_status(PREPARING), _status(replace(PREPARING, progress_percent=9)), last=None) == (
        100.0
    )


_JSON = st.recursive(
    st.booleans() | st.integers() | st.text(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("abcd"), inner, max_size=3)
    ),
    max_leaves=8,
)
_OBJECTS = st.dictionaries(st.sampled_from("abcd"), _JSON, max_size=4)


def _applied(target: Any, patch: Any) -> Any:
    """RFC 7396, section 2, word for word."""
    if not isinstance(patch, dict):
        return patch
    target = dict(target) if isinstance(target, dict) else {}
    for key, value in patch.items():
        if value is None:
            target.pop(key, None)
        else:
            target[key] = _applied(target.get(key), value)
    return target


@given(_OBJECTS, _OBJECTS)
def test_the_patch_leads_from_one_object_to_the_other(
    old: dict[str, Any], new: dict[str, Any]
) -> None:
    assert _applied(old, merge_patch(old, new)) == new


@given(_OBJECTS)
def test_the_patch_between_equals_is_empty(same: dict[str, Any]) -> None:
    assert merge_patch(same, same) == {}


def test_pauses_grow_to_a_bound_and_begin_anew_after_success() -> None:
    backoff = Backoff(first_s=1.0, most_s=30.0)
    pauses = [backoff.next_s() for _ in range(2000)]
    backoff.reset()

    assert 0.5 <= pauses[0] <= 1.0
    assert max(pauses) <= 30.0
    assert min(pauses[10:]) >= 15.0
    assert backoff.next_s() <= 1.0
