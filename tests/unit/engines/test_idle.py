"""What an engine leaves of what a sized pool has for it: reckoned by the handoff alone."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hostprep.backing import GIB
from hostprep.engines.idle import SizedRegion, idle_memory

pytestmark = pytest.mark.unit


def _regions(count: int, per_engine: object, size_bytes: int = GIB) -> list[SizedRegion]:
    layout: dict[str, Any] = {"model": "a-model"}
    if per_engine is not None:
        layout["regions_per_engine"] = per_engine
    return [SizedRegion(f"node0-{index}", size_bytes, layout) for index in range(count)]


def _names(regions: list[SizedRegion], first: int = 0, count: int | None = None) -> list[str]:
    return [region.name for region in regions][first : None if count is None else first + count]


def test_one_of_eight_regions_leaves_seven_eighths() -> None:
    regions = _regions(8, 8, 75 * GIB)
    idle = idle_memory("kv", regions, ["node0-0"], free=_names(regions, 1))
    assert idle is not None
    assert (idle.size_bytes, idle.meant_bytes) == (7 * 75 * GIB, 8 * 75 * GIB)
    assert idle.regions == tuple(_names(regions, 1))
    said = idle.describe()
    assert said.startswith("525 GiB of the 600 GiB that pool kv has for this engine lie idle")
    assert "claim 8 regions, this one has 1" in said
    assert "node0-1, node0-2, node0-3, node0-4 and 3 more" in said
    assert "--integration vllm-offloading" in idle.remedy("vllm-offloading")
    assert "--count" not in idle.remedy("vllm-offloading")
    assert "--count 8" in idle.remedy("lmcache")
    assert "--count 8" in idle.remedy()
    assert idle.remedy().endswith("--integration and the engine's name in `hostprep engines`")
    assert idle.remedy("lmcache").endswith("--integration lmcache")
    assert idle.to_json()["idle_bytes"] == 525 * GIB


def test_an_engine_that_claims_what_was_meant_for_one_leaves_nothing() -> None:
    regions = _regions(4, 1)
    assert idle_memory("kv", regions, ["node0-0"], free=_names(regions, 1)) is None
    pairs = _regions(4, 2)
    assert idle_memory("kv", pairs, _names(pairs, 0, 2), free=_names(pairs, 2)) is None


def test_regions_that_others_hold_are_not_idle() -> None:
    regions = _regions(8, 8)
    assert idle_memory("kv", regions, ["node0-0"], free=[]) is None
    idle = idle_memory("kv", regions, ["node0-0"], free=["node0-5"])
    assert idle is not None
    assert idle.regions == ("node0-5",)
    for engine in ("lmcache", None):
        assert "--count" not in idle.remedy(engine), "there are no eight regions to claim"
        assert "size the pool again" in idle.remedy(engine)


@pytest.mark.parametrize("per_engine", [None, 0, -1, True, "8", 2.0, 1 << 40])
def test_a_pool_that_does_not_say_for_how_many_is_not_judged(per_engine: object) -> None:
    regions = _regions(8, per_engine)
    assert idle_memory("kv", regions, ["node0-0"], free=_names(regions, 1)) is None


def test_a_pool_that_was_not_sized_is_not_judged() -> None:
    regions = [SizedRegion("node0-0", GIB, None), SizedRegion("node0-1", GIB, None)]
    assert idle_memory("kv", regions, ["node0-0"], free=["node0-1"], used_bytes=1) is None


def test_what_an_engine_is_told_not_to_use_counts_as_well() -> None:
    regions = _regions(1, 1, 100 * GIB)
    assert idle_memory("kv", regions, ["node0-0"], free=[], used_bytes=90 * GIB) is None
    idle = idle_memory("kv", regions, ["node0-0"], free=[], used_bytes=89 * GIB)
    assert idle is not None
    assert idle.within_bytes == 11 * GIB
    assert "11 GiB within node0-0" in idle.describe()
    assert "leave out the option" in idle.remedy("vllm")


@given(
    count=st.integers(1, 12),
    per_engine=st.integers(1, 12),
    claims=st.integers(1, 12),
    used_tenths=st.none() | st.integers(0, 12),
)
def test_never_more_than_there_is_and_never_for_a_tenth(
    count: int, per_engine: int, claims: int, used_tenths: int | None
) -> None:
    regions = _regions(count, per_engine)
    claimed = _names(regions, 0, claims)
    used_bytes = None if used_tenths is None else len(claimed) * GIB * used_tenths // 10
    idle = idle_memory("kv", regions, claimed, free=_names(regions), used_bytes=used_bytes)
    missing = max(0, min(per_engine, count) - len(claimed))
    within = 0 if used_bytes is None else max(0, len(claimed) * GIB - used_bytes)
    share = (missing * GIB + within) / ((len(claimed) + missing) * GIB)
    assert (idle is None) is (share <= 0.1)
    if idle is not None:
        assert len(idle.regions) == missing
        assert not set(idle.regions) & set(claimed)
        assert idle.size_bytes <= idle.meant_bytes <= count * GIB
