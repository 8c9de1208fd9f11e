"""Where SGLang's host buffers lie: its ranks' shares of the lease, and the parts of a share."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hostprep.backing import MIB
from hostprep.engines.sglang import plugin
from hostprep.engines.sglang.place import Place, place_in, place_of
from hostprep.engines.sglang.plugin import ASKED, _forget_allocators, _row_bytes
from hostprep.engines.shares import Asker, Part, Parts
from hostprep.engines.vllm.simple_layout import share_of
from hostprep.errors import BadInputError

pytestmark = pytest.mark.unit

ASKER = Asker("SGLang", "--hicache-size")
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
    parts = Parts(start, size, page, asker=ASKER)
    out: list[Part] = []
    for takes, number in steps:
        if takes:
            free = parts.free_bytes
            if -(-number // page) * page > free:
                with pytest.raises(BadInputError, match=str(free)):
                    parts.take(number)
                assert parts.free_bytes == free
                continue
            part = parts.take(number)
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
            parts.give_back(gone)
            parts.give_back(gone)  # a second time is no harm
    for part in out:
        parts.give_back(part)
    assert parts.free_bytes == size


def test_what_is_between_two_others_is_had_again_once_the_later_one_is_back() -> None:
    parts = Parts(0, 8 * MIB, 2 * MIB, asker=ASKER)
    first, second, third = (parts.take(MIB) for _ in range(3))
    parts.give_back(second)
    assert parts.free_bytes == 2 * MIB
    parts.give_back(third)
    assert parts.free_bytes == 6 * MIB
    assert parts.take(5 * MIB).offset_bytes == second.offset_bytes
    assert first.offset_bytes == 0


def test_an_exhausted_share_says_both_numbers() -> None:
    parts = Parts(0, 8 * MIB, 2 * MIB, asker=ASKER)
    parts.take(5 * MIB)
    with pytest.raises(BadInputError) as caught:
        parts.take(3 * MIB)
    assert caught.value.reason == "RegionTooSmall"
    assert caught.value.exit_code == 2
    for number in (3 * MIB, 2 * MIB, 8 * MIB):
        assert f"{number} bytes" in str(caught.value)
    with pytest.raises(BadInputError, match="of 0 bytes"):
        parts.take(0)


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
        region, place = place_in(regions, Place(index, ranks))
        share = share_of(pages * page, page, ranks=place.count, index=place.index)
        assert share.offset_bytes + share.size_bytes <= pages * page
        assert 0 <= region < regions
        seen.add((region, share.offset_bytes))
    assert len(seen) == ranks


def test_regions_that_the_ranks_cannot_share_evenly_are_refused() -> None:
    with pytest.raises(BadInputError, match=r"1 of 4 on this node finds 3 region") as caught:
        place_in(3, Place(1, 4))
    assert caught.value.reason == "WrongCount"
    with pytest.raises(BadInputError):
        place_in(1, Place(4, 4))


def _parallel(**fields: int | None) -> SimpleNamespace:
    given: dict[str, int | None] = {"nnodes": 1, "dp_size": 1, "dp_rank": None}
    return SimpleNamespace(**(given | fields))


@pytest.mark.parametrize(
    ("parallel", "place"),
    [
        (_parallel(launch_world_size=1, launch_world_rank=0), Place(0, 1)),
        (_parallel(launch_world_size=8, launch_world_rank=5), Place(5, 8)),
        # Two nodes: each has its half of the world.
        (_parallel(launch_world_size=16, launch_world_rank=11, nnodes=2), Place(3, 8)),
        # Three replicas of two ranks each.
        (_parallel(launch_world_size=2, launch_world_rank=1, dp_size=3, dp_rank=2), Place(5, 6)),
        # Attention data parallelism: groups within one world, whose number is none of a replica.
        (_parallel(launch_world_size=4, launch_world_rank=3, dp_rank=3), Place(3, 4)),
        (SimpleNamespace(), Place(0, 1)),
    ],
)
def test_a_rank_is_told_by_what_sglang_publishes(parallel: SimpleNamespace, place: Place) -> None:
    assert place_of(parallel) == place


def test_chunks_end_where_no_copy_straddles() -> None:
    layer_first = (2, 32, 1024, 8, 128)
    assert _row_bytes(layer_first, 2, "kernel") == 0
    assert _row_bytes(layer_first, 2, "direct") == 32 * 1024 * 8 * 128 * 2
    assert _row_bytes(layer_first, 2, "") == _row_bytes(layer_first, 2, "direct")
    assert _row_bytes((7 * MIB,), 1, "kernel") == 7 * MIB


@pytest.mark.parametrize("value", [None, "", "0"])
def test_a_plugin_that_nobody_asks_for_does_not_even_look_for_sglang(
    value: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOSTPREP_LEASE", "1ea5e")
    monkeypatch.delenv(ASKED, raising=False)
    if value is not None:
        monkeypatch.setenv(ASKED, value)
    plugin.load()


def test_one_that_is_asked_for_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ASKED, "1")
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
