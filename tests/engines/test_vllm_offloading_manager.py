"""The scheduler's half of the plugin behind the gate: vLLM's own manager, or ours of slots."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.engines.playing import asking

pytestmark = pytest.mark.engines

Play = Callable[..., dict[str, Any]]
INNER = pytest.mark.parametrize("inner", ["vllm", "slots"])


@pytest.fixture(scope="module")
def play() -> Iterator[Play]:
    """Play rounds in vLLM's interpreter, with `room` those of offloading_plays.py."""
    with asking("manager_rounds") as ask:

        def play(steps: list[Any], inner: str = "vllm", **scene: Any) -> dict[str, Any]:
            return ask({"inner": inner, "steps": steps, **scene})

        yield play


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


@INNER
@given(before=_STEPS, after=_STEPS)
def test_no_block_is_stored_without_its_predecessor(
    play: Play, inner: str, before: list[Any], after: list[Any]
) -> None:
    last = [["new", "abcdef"], ["step", -1, 3], ["step", -1, 3]]
    seen = play([*before, ["open"], *after, *last], inner)
    assert seen["orphans"] == []
    assert seen["refused"] == 0
    assert "abcdef" in seen["held"]  # and what comes after the opening is stored, all of it


@INNER
@given(steps=_STEPS)
def test_while_it_is_closed_nothing_is_found_and_nothing_is_stored(
    play: Play, inner: str, steps: list[Any]
) -> None:
    seen = play(steps, inner)
    assert set(seen["answers"]) <= {"MISS"}
    assert (seen["stored"], seen["refused"]) == ([], 0)


def test_a_request_seen_while_it_was_closed_stays_in_gpu_memory(play: Play) -> None:
    seen = play([["new", "abcd"], ["step", 0, 2], ["open"], ["step", 0, 2]])
    assert (seen["stored"], seen["state"]) == ([], "Open")


def test_one_seen_before_it_is_scheduled_is_no_exception(play: Play) -> None:
    assert play([["new", "ab"], ["open"], ["step", 0, 2]])["stored"] == []


@INNER
def test_a_later_request_stores_and_hits_the_same_prefix(play: Play, inner: str) -> None:
    seen = play(
        [
            ["new", "abcd"], ["step", 0, 4], ["finish", 0], ["open"],
            ["new", "abcd"], ["step", 0, 4], ["complete", 0], ["finish", 0],
            ["new", "abcd"], ["step", 0, 1],
        ],
        inner,
    )  # fmt: skip
    assert seen["stored"] == ["a", "ab", "abc", "abcd"]
    assert seen["answers"] == ["MISS", "MISS", "HIT", "HIT", "HIT", "HIT"]


def test_degraded_it_stays_so(play: Play) -> None:
    seen = play([["fail"], ["open"], ["new", "ab"], ["step", 0, 2]])
    assert (seen["state"], seen["stored"], seen["answers"]) == ("Degraded", [], ["MISS"])


def test_the_engine_takes_one_step_by_itself(play: Play) -> None:
    assert play([])["pending"] is True
    assert play([["end"]])["pending"] is False


_WHICH = st.integers(0, 7)
_TURN = st.one_of(
    st.tuples(st.just("new"), st.text("ab", min_size=1, max_size=6)),
    st.tuples(st.just("look"), _WHICH, st.booleans(), st.sampled_from([0, 0, 0, 1, 2])),
    st.tuples(st.just("loaded"), _WHICH),
    st.tuples(st.just("run"), _WHICH, st.integers(1, 4)),
    st.tuples(st.just("stored"), _WHICH),
    st.tuples(st.just("finish"), _WHICH),
    st.tuples(st.just("end")),
    st.tuples(st.just("reset")),
)
_TURNS = st.lists(_TURN, max_size=80)


_SCENE = st.fixed_dictionaries({"windows": st.booleans(), "positions": st.booleans()})


@INNER
@settings(max_examples=300)
@given(steps=_TURNS, room=st.integers(1, 12), scene=_SCENE)
def test_a_manager_says_what_is_there_and_evicts_what_it_may(
    play: Play, inner: str, steps: list[Any], room: int, scene: dict[str, bool]
) -> None:
    """Checked at every step, with slots also against the rule of who is overtaken."""
    seen = play(steps, inner, room=room, **scene)
    assert inner == "vllm" or seen["overtaken"] == 0


_KILLS = st.lists(
    st.one_of(
        st.lists(st.one_of(_TURN, st.tuples(st.just("failed"), _WHICH)), max_size=20),
        st.just([["killed"]]),
        st.just([["later"]]),
    ),
    max_size=10,
)


@settings(max_examples=300)
@given(lives=_KILLS, room=st.integers(1, 12), scene=_SCENE)
def test_nor_after_kills_does_it_say_what_is_not_there(
    play: Play, lives: list[list[Any]], room: int, scene: dict[str, bool]
) -> None:
    """Each next one believes what was recorded, all of it, and leaves alone what was begun."""
    play([step for life in lives for step in life], "slots", room=room, keeps=True, **scene)


@settings(max_examples=300)
@given(steps=_TURNS, scene=_SCENE)
def test_with_room_for_all_slots_answer_as_vllms_own(
    play: Play, steps: list[Any], scene: dict[str, bool]
) -> None:
    ours, theirs = (play(steps, inner, room=4096, **scene) for inner in ("slots", "vllm"))
    assert ours == theirs


def _stored(*paths: str) -> list[Any]:
    """Requests that are stored one after the other, and finished."""
    each = [["look", 0, True], ["run", 0, 99], ["end"], ["stored", 0], ["finish", 0]]
    return [step for path in paths for step in (["new", path], *each)]


_OVERTAKING = [
    *_stored("aaaa", "bbbb"),
    ["new", "aaaa"], ["look", 0, False],  # it has to wait, for GPU memory say
    ["new", "cccc"], ["look", 1, True], ["run", 0, 4], ["end"], ["stored", 0],
    ["look", 0, True],
]  # fmt: skip


@pytest.mark.parametrize("windows", [False, True])
def test_vllms_own_manager_evicts_what_it_has_just_told_of(play: Play, windows: bool) -> None:
    """The fourth seed: counted, overtaken by another one's blocks, gone."""
    seen = play(_OVERTAKING, "vllm", room=16 if windows else 8, windows=windows)
    assert seen["hits"] == [0, 0, 4, 0, 0]
    assert seen["overtaken"] >= 4
    assert {"a/0", "aa/0", "aaa/0", "aaaa/0"} <= set(seen["evicted"])


@pytest.mark.parametrize("windows", [False, True])
@pytest.mark.parametrize("positions", [False, True])
def test_with_slots_what_was_told_is_there_when_it_is_to_be_loaded(
    play: Play, windows: bool, positions: bool
) -> None:
    """Others go, and of a group with a window what it was not told of."""
    room = 16 if windows else 8
    seen = play(_OVERTAKING, "slots", room=room, windows=windows, positions=positions)
    assert seen["hits"] == [0, 0, 4, 0, 4]
    assert seen["overtaken"] == 0
    assert len(seen["evicted"]) == room // 2


def test_behind_what_is_missing_nothing_is_stored_again_that_is_there(play: Play) -> None:
    """A store's keys are of several groups, and from anywhere in a sequence."""
    again = [["new", "abcd"], ["look", 0, True], ["loaded", 0], ["run", 0, 4]]
    seen = play([*_stored("abcd", "x"), *again], "slots", room=8, windows=True)
    assert seen["evicted"][:2] == ["abcd/1", "abcd/0"]  # the last tokens' of all groups first
    assert seen["stored"][-2:] == ["abcd/0", "abcd/1"]


def test_waiting_requests_never_keep_others_from_storing_and_the_latest_gives_way_first(
    play: Play,
) -> None:
    """All slots are claimed by three that wait, and are looked up at every step, as vLLM does."""
    look = [["look", number, False] for number in range(3)]
    steps = _stored("aaaa", "bbbb", "cccc")
    steps += [*(["new", path] for path in ("aaaa", "bbbb", "cccc")), *look]
    for path in ("d" * 4, "e" * 8, "f" * 12):
        steps += [["new", path], ["look", 3, True], ["run", 0, 1], ["end"], ["stored", 0], *look]
        steps += [["run", 0, 99], ["end"], ["stored", 0], ["finish", 3], *look]
    seen = play(steps, "slots", room=12)
    assert seen["refused"] == 0
    after = [seen["hits"][at : at + 3] for at in (3, 7, 10, 14, 17, 21, 24)]
    assert after == [[4, 4, 4], [4, 4, 3], [4, 4, 1], [4, 4, 1], [4, 1, 0], [4, 1, 0], [1, 0, 0]]


def test_waiting_requests_give_nothing_up_for_a_store_that_lacks_slots_all_the_same(
    play: Play,
) -> None:
    """Three wait for the same four chunks, and three are being stored: five of eight can be had."""
    offer = [["run", -1, 6], ["end"]]
    steps = [*_stored("aaaa"), *[["new", "aaaa"]] * 3]
    steps += [["look", number, False] for number in range(3)]
    steps += [["new", "bbb"], ["look", 3, True], *offer]
    steps += [["new", "cccccc"], ["look", 3, True], *offer]
    # Once the first has ended the others claim them still: what is claimed is counted then.
    seen = play([*steps, ["finish", 0], *offer], "slots", room=8)
    assert (seen["refused"], seen["overtaken"]) == (2, 0)
    assert "a/0" not in seen["evicted"]


@INNER
def test_a_finished_requests_last_chunks_are_evicted_first(play: Play, inner: str) -> None:
    """It stored them one by one; without the first one the others are never reached."""
    turn = [["run", 0, 1], ["end"], ["stored", 0]]
    steps = [["new", "aaaa"], ["look", 0, True], *turn * 4, ["finish", 0], *_stored("bb")]
    assert sorted(play(steps, inner, room=4)["evicted"]) == ["aaa/0", "aaaa/0"]


@INNER
def test_nor_is_it_otherwise_while_its_last_chunks_are_being_copied(play: Play, inner: str) -> None:
    """They can be loaded last of all, and are no more recent for that."""
    turn = [["run", 0, 2], ["end"]]
    steps = [["new", "aaaa"], ["look", 0, True], *turn, ["stored", 0], *turn, ["finish", 0]]
    steps += [["stored", 0], *_stored("bb")]
    assert sorted(play(steps, inner, room=4)["evicted"]) == ["aaa/0", "aaaa/0"]


@INNER
def test_a_copy_that_ends_late_makes_no_request_younger_than_one_that_ended_later(
    play: Play, inner: str
) -> None:
    steps = [["new", "aa"], ["look", 0, True], ["run", 0, 2], ["end"], ["finish", 0]]
    steps += [["new", "bb"], ["look", 0, True], ["run", 0, 2], ["end"], ["stored", 1]]
    steps += [["finish", 0], ["stored", 0], *_stored("cc")]
    assert sorted(play(steps, inner, room=4)["evicted"]) == ["a/0", "aa/0"]


def test_a_copy_that_a_reset_forgot_is_waited_for_by_no_finished_request(play: Play) -> None:
    """Each play ends with a look at what is noted of finished requests."""
    turn = [["look", 0, True], ["run", 0, 2], ["end"]]
    play([["new", "aa"], *turn, ["reset"], ["finish", 0]], "slots", room=4)


@INNER
def test_what_a_finished_request_neither_loaded_nor_offered_is_not_refreshed(
    play: Play, inner: str
) -> None:
    """A window's chunks that it passed by: it was looked up from the third chunk on."""
    steps = [*_stored("aaaa", "bb"), ["new", "aaaa"], ["look", 0, True, 2], ["loaded", 0]]
    steps += [["finish", 0], *_stored("cc")]
    seen = play(steps, inner, room=6)
    assert sorted(seen["evicted"]) == ["a/0", "aa/0"]


@INNER
def test_what_was_not_copied_is_not_there_and_is_stored_again(play: Play, inner: str) -> None:
    turn = [["look", 0, True], ["run", 0, 99], ["end"]]
    steps = [["new", "aaaa"], *turn, ["failed", 0], ["finish", 0], *_stored("aaaa", "aaaa")]
    seen = play(steps, inner, room=4)
    assert seen["hits"] == [0, 0, 4]
    assert seen["stored"] == ["a/0", "aa/0", "aaa/0", "aaaa/0"] * 2


def test_who_waits_and_is_never_scheduled_leaves_nothing_claimed(play: Play) -> None:
    """Each play ends with a look at the pool's claims."""
    for end in (["finish", 0], ["reset"], ["look", 0, True]):
        seen = play([*_stored("aaaa"), ["new", "aaaa"], ["look", 0, False], end], "slots", room=8)
        assert 4 in seen["hits"]
