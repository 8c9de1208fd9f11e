"""The real procfs and sysfs of the machine that runs the tests."""

from __future__ import annotations

import os
import platform
import time
from pathlib import Path

import pytest

from hostprep.linux.procfs import parse_meminfo
from hostprep.node.facts import Facts
from hostprep.node.observe import HostRoot, observe

pytestmark = pytest.mark.unit


@pytest.fixture(scope="module")
def facts(tmp_path_factory: pytest.TempPathFactory) -> Facts:
    return observe(host=HostRoot(), root=str(tmp_path_factory.mktemp("pools")))


def test_memory_agrees_with_meminfo(facts: Facts) -> None:
    info = parse_meminfo(Path("/proc/meminfo").read_text())
    assert facts.memory.total_bytes == info["MemTotal"]
    assert facts.memory.swap_total_bytes == info["SwapTotal"]
    assert facts.memory.free_bytes == pytest.approx(info["MemFree"], rel=0.2)


def test_nodes_add_up_to_the_machine(facts: Facts) -> None:
    assert facts.nodes
    total = sum(node.total_bytes for node in facts.nodes)
    assert total == pytest.approx(facts.memory.total_bytes, rel=0.01)
    free = sum(node.free_bytes for node in facts.nodes)
    assert free == pytest.approx(facts.memory.free_bytes, rel=0.2)


def test_kernel_agrees_with_uname(facts: Facts) -> None:
    assert facts.kernel.release == platform.release()
    assert facts.kernel.arch == platform.machine()
    assert facts.memory.page_bytes == os.sysconf("SC_PAGESIZE")


def test_process_agrees_with_the_system_calls(facts: Facts) -> None:
    assert facts.process.euid == os.geteuid()
    assert set(facts.process.cpus) == os.sched_getaffinity(0)


def test_huge_pages_of_nodes_add_up_to_the_pools(facts: Facts) -> None:
    for pool in facts.huge_pages:
        assert sum(node.huge(pool.page_bytes).total for node in facts.nodes) == pool.total


def test_observing_takes_a_small_part_of_the_tenth_of_a_second_that_adopting_may(
    tmp_path: Path,
) -> None:
    seconds = []
    for _ in range(5):
        started = time.perf_counter()
        observe(host=HostRoot(), root=str(tmp_path))
        seconds.append(time.perf_counter() - started)
    assert min(seconds) < 0.05
