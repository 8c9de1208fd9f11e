"""Where vLLM's host tensors lie in a region, and who may use the tier while ranks register."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hostprep.backing import GIB, MIB
from hostprep.engines.allocator import share_of
from hostprep.engines.vllm.simple_tier import Run, TierGate, launch_apart, lay_out
from hostprep.errors import BadInputError

pytestmark = pytest.mark.unit

KIB = 1024
PAGES = st.sampled_from((4 * KIB, 2 * MIB, GIB))


def test_tensors_with_equal_rows_follow_one_another_in_one_run() -> None:
    share = share_of(64 * MIB, 2 * MIB, ranks=2, index=1)
    offsets, (run,) = lay_out({"a": 8 * KIB, "b": 8 * KIB}, rows=1000, share=share)
    assert offsets == {"a": 32 * MIB, "b": 32 * MIB + 8000 * KIB}
    assert (run.offset_bytes, run.size_bytes, run.row_bytes) == (32 * MIB, 16 * MIB, 8 * KIB)


def test_rows_of_another_size_begin_on_a_page_of_their_own() -> None:
    """Latent rows and an indexer's, say."""
    rows = {"l0": 41984, "l0.indexer": 8448, "l1": 41984, "l1.indexer": 8448}
    offsets, runs = lay_out(rows, rows=100, share=share_of(64 * MIB, 2 * MIB, ranks=1, index=0))
    assert list(offsets) == list(rows)
    indexer, latent = runs
    assert (indexer.offset_bytes, indexer.row_bytes) == (0, 8448)
    assert (latent.offset_bytes, latent.row_bytes) == (2 * MIB, 41984)
    assert offsets["l1"] == 2 * MIB + 4198400


def test_a_region_that_is_too_small_is_refused_with_what_would_do() -> None:
    share = share_of(16 * MIB, 4 * KIB, ranks=2, index=0)
    with pytest.raises(BadInputError) as caught:
        lay_out({"a": MIB}, rows=9, share=share)
    message = str(caught.value)
    for number in (9 * MIB, 8 * MIB, 16 * MIB, 18 * MIB):
        assert str(number) in message
    assert caught.value.reason == "RegionTooSmall"


def test_what_its_remedy_says_fits() -> None:
    """A region of exactly what the engine asks for, and rows of two sizes: a page is missing."""
    rows = {"a": 2500, "b": 1500}
    share = share_of(8 * MIB, 2 * MIB, ranks=1, index=0)
    with pytest.raises(BadInputError, match=f"cpu_bytes_to_use to {6 * MIB} or less"):
        lay_out(rows, rows=8 * MIB // 4000, share=share)
    _, runs = lay_out(rows, rows=6 * MIB // 4000, share=share)
    assert _end_bytes(runs) <= 8 * MIB


@pytest.mark.parametrize("index", [-1, 2])
def test_a_rank_that_cannot_be_is_refused(index: int) -> None:
    with pytest.raises(BadInputError):
        share_of(64 * MIB, 2 * MIB, ranks=2, index=index)


@pytest.mark.parametrize("rows", [{}, {"a": 0}])
def test_nothing_to_place_is_refused(rows: dict[str, int]) -> None:
    with pytest.raises(BadInputError):
        lay_out(rows, rows=1, share=share_of(MIB, 4 * KIB, ranks=1, index=0))


@given(
    st.lists(st.integers(1, 300 * KIB), min_size=1, max_size=12),
    st.integers(1, 5000),
    PAGES,
    st.integers(1, 8),
    st.data(),
)
def test_tensors_never_overlap_and_runs_are_whole_pages(
    sizes: list[int], rows: int, page: int, ranks: int, data: st.DataObject
) -> None:
    named = {f"t{at}": size for at, size in enumerate(sizes)}
    capacity = rows * sum(sizes) + len(sizes) * page
    share = share_of(-(-capacity // page) * page * ranks, page, ranks=ranks, index=ranks - 1)
    offsets, runs = lay_out(named, rows=rows, share=share)
    spans = sorted((at, at + rows * named[name]) for name, at in offsets.items())
    assert all(before[1] <= after[0] for before, after in itertools.pairwise(spans))
    assert all(run.offset_bytes % page == run.size_bytes % page == 0 for run in runs)
    assert _end_bytes(runs) <= share.offset_bytes + share.size_bytes
    # Whatever the sizes are: each row lies in one run, at a multiple of the row from its start.
    name = data.draw(st.sampled_from(sorted(named)))
    (run,) = (run for run in runs if run.row_bytes == named[name])
    assert (offsets[name] - run.offset_bytes) % run.row_bytes == 0


def _end_bytes(runs: tuple[Run, ...]) -> int:
    return max(run.offset_bytes + run.size_bytes for run in runs)


def test_an_early_request_stays_out_for_life_and_a_later_one_does_not() -> None:
    gate = TierGate(1, None)
    assert not gate.admits("early")
    gate.report_all({0: ("Ready", "")})
    assert gate.is_open
    assert not gate.admits("early")
    assert gate.admits("late")
    gate.forget("early")
    assert gate.admits("early")


def test_nothing_is_kept_of_requests_once_the_tier_is_given_up(
    caplog: pytest.LogCaptureFixture,
) -> None:
    gate = TierGate(2, None)
    gate.report_all({1: ("Failed", "out of memory"), 0: ("Ready", "")})
    gate.report_all({1: ("Ready", "")})
    assert gate.is_decided
    assert not any(gate.admits(f"r{number}") for number in range(100))
    assert gate._early == set()
    assert "out of memory" in gate.why
    assert len([text for text in caplog.messages if "GPU memory alone" in text]) == 1


def test_closing_it_is_no_failure(caplog: pytest.LogCaptureFixture) -> None:
    gate = TierGate(1, None)
    gate.close()
    assert not gate.admits("a")
    assert caplog.messages == []


@given(
    pairs=st.lists(st.tuples(st.integers(0, 60), st.integers(0, 60)), max_size=40),
    is_store=st.booleans(),
)
def test_no_call_copies_neighbours_in_host_memory_and_all_are_copied(
    pairs: list[tuple[int, int]], *, is_store: bool
) -> None:
    calls: list[tuple[Any, ...]] = []
    events: list[Any] = []

    def launch(*arguments: Any, wait_event: str) -> None:
        calls.append(arguments)
        assert wait_event == "event"

    sources, targets = ([pair[side] for pair in pairs] for side in (0, 1))
    launch_apart(launch, sources, targets, is_store, 7, events, wait_event="event")
    copied = [pair for src, dst, *_ in calls for pair in zip(src, dst, strict=True)]
    assert sorted(copied) == sorted(pairs)
    for src, dst, *rest in calls:
        host = set(dst if is_store else src)
        assert not host & {block + 1 for block in host}
        assert rest[:2] == [is_store, 7]
    assert [call[4] is events for call in calls] == [False] * (len(calls) - 1) + [True]
