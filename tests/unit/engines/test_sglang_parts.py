"""Where SGLang's host buffers lie: its ranks' shares of the lease, and the parts of a share."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hostprep.backing import MIB
from hostprep.engines.allocator import Allocation, Allocator, Requester, Share, share_of
from hostprep.engines.sglang import plugin
from hostprep.engines.sglang.plugin import (
    ENABLED,
    LocalRank,
    _forget_allocators,
    _row_bytes,
    local_rank_of,
    split_ranks,
)
from hostprep.errors import BadInputError

pytestmark = pytest.mark.unit

REQUESTER = Requester("SGLang", "--hicache-size")
PAGES = st.sampled_from([4096, 2 * MIB])


@given(
    page=PAGES,
    pages=st.integers(1, 200),
    first=st.integers(0, 3),
    steps=st.lists(st.tuples(st.booleans(), st.integers(1, 9 * MIB)), max_size=40),
)
def test_parts_never_overlap_and_stay_in_the_share(
    page: int, pages: int, first: int, steps: list[tuple[bool, int]]
) -> None:
    start, size = first * page, pages * page
    allocator = Allocator(Share(start, size, page, 1), requester=REQUESTER)
    out: list[Allocation] = []
    for takes, number in steps:
        if takes:
            free = allocator.free_bytes
            if -(-number // page) * page > free:
                with pytest.raises(BadInputError, match=str(free)):
                    allocator.allocate(number)
                assert allocator.free_bytes == free
                continue
            part = allocator.allocate(number)
            assert part.offset_bytes % page == part.size_bytes % page == 0
            assert number <= part.size_bytes < number + page
            assert start <= part.offset_bytes
            assert part.offset_bytes + part.size_bytes <= start + size
            for other in out:
                assert (
                    part.offset_bytes + part.size_bytes <= other.offset_bytes
                    or other.offset_bytes + other.size_bytes <= part.offset_bytes
                )
            out.append(part)
        elif out:
            gone = out.pop(number % len(out))
            allocator.free(gone)
            allocator.free(gone)  # a second time is no harm
    for part in out:
        allocator.free(part)
    assert allocator.free_bytes == size


def test_what_is_between_two_others_is_had_again_once_the_later_one_is_back() -> None:
    allocator = Allocator(Share(0, 8 * MIB, 2 * MIB, 1), requester=REQUESTER)
    first, second, third = (allocator.allocate(MIB) for _ in range(3))
    allocator.free(second)
    assert allocator.free_bytes == 2 * MIB
    allocator.free(third)
    assert allocator.free_bytes == 6 * MIB
    assert allocator.allocate(5 * MIB).offset_bytes == second.offset_bytes
    assert first.offset_bytes == 0


def test_an_exhausted_share_says_both_numbers() -> None:
    allocator = Allocator(Share(0, 8 * MIB, 2 * MIB, 1), requester=REQUESTER)
    allocator.allocate(5 * MIB)
    with pytest.raises(BadInputError) as caught:
        allocator.allocate(3 * MIB)
    assert caught.value.reason == "RegionTooSmall"
    assert caught.value.exit_code == 2
    for number in (3 * MIB, 2 * MIB, 8 * MIB):
        assert f"{number} bytes" in str(caught.value)
    with pytest.raises(BadInputError, match="of 0 bytes"):
        allocator.allocate(0)


@given(
    regions=st.integers(1, 4),
    shared=st.integers(1, 8),
    page=PAGES,
    pages=st.integers(8, 100),
)
def test_each_rank_has_a_share_of_its_own(regions: int, shared: int, page: int, pages: int) -> None:
    ranks = regions * shared
    seen = set()
    for index in range(ranks):
        region, rank = split_ranks(regions, LocalRank(index, ranks))
        share = share_of(pages * page, page, ranks=rank.count, index=rank.index)
        assert share.offset_bytes + share.size_bytes <= pages * page
        assert 0 <= region < regions
        seen.add((region, share.offset_bytes))
    assert len(seen) == ranks


def test_regions_that_the_ranks_cannot_share_evenly_are_refused() -> None:
    with pytest.raises(BadInputError, match=r"1 of 4 on this node finds 3 region") as caught:
        split_ranks(3, LocalRank(1, 4))
    assert caught.value.reason == "WrongCount"
    with pytest.raises(BadInputError):
        split_ranks(1, LocalRank(4, 4))


def _parallel(**fields: int | None) -> SimpleNamespace:
    given: dict[str, int | None] = {"nnodes": 1, "dp_size": 1, "dp_rank": None}
    return SimpleNamespace(**(given | fields))


@pytest.mark.parametrize(
    ("parallel", "rank"),
    [
        (_parallel(launch_world_size=1, launch_world_rank=0), LocalRank(0, 1)),
        (_parallel(launch_world_size=8, launch_world_rank=5), LocalRank(5, 8)),
        # Two nodes: each has its half of the world.
        (_parallel(launch_world_size=16, launch_world_rank=11, nnodes=2), LocalRank(3, 8)),
        # Three replicas of two ranks each.
        (
            _parallel(launch_world_size=2, launch_world_rank=1, dp_size=3, dp_rank=2),
            LocalRank(5, 6),
        ),
        # Attention data parallelism: groups within one world, whose number is none of a replica.
        (_parallel(launch_world_size=4, launch_world_rank=3, dp_rank=3), LocalRank(3, 4)),
        (SimpleNamespace(), LocalRank(0, 1)),
    ],
)
def test_a_rank_is_told_by_what_sglang_publishes(
    parallel: SimpleNamespace, rank: LocalRank
) -> None:
    assert local_rank_of(parallel) == rank


def test_chunks_end_where_no_copy_straddles() -> None:
    layer_first = (2, 32, 1024, 8, 128)
    assert _row_bytes(layer_first, 2, "kernel") == 0
    assert _row_bytes(layer_first, 2, "direct") == 1024 * 8 * 128 * 2, "one layer's keys"
    assert _row_bytes(layer_first, 2, "") == _row_bytes(layer_first, 2, "direct")
    latents = (61, 4096, 1, 576)
    assert _row_bytes(latents, 2, "kernel") == 0
    assert _row_bytes(latents, 2, "direct") == 4096 * 576 * 2
    assert _row_bytes((7 * MIB,), 1, "kernel") == 0
    assert _row_bytes((7 * MIB,), 1, "direct") == 7 * MIB


@pytest.mark.parametrize("io_backend", ["kernel", "direct", ""])
def test_no_page_of_scales_is_cut_whoever_copies_it(io_backend: str) -> None:
    """Kernels gather them, and one copy moves a page of all layers (mha_mxfp8.py)."""
    assert _row_bytes((4096, 36, 1024), 1, io_backend) == 36 * 1024
    assert _row_bytes((4096, 36, 1, 1024), 1, io_backend) == 36 * 1024


@pytest.mark.parametrize("value", [None, "", "0"])
def test_a_plugin_that_nobody_asks_for_does_not_even_look_for_sglang(
    value: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOSTPREP_LEASE", "1ea5e")
    monkeypatch.delenv(ENABLED, raising=False)
    if value is not None:
        monkeypatch.setenv(ENABLED, value)
    plugin.load()


def test_one_that_is_asked_for_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ENABLED, "1")
    with pytest.raises(ModuleNotFoundError, match="sglang"):
        plugin.load()


def test_a_device_that_sglang_has_seen_before_gets_our_memory_too() -> None:
    def own() -> None:
        """Stand for the function that is about to be wrapped."""

    def other() -> None:
        """Stand for another device's."""

    table = {"cpu": own, "npu": other, "cuda": own}
    _forget_allocators(SimpleNamespace(alloc_with_host_register=own, ALLOC_MEMORY_FUNCS=table))
    assert table == {"npu": other}
    _forget_allocators(SimpleNamespace(alloc_with_host_register=own))
