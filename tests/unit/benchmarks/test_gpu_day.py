"""The parts of the GPU day that need no driver: rows, resuming, sizes, durations, huge pages."""

from __future__ import annotations

import fcntl
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.gpu_day.day import Case, Day, Figures, Part
from benchmarks.gpu_day.journal import Journal, JournalError, Row, last_rows, read_rows
from benchmarks.gpu_day.kill import Watch
from benchmarks.gpu_day.parts import PARTS
from benchmarks.gpu_day.sizes import Sizes, available_bytes, sizes_from
from benchmarks.gpu_day.tier import counts_of
from benchmarks.register.crew import Crew, MeasureError
from benchmarks.register.durations import percentile, spread, within
from benchmarks.register.memory import NotHereError
from benchmarks.register.pages_ledger import added_pages, give_back_left_pages
from hostprep.backing import GIB, MIB

pytestmark = pytest.mark.unit


class _NoCrew:
    """Processes that nobody asks for."""

    watched = ()
    closed = 0

    def close(self) -> None:
        self.closed += 1


def _day(folder: Path, *, left_s: float = 60.0, again: bool = False) -> Day:
    return Day(
        journal=Journal(folder / "rows.jsonl"),
        crew=cast("Crew", _NoCrew()),
        sizes=sizes_from(128 * GIB, 141 * GIB),
        machine={"gpu": "NVIDIA H200", "standin": False},
        folder=folder,
        end_s=time.monotonic() + left_s,
        again=again,
    )


def _part(**measures: Callable[[], Figures]) -> Part:
    cases = [Case(name, 10, measure) for name, measure in measures.items()]
    return Part("part", "", 1, lambda _day: cases)


def _run(folder: Path, part: Part, **how: Any) -> Day:
    day = _day(folder, **how)
    day.run(part)
    day.journal.close()
    return day


def _outcomes(folder: Path) -> list[tuple[str, str]]:
    rows = read_rows([folder / "rows.jsonl"])
    return [(row.case, row.outcome) for row in rows if row.outcome != "begun"]


def _fails(error: Exception) -> Callable[[], Figures]:
    def measure() -> Figures:
        raise error

    return measure


def test_what_fails_is_a_row_and_the_next_case_is_measured(tmp_path: Path) -> None:
    part = _part(
        missing=_fails(NotHereError("no such pages")),
        refused=_fails(MeasureError("CUDA_ERROR_UNKNOWN")),
        wrong=_fails(ZeroDivisionError("division by zero")),
        good=lambda: {"gib_s": 1.0},
    )
    day = _run(tmp_path, part)
    assert _outcomes(tmp_path) == [
        ("missing", "left out"),
        ("refused", "failed"),
        ("wrong", "failed"),
        ("good", "measured"),
    ]
    rows = {row.case: row for row in last_rows(read_rows([tmp_path / "rows.jsonl"]))}
    assert rows["wrong"].why == "ZeroDivisionError: division by zero"
    assert rows["good"].figures == {"gib_s": 1.0}
    assert rows["good"].machine["gpu"] == "NVIDIA H200"
    assert cast("_NoCrew", day.crew).closed == 2, "after a failure processes are new ones"


def test_a_second_run_measures_nothing_again_unless_asked(tmp_path: Path) -> None:
    _run(tmp_path, _part(one=dict, other=_fails(MeasureError("no"))))
    _run(tmp_path, _part(one=dict, other=dict, third=dict))
    assert [case for case, _ in _outcomes(tmp_path)] == ["one", "other", "third"]
    _run(tmp_path, _part(other=dict), again=True)
    assert _outcomes(tmp_path)[-1] == ("other", "measured")


def test_a_case_that_does_not_fit_is_left_and_a_shorter_one_is_not(tmp_path: Path) -> None:
    cases = [Case("long", 100, dict), Case("short", 1, dict)]
    day = _run(tmp_path, Part("part", "", 1, lambda _day: cases), left_s=50)
    assert day.left_for_later == ["part: long"]
    assert _outcomes(tmp_path) == [("short", "measured")]


def test_what_fails_when_time_is_up_is_tried_again(tmp_path: Path) -> None:
    day = _day(tmp_path, left_s=20)

    def late() -> Figures:
        day.end_s = 0.0
        raise MeasureError("no answer")

    day.run(_part(late=late))
    day.journal.close()
    assert _outcomes(tmp_path) == [("late", "stopped")]
    _run(tmp_path, _part(late=dict))
    assert _outcomes(tmp_path)[-1] == ("late", "measured")


def test_what_ended_the_program_twice_is_not_tried_a_third_time(tmp_path: Path) -> None:
    def ends() -> Figures:
        raise SystemExit

    for _ in range(2):
        day = _day(tmp_path)
        with pytest.raises(SystemExit):
            day.run(_part(ends=ends))
        day.journal.close()
    _run(tmp_path, _part(ends=ends, next=dict))
    assert _outcomes(tmp_path) == [("ends", "failed"), ("next", "measured")]


@pytest.mark.parametrize("torn", [b'{"part": "a", "case', b"{", b"\x00\xff"])
def test_a_torn_last_line_costs_nothing_else(tmp_path: Path, torn: bytes) -> None:
    path = tmp_path / "rows.jsonl"
    journal = Journal(path)
    journal.add(Row("part", "one", "measured", {"gib_s": 2.5}))
    journal.close()
    whole = path.read_bytes()
    path.write_bytes(whole + torn)
    assert len(read_rows([path])) == 1
    journal = Journal(path)
    assert path.read_bytes() == whole
    assert journal.has("part", "one")
    journal.add(Row("part", "two", "left out", why="no torch"))
    journal.close()
    assert [row.case for row in read_rows([path])] == ["one", "two"]


@given(cut=st.integers(min_value=0, max_value=400))
def test_wherever_a_file_is_cut_what_is_whole_counts(
    cut: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("cut") / "rows.jsonl"
    journal = Journal(path)
    for number in range(3):
        journal.add(Row("part", str(number), "measured", {"ä": number}))
    journal.close()
    whole = path.read_bytes()[:cut]
    path.write_bytes(whole)
    Journal(path).close()
    rows = read_rows([path])
    assert [row.case for row in rows] == [str(number) for number in range(whole.count(b"\n"))]
    assert path.read_bytes() == b"".join(whole.splitlines(keepends=True)[: len(rows)])


def test_rows_of_earlier_files_are_not_measured_again(tmp_path: Path) -> None:
    first, second = tmp_path / "first.jsonl", tmp_path / "second.jsonl"
    journal = Journal(first)
    journal.add(Row("part", "one", "measured"))
    journal.add(Row("part", "two", "begun"))
    journal.close()
    journal = Journal(second, [first])
    assert journal.has("part", "one")
    assert not journal.has("part", "two")
    journal.add(Row("part", "two", "begun"))
    assert journal.is_deadly("part", "two"), "begun here and there"
    journal.close()
    assert not journal.has("part", "two")


def test_what_was_rehearsed_is_measured_all_the_same(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    journal = Journal(path, is_rehearsal=True)
    journal.add(Row("part", "one", "measured", machine={"standin": True}))
    journal.add(Row("part", "two", "measured", machine={"short": True}))
    journal.close()
    for is_rehearsal in (True, False):
        journal = Journal(path, is_rehearsal=is_rehearsal)
        assert journal.has("part", "one") is journal.has("part", "two") is is_rehearsal
        journal.close()


def test_two_runs_do_not_write_to_one_file(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "rows.jsonl")
    with pytest.raises(JournalError, match="another run"):
        Journal(tmp_path / "rows.jsonl")
    journal.close()


def test_the_latest_row_of_a_case_counts() -> None:
    rows = [
        Row("a", "1", "failed", why="x"),
        Row("a", "2", "measured", {"v": 1}),
        Row("a", "1", "begun"),
        Row("a", "1", "measured", {"v": 2}),
        Row("a", "2", "stopped"),
    ]
    assert [(row.case, row.figures.get("v")) for row in last_rows(rows)] == [("1", 2), ("2", 1)]


@pytest.mark.parametrize(
    ("available", "asked", "sizes"),
    [
        (120 * GIB, None, Sizes(8 * GIB, 32 * GIB, 4 * GIB, GIB)),
        (20 * GIB, None, Sizes(2 * GIB, 7 * GIB, 2 * GIB, GIB)),
        (4 * GIB, None, Sizes(512 * MIB, 1 * GIB, 512 * MIB, 512 * MIB)),
        (120 * GIB, 64 * MIB, Sizes(64 * MIB, 64 * MIB, 64 * MIB, 64 * MIB)),
        (120 * GIB, GIB + 3 * MIB, Sizes(GIB, GIB, GIB, GIB)),
    ],
)
def test_sizes_follow_the_memory(available: int, asked: int | None, sizes: Sizes) -> None:
    assert sizes_from(available, 80 * GIB, asked) == sizes


def test_too_little_memory_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 64Mi"):
        sizes_from(256 * MIB, 80 * GIB)


@given(available=st.integers(512 * MIB, 4096 * GIB), gpu=st.integers(GIB, 300 * GIB))
def test_sizes_fit_into_the_memory(available: int, gpu: int) -> None:
    sizes = sizes_from(available, gpu)
    assert 2 * sizes.region_bytes <= available
    assert sizes.large_bytes <= available // 2
    assert sizes.copy_bytes <= min(sizes.region_bytes, max(gpu // 8, 2 * MIB))


_MEMINFO = "MemTotal:  1000 kB\nMemAvailable:   800 kB\n"


@pytest.mark.parametrize(
    ("limit", "used", "stat", "expected"),
    [
        ("", "", "", 800),
        ("max\n", "5", "", 800),
        (f"{500 * 1024}\n", f"{100 * 1024}\n", "", 400),
        (f"{500 * 1024}", f"{400 * 1024}", f"anon 1\ninactive_file {50 * 1024}\n", 150),
        (f"{100 * 1024}", f"{400 * 1024}", "", 0),
        (f"{9000 * 1024}", "0", "", 800),
    ],
)
def test_a_cgroups_limit_counts(limit: str, used: str, stat: str, expected: int) -> None:
    assert available_bytes(_MEMINFO, limit, used, stat) == expected * 1024


def test_percentiles_are_values_that_were_measured() -> None:
    values = [float(number) for number in range(1, 201)]
    assert spread(values[::-1]) == {"p50_s": 100.0, "p99_s": 198.0, "worst_s": 200.0, "calls": 200}
    assert spread([3.0]) == {"p50_s": 3.0, "p99_s": 3.0, "worst_s": 3.0, "calls": 1}


@given(st.lists(st.floats(0, 10), min_size=1), st.floats(0.001, 1))
def test_a_percentile_is_not_exceeded_by_more_than_the_rest(
    values: list[float], share: float
) -> None:
    ordered = sorted(values)
    found = percentile(ordered, share)
    assert sum(value <= found for value in ordered) >= share * len(ordered) - 1e-9
    assert sum(value < found for value in ordered) < share * len(ordered) + 1e-9


def test_calls_count_that_overlap_a_window() -> None:
    calls = [(0.0, 1.0), (1.5, 2.5), (2.6, 2.9), (3.0, 7.0), (8.0, 8.5)]
    assert within(calls, [(2.0, 3.0), (4.0, 5.0), (6.0, 6.5)]) == pytest.approx([1.0, 0.3, 4.0])
    assert within(calls, []) == []


def _pool(tmp_path: Path, pages: int, surplus: int = 0) -> Path:
    pool = tmp_path / "hugepages-2048kB"
    pool.mkdir()
    (pool / "nr_hugepages").write_text(str(pages))
    (pool / "surplus_hugepages").write_text(str(surplus))
    return pool


def test_pages_are_given_back_by_difference(tmp_path: Path) -> None:
    pool = _pool(tmp_path, 10)
    with added_pages(pool, 5, tmp_path) as added:
        assert added == 5
        assert give_back_left_pages(tmp_path) == 0, "their process lives"
        (pool / "nr_hugepages").write_text("18")  # somebody else adds three
    assert (pool / "nr_hugepages").read_text() == "13"
    assert not list(tmp_path.glob("hostprep-bench-pages-*"))


def test_pages_of_a_process_that_was_killed_are_given_back(tmp_path: Path) -> None:
    pool = _pool(tmp_path, 42)
    left = tmp_path / "hostprep-bench-pages-7-hugepages-2048kB"
    left.write_text(f"{pool} 32\n")
    assert give_back_left_pages(tmp_path) == 32
    assert (pool / "nr_hugepages").read_text() == "10"
    assert not left.exists()


def test_pages_that_only_their_users_keep_are_not_counted(tmp_path: Path) -> None:
    pool = _pool(tmp_path, 42, surplus=8)
    left = tmp_path / "hostprep-bench-pages-7-hugepages-2048kB"
    left.write_text(f"{pool} 32\n")
    assert give_back_left_pages(tmp_path) == 32
    assert (pool / "nr_hugepages").read_text() == "2"


def test_pages_of_another_run_stay(tmp_path: Path) -> None:
    pool = _pool(tmp_path, 42)
    left = tmp_path / "hostprep-bench-pages-7-hugepages-2048kB"
    left.write_text(f"{pool} 32\n")
    with left.open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert give_back_left_pages(tmp_path) == 0
    assert (pool / "nr_hugepages").read_text() == "42"


def test_cases_have_names_of_their_own_and_fit_into_a_call(tmp_path: Path) -> None:
    day = _day(tmp_path)
    for part in PARTS:
        cases = list(part.cases(day))
        names = [case.name for case in cases]
        assert len(set(names)) == len(names), part.name
        assert all(0 < case.about_s < 300 for case in cases), part.name
        assert part.about_s < 570, "a part fits into a call of ten minutes"
    day.journal.close()


def test_a_killed_process_is_watched_until_all_is_quiet() -> None:
    watch = Watch(leader_zombie_s=0.1, all_threads_dead_s=0.4, lock_free_s=-1.0)
    assert not watch.is_over(9.0, 2.0), "the lock is still held"
    assert watch.seen == {"zombie", "death"}
    watch.lock_free_s, watch.last_change_s = 0.5, 3.0
    assert not watch.is_over(4.9, 2.0)
    assert watch.is_over(5.1, 2.0)


def test_counts_of_tests_are_read_from_the_last_line() -> None:
    output = "FAILED a::b - 1 failed\n=== 1 failed, 20 passed, 3 skipped in 9.1s ===\n"
    assert counts_of(output) == {"failed": 1, "passed": 20, "skipped": 3}
    assert counts_of("no tests ran") == {}


def test_rows_are_plain_json(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "rows.jsonl")
    journal.add(Row("part", "one", "measured", {"took_s": (1.0, 2.0)}, took_s=3.0))
    journal.close()
    (line,) = (tmp_path / "rows.jsonl").read_text().splitlines()
    assert json.loads(line)["figures"] == {"took_s": [1.0, 2.0]}
