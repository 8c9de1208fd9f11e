"""Where each rank's KV cache lies, and what may be said of us in vLLM's configuration."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hostprep.backing import GIB, MIB
from hostprep.cuda.chunks import ChunkPolicy, check_slice
from hostprep.engines.vllm.offloading_layout import layout_of, row_bytes_of
from hostprep.engines.vllm.offloading_region import FreeMemory, why_later
from hostprep.engines.vllm.settings import Settings
from hostprep.errors import BadInputError

pytestmark = pytest.mark.unit

_PAGES = st.sampled_from([4096, 2 * MIB, GIB])
_CHUNKS = st.integers(1, 64 * MIB)


@given(region_pages=st.integers(1, 4096), page=_PAGES, chunk=_CHUNKS, slices=st.integers(1, 16))
def test_every_rank_has_whole_pages_of_its_own(
    region_pages: int, page: int, chunk: int, slices: int
) -> None:
    size = region_pages * page
    try:
        layout = layout_of(size, page_bytes=page, chunk_bytes=chunk, slices=slices)
    except BadInputError:
        assert size // slices // page * page < row_bytes_of(chunk)
        return
    assert layout.row_bytes >= chunk
    assert layout.rows * layout.row_bytes <= layout.slice_bytes
    assert layout.rows == layout.slice_bytes // layout.row_bytes
    assert layout.offset_of(slices) <= size
    for number in range(slices):
        check_slice(size, page, layout.offset_of(number), layout.slice_bytes, layout.row_bytes)


@given(page=st.sampled_from([4096, 65536]), chunk=_CHUNKS)
def test_rows_cost_little_and_registered_pieces_stay_small(page: int, chunk: int) -> None:
    row = row_bytes_of(chunk)
    policy = ChunkPolicy(first_bytes=64 * MIB, page_bytes=page, row_bytes=row)
    assert policy.step_bytes <= 256 * MIB
    assert row - chunk <= max(512, chunk // 512)


@given(chunk=_CHUNKS)
def test_no_copy_can_go_on_from_one_row_into_the_next(chunk: int) -> None:
    assert row_bytes_of(chunk) > chunk


def test_a_region_without_room_for_one_chunk_is_refused_with_both_numbers() -> None:
    with pytest.raises(BadInputError, match=r"131584 bytes.* 65536 bytes"):
        layout_of(65536, page_bytes=4096, chunk_bytes=131072, slices=1)


def test_nothing_need_be_said() -> None:
    settings = Settings.read({"spec_name": "HostprepOffloadingSpec", "block_size": 64})
    assert settings == Settings("auto", "background", 1800.0, 0.08, None)
    assert settings.registers(is_cuda=True)
    assert not settings.registers(is_cuda=False)


def test_registering_can_be_asked_for_and_left_out() -> None:
    assert Settings.read({"hostprep.register": "always"}).registers(is_cuda=False)
    assert not Settings.read({"hostprep.register": "never"}).registers(is_cuda=True)


@pytest.mark.parametrize(
    ("given", "size"),
    [(0, None), (None, None), (1 << 30, 1 << 30), (1e9, 10**9), ("8Gi", 8 << 30), ("123", 123)],
)
def test_sizes_are_vllms_own_or_kubernetes(given: Any, size: int | None) -> None:
    assert Settings.read({"cpu_bytes_to_use": given}).size_bytes == size


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"hostprep.polo": "kv"}, r"hostprep\.polo.*known are hostprep\.pool"),
        ({"hostprep.register": "yes"}, "'yes'; give auto or always or never"),
        ({"hostprep.mode": "fast"}, "'fast'; give background or sync"),
        ({"hostprep.deadline_s": "soon"}, "'soon'; give seconds"),
        ({"hostprep.deadline_s": 0}, "0; give seconds, more than 0"),
        ({"hostprep.grows": "yes"}, "'yes'; give true or false"),
        ({"hostprep.duty_cycle": "slow"}, "'slow'; give a share of the time"),
        ({"hostprep.duty_cycle": 0}, "a duty cycle of 0 cannot be; give the share of the time"),
        ({"hostprep.duty_cycle": 8}, "give the share of the time"),
        ({"cpu_bytes_to_use": "much"}, "'much' is not a quantity"),
        ({"cpu_bytes_to_use": -5}, "'-5' must be more than zero"),
    ],
)
def test_what_cannot_be_is_refused(config: dict[str, Any], words: str) -> None:
    with pytest.raises(BadInputError, match=words):
        Settings.read(config)


_H200 = FreeMemory(free_bytes=13 * GIB, total_bytes=140 * GIB)


@pytest.mark.parametrize(
    ("memory", "captures_graphs", "tables_mib", "why"),
    [
        (_H200, False, 256, ""),
        (_H200, True, 256, "graphs are to be captured"),
        (None, False, 256, "not known how much"),
        (_H200, False, 4224, ""),
        (_H200, False, 5120, "page tables of 5 GiB would leave less than 8.8 GiB"),
        (FreeMemory(4 * GIB, 24 * GIB), False, 1, "leave less than 4 GiB .*, 4 GiB are free"),
        (FreeMemory(5 * GIB, 24 * GIB), False, 1024, ""),
    ],
)
def test_it_registers_before_warm_up_only_where_that_takes_nothing_from_it(
    memory: FreeMemory | None, captures_graphs: bool, tables_mib: int, why: str
) -> None:
    found = why_later(memory, captures_graphs=captures_graphs, tables_bytes=tables_mib * MIB)
    assert re.search(why, found)
    assert bool(found) == bool(why)
