"""Each benchmark's short form: it runs, and prints a ratio. No time is asserted."""

from __future__ import annotations

import os
import shutil
from types import ModuleType

import pytest

from benchmarks import (
    adopt,
    attach,
    fragmented,
    memory,
    populate_2m,
    populate_4k,
    populate_files,
    startup,
)
from benchmarks.fragment import fragmented_memory
from benchmarks.kill_run import missed, run, show
from benchmarks.report import print_results
from hostprep.backing import MIB
from testbed.machine import huge_pages_total

pytestmark = pytest.mark.kernel

_IN_C = (populate_2m, populate_4k, fragmented, attach)
_ALL = (*_IN_C, adopt, memory, populate_files, startup)


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
