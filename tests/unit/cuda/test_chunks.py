"""Chunks: they tile the slice, end where copies may not straddle, and follow the clock."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hostprep.backing import GIB, KIB, MIB
from hostprep.cuda.chunks import ChunkPolicy, check_slice, next_chunk_bytes
from hostprep.errors import BadInputError
from hostprep.known_issues import ONE_CALL_LIMIT_BYTES

pytestmark = pytest.mark.unit

PAGES = st.sampled_from([4 * KIB, 64 * KIB, 2 * MIB, GIB])
ROWS = st.one_of(
    st.just(0),
    st.integers(1, 64).map(lambda n: n * 4 * KIB),
    st.integers(1, 16).map(lambda n: n * 3 * MIB),
    st.sampled_from([576 * KIB, 20480, 81920, GIB, 600 * MIB]),
)
DURATIONS = st.floats(min_value=0.0, max_value=1e6, allow_nan=False)


@st.composite
def policies(draw: st.DrawFn) -> ChunkPolicy:
    least = draw(st.integers(1, 256 * MIB))
    return ChunkPolicy(
        first_bytes=draw(st.integers(1, 64 * GIB)),
        least_bytes=least,
        most_bytes=draw(st.integers(least, GIB)),
        target_s=draw(st.floats(min_value=1e-3, max_value=10)),
        page_bytes=draw(PAGES),
        row_bytes=draw(ROWS),
    )


def _walk(policy: ChunkPolicy, size_bytes: int, durations: list[float]) -> list[int]:
    """Return the chunks of a slice whose calls last so long, over and over."""
    chunks: list[int] = []
    offset, last, last_s = 0, 0, 0.0
    while chunk := next_chunk_bytes(
        policy, offset_bytes=offset, end_bytes=size_bytes, last_bytes=last, last_s=last_s
    ):
        last_s = durations[len(chunks) % len(durations)]
        chunks.append(chunk)
        offset, last = offset + chunk, chunk
    return chunks


@given(policies(), st.integers(1, 300), st.lists(DURATIONS, min_size=1, max_size=8))
def test_chunks_tile_the_slice_and_end_on_pages_and_rows(
    policy: ChunkPolicy, pages: int, durations: list[float]
) -> None:
    size_bytes = pages * max(policy.page_bytes, policy.least_bytes // policy.page_bytes * 4 * KIB)
    size_bytes -= size_bytes % policy.page_bytes
    chunks = _walk(policy, size_bytes, durations)

    assert sum(chunks) == size_bytes
    ends = [sum(chunks[: n + 1]) for n in range(len(chunks) - 1)]
    for end in ends:
        assert end % policy.page_bytes == 0
        assert policy.row_bytes == 0 or end % policy.row_bytes == 0


@given(policies(), st.lists(DURATIONS, min_size=1, max_size=8))
def test_chunks_stay_within_the_policy_and_change_by_two_at_most(
    policy: ChunkPolicy, durations: list[float]
) -> None:
    step = policy.step_bytes
    chunks = _walk(policy, 200 * max(step, policy.least_bytes // 2), durations)
    for chunk in chunks:
        assert chunk <= max(policy.most_bytes, step)
    for chunk in chunks[:-1]:
        assert chunk >= min(policy.least_bytes, policy.most_bytes // step * step or step)
    for before, after in itertools.pairwise(chunks[:-1]):
        assert before / 2 <= after <= before * 2


@given(policies(), st.floats(min_value=1e-3, max_value=1e3))
def test_a_slower_call_never_makes_the_next_chunk_larger(
    policy: ChunkPolicy, last_s: float
) -> None:
    last = 10 * policy.step_bytes

    def after(seconds: float) -> int:
        return next_chunk_bytes(
            policy, offset_bytes=0, end_bytes=1 << 50, last_bytes=last, last_s=seconds
        )

    assert after(last_s * 1.5) <= after(last_s)


def test_the_size_settles_where_a_call_lasts_as_long_as_it_should() -> None:
    rate = 4 * GIB  # bytes a second: 0.05 s are 204.8 MiB
    policy = ChunkPolicy(first_bytes=64 * MIB, page_bytes=2 * MIB)
    last, last_s = 0, 0.0
    for _ in range(6):
        last = next_chunk_bytes(
            policy, offset_bytes=0, end_bytes=1 << 40, last_bytes=last, last_s=last_s
        )
        last_s = last / rate
    assert last == 204 * MIB


def test_an_advice_beyond_the_bounds_is_brought_within() -> None:
    def first(policy: ChunkPolicy) -> int:
        return next_chunk_bytes(policy, offset_bytes=0, end_bytes=1 << 40)

    assert first(ChunkPolicy(first_bytes=64 * GIB)) == 480 * MIB
    assert first(ChunkPolicy(first_bytes=1)) == 64 * MIB
    assert first(ChunkPolicy(first_bytes=256 * MIB)) == 256 * MIB


def test_a_row_larger_than_the_largest_chunk_is_one_chunk() -> None:
    policy = ChunkPolicy(first_bytes=256 * MIB, page_bytes=2 * MIB, row_bytes=700 * MIB)
    assert _walk(policy, 2100 * MIB, [1.0]) == [700 * MIB] * 3
    huge = ChunkPolicy(first_bytes=256 * MIB, page_bytes=GIB)
    assert _walk(huge, 3 * GIB, [1.0]) == [GIB] * 3


def test_a_policy_without_end_is_refused() -> None:
    with pytest.raises(BadInputError):
        ChunkPolicy(first_bytes=0)
    with pytest.raises(BadInputError):
        ChunkPolicy(first_bytes=1, target_s=float("nan"))
    with pytest.raises(BadInputError, match="not below the smallest"):
        ChunkPolicy(first_bytes=1, least_bytes=2 * MIB, most_bytes=MIB)


def test_a_good_slice_passes() -> None:
    check_slice(GIB, 2 * MIB, 512 * MIB, 512 * MIB, 0)
    check_slice(GIB, 2 * MIB, 0, GIB, 3 * MIB)


@pytest.mark.parametrize(
    ("offset", "size", "row", "words"),
    [
        (0, 0, 0, "a size above 0"),
        (-4096, MIB, 0, "an offset of 0 or more"),
        (0, MIB, -1, "rows of 0 bytes"),
        (512 * MIB, 513 * MIB, 0, "at most 536870912 bytes are left"),
        (2 * GIB, 4096, 0, "at most 0 bytes are left"),
        (4096, MIB, 0, r"register \[0, 2097152\)"),
        (0, 3 * MIB, 0, r"register \[0, 4194304\)"),
    ],
)
def test_a_bad_slice_is_refused_with_what_to_do(
    offset: int, size: int, row: int, words: str
) -> None:
    with pytest.raises(BadInputError, match=words) as caught:
        check_slice(GIB, 2 * MIB, offset, size, row)
    assert caught.value.reason == "BadSlice"


def test_rows_that_leave_no_end_for_a_chunk_are_refused() -> None:
    with pytest.raises(BadInputError, match="pad rows") as caught:
        check_slice(2 * ONE_CALL_LIMIT_BYTES, 2 * MIB, 0, 2 * ONE_CALL_LIMIT_BYTES, 128 * MIB + 1)
    assert caught.value.reason == "BadRows"
