"""Conditions and times as Kubernetes writes them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hostprep.api.conditions import Condition, ConditionStatus, format_time, merged, parse_time
from tests.support.host_memory_nodes import conditions

pytestmark = pytest.mark.unit


def ready(status: ConditionStatus, since_s: float | None = None, message: str = "") -> Condition:
    return Condition(type="Ready", status=status, reason="R", message=message, since_s=since_s)


@given(conditions)
def test_a_condition_comes_back_as_it_was_written(condition: Condition) -> None:
    assert Condition.from_json(condition.to_json()) == condition


@pytest.mark.parametrize("document", [{}, {"status": "Maybe"}, {"status": None, "reason": None}])
def test_a_condition_that_says_little_is_unknown(document: dict[str, object]) -> None:
    assert Condition.from_json(document) == Condition(type="", status="Unknown", reason="")


def test_a_condition_that_stays_keeps_the_time_since_when() -> None:
    (now,) = merged([ready("True", 5.0)], [ready("True", message="other words")], now_s=9.7)
    assert now.since_s == 5.0
    assert now.message == "other words"


def test_a_condition_that_changes_gets_the_time_of_the_change_in_whole_seconds() -> None:
    (now,) = merged([ready("True", 5.0)], [ready("False")], now_s=9.7)
    assert now.since_s == 9.0


def test_a_condition_whose_time_was_lost_gets_the_present_one() -> None:
    (now,) = merged([ready("True")], [ready("True")], now_s=9.0)
    assert now.since_s == 9.0


def test_a_condition_that_is_not_said_again_goes() -> None:
    assert merged([ready("True", 5.0)], [], now_s=9.0) == ()


@given(st.lists(conditions, unique_by=lambda condition: condition.type), st.integers(0, 1 << 31))
def test_to_merge_the_same_again_changes_nothing(said: list[Condition], now_s: int) -> None:
    once = merged([], said, now_s=now_s)
    assert merged(once, said, now_s=now_s + 60) == once


def test_only_the_time_makes_no_difference() -> None:
    assert ready("True", 5.0).says_the_same_as(ready("True", 9.0))
    assert not ready("True", 5.0).says_the_same_as(ready("True", 5.0, "other words"))


@given(st.integers(0, 4_102_444_800))
def test_a_time_comes_back_in_whole_seconds(seconds: int) -> None:
    assert parse_time(format_time(seconds + 0.75)) == seconds


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("1970-01-01T00:00:00Z", 0.0),
        ("1970-01-01T00:00:00.250000Z", 0.25),
        ("1970-01-01T01:00:00+01:00", 0.0),
        ("1970-01-01T00:00:01", 1.0),
    ],
)
def test_times_that_others_write_are_read(text: str, seconds: float) -> None:
    assert parse_time(text) == seconds


@given(st.text() | st.none() | st.integers() | st.floats())
def test_what_is_no_time_is_none_and_no_error(value: object) -> None:
    seconds = parse_time(value)
    assert seconds is None or isinstance(value, str)
