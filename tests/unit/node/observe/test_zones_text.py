"""/proc/zoneinfo and /proc/buddyinfo."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hostprep.linux.numa import ZoneCounts, parse_zoneinfo
from hostprep.node.observe import HostRoot
from hostprep.node.observe.memory import observe_zones, parse_buddyinfo

pytestmark = pytest.mark.unit

_PAGES = st.integers(0, 2**40)
_COUNTS = st.builds(
    ZoneCounts, free=_PAGES, low=_PAGES, present=_PAGES, managed=_PAGES, nr_free_cma=_PAGES
)
_ZONE_KEYS = st.tuples(
    st.integers(0, 1023), st.sampled_from(["DMA", "DMA32", "Normal", "Movable", "Device"])
)
_LIKE_THE_KERNEL = st.lists(
    st.one_of(
        st.text(max_size=40),
        st.builds("Node {}, zone {}".format, st.integers(), st.text(max_size=8)),
        st.builds("  pages free     {}".format, st.integers()),
        st.builds("        managed  {}".format, st.text(max_size=8)),
    )
).map("\n".join)


def _print_zone(key: tuple[int, str], counts: ZoneCounts) -> str:
    return (
        f"Node {key[0]}, zone {key[1]:>8}\n  per-node stats\n      nr_inactive_anon 1039\n"
        f"  pages free     {counts.free}\n        min      5\n        low      {counts.low}\n"
        f"        present  {counts.present}\n        managed  {counts.managed}\n"
        f"        protection: (0, 1, 2)\n      nr_free_cma  {counts.nr_free_cma}\n"
        "  pagesets\n    cpu: 0\n              count: 3\n              high:  5\n"
    )


@given(st.dictionaries(_ZONE_KEYS, _COUNTS, max_size=6))
def test_zoneinfo_reads_back(zones: dict[tuple[int, str], ZoneCounts]) -> None:
    text = "".join(_print_zone(key, counts) for key, counts in zones.items())
    assert parse_zoneinfo(text) == zones


@given(
    st.dictionaries(_ZONE_KEYS, st.lists(_PAGES, min_size=1, max_size=14).map(tuple), max_size=6)
)
def test_buddyinfo_reads_back(zones: dict[tuple[int, str], tuple[int, ...]]) -> None:
    text = "".join(
        f"Node {node}, zone {name:>8} " + "".join(f"{count:>6} " for count in counts) + "\n"
        for (node, name), counts in zones.items()
    )
    assert parse_buddyinfo(text) == zones


@given(st.one_of(st.text(), _LIKE_THE_KERNEL))
def test_no_text_of_zones_raises(text: str) -> None:
    parse_zoneinfo(text)
    parse_buddyinfo(text)


def test_a_zone_without_memory_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/zoneinfo").write_text(
        _print_zone((0, "Normal"), ZoneCounts(free=10, managed=20, present=25))
        + _print_zone((0, "Device"), ZoneCounts())
    )
    (tmp_path / "proc/buddyinfo").write_text("Node 0, zone   Normal      2      4 \n")
    warnings: list[str] = []
    nodes = observe_zones(HostRoot(tmp_path), 4096, warnings.append)
    assert [zone.name for zone in nodes[0].zones] == ["Normal"]
    assert nodes[0].zones[0].free_bytes == 10 * 4096
    assert nodes[0].zones[0].free_blocks == (2, 4)
    assert nodes[0].unmanaged_bytes == 5 * 4096
    assert warnings == []


def test_without_zoneinfo_free_blocks_still_count_and_a_warning_says_so(tmp_path: Path) -> None:
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/buddyinfo").write_text("Node 0, zone   Normal      2      4 \n")
    warnings: list[str] = []
    nodes = observe_zones(HostRoot(tmp_path), 4096, warnings.append)
    assert nodes[0].zones[0].free_bytes == (2 + 8) * 4096
    assert "zoneinfo" in warnings[0]
