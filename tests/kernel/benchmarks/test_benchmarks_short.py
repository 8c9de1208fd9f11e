"""Each benchmark's short form: it runs, and prints a ratio. No time is asserted."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from benchmarks import adopt, attach, fragmented, memory, populate_2m, populate_4k, startup
from benchmarks.fragment import fragmented_memory
from benchmarks.kill_run import missed, run, show
from benchmarks.machine import huge_pages_total
from benchmarks.measure import AtLeast, Below, Sample, alternate, compare
from benchmarks.report import print_results, write_docs
from hostprep.backing import MIB

pytestmark = pytest.mark.kernel

_IN_C = (populate_2m, populate_4k, fragmented, attach)
_ALL = (*_IN_C, adopt, memory, startup)


@pytest.mark.parametrize("benchmark", _ALL, ids=lambda module: module.__name__.split(".")[-1])
def test_a_short_run_prints_a_ratio_and_leaves_nothing(
    benchmark: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root: huge pages and mounts")
    if benchmark in _IN_C and not any(map(shutil.which, ("cc", "gcc", "clang"))):
        pytest.skip("needs a C compiler")
    before = huge_pages_total()

    print_results(benchmark.run(short=True))

    assert "RATIO" in capsys.readouterr().out
    assert huge_pages_total() == before


@pytest.mark.timeout(120, method="thread")  # the other method takes SIGALRM, which kills here
def test_the_kill_run_counts_the_phases_it_hit(capsys: pytest.CaptureFixture[str]) -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root: huge pages and mounts")

    tally = run(kills=3, seed=11)

    show(tally)
    assert "3 kills" in capsys.readouterr().out
    assert not tally.broken
    assert missed(tally)  # three kills cannot hit every phase ten times


def test_fragmenting_pins_a_page_in_each_block_and_lets_go() -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root: page frame numbers")

    with fragmented_memory(64 * MIB, spare_contiguous=-1) as made:
        assert made.blocks >= 32
        assert len(os.listdir("/proc/self/fd")) > 2


def test_contenders_take_turns_and_the_first_turn_is_discarded() -> None:
    turns: list[str] = []

    def contender(name: str) -> Callable[[], float]:
        def take_turn() -> float:
            turns.append(name)
            return float(len(turns))

        return take_turn

    ours, rival = alternate([contender("a"), contender("b")], rounds=2)

    assert "".join(turns) in ("baabba", "abbaab")
    assert 1.0 not in ours.values + rival.values
    assert (len(ours.values), len(rival.values)) == (2, 2)


def test_a_reach_is_judged_by_the_median_ratio_or_by_our_own_value() -> None:
    fast, slow = Sample((1.0, 1.0, 9.0)), Sample((2.0, 2.0, 2.0))

    assert compare("n", fast, "r", slow, reach=AtLeast(2.0)).met is True
    assert compare("n", slow, "r", fast, reach=AtLeast(1.0)).met is False
    assert compare("n", fast, "r", slow, reach=Below(0.5, "")).met is False
    assert compare("n", fast, "r", slow, reach=Below(0.5, ""), judged=0.1).met is True
    assert compare("n", fast, "r", slow).met is None


def test_the_page_and_the_chart_show_every_row(tmp_path: Path) -> None:
    row = compare("n", Sample((1.0,)), "rival", Sample((2.0,)), reach=AtLeast(2), notes=("why",))

    write_docs([row], tmp_path)

    page = (tmp_path / "benchmarks.md").read_text()
    assert "| n | 1.00 s" in page
    assert "why" in page
    assert (tmp_path / "benchmarks.svg").read_text().startswith("<?xml")
