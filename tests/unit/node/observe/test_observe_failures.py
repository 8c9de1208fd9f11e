"""A probe that fails costs its own facts only, and says so."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hostprep.node.observe import HostRoot, observe
from hostprep.node.observe.node import Probes
from tests.support import host_trees

pytestmark = pytest.mark.unit


def test_an_empty_host_gives_facts_that_promise_nothing(tmp_path: Path) -> None:
    facts = observe(host=HostRoot(tmp_path), root=str(tmp_path / "pools"))
    assert facts.kernel.version == (0, 0)
    assert facts.memory.available_bytes == 0
    assert [node.total_bytes for node in facts.nodes] == [0]
    assert not facts.process.can_mount
    said = " ".join(facts.warnings)
    for source in ("osrelease", "boot_id", "meminfo", "zoneinfo", "mountinfo", "status", "limits"):
        assert source in said


@pytest.mark.parametrize(
    "path",
    [
        "proc/sys/kernel/osrelease",
        "proc/sys/kernel/random/boot_id",
        "proc/meminfo",
        "proc/zoneinfo",
        "proc/buddyinfo",
        "proc/self/mountinfo",
        "proc/self/cgroup",
        "proc/self/status",
        "proc/self/limits",
        "sys/devices/system/node/node1/meminfo",
        "sys/devices/system/node/node1/cpulist",
    ],
)
def test_a_missing_file_is_warned_of_and_the_gpus_are_still_seen(tmp_path: Path, path: str) -> None:
    tree = host_trees.two_socket_8gpu(tmp_path)
    (tree / path).unlink()
    facts = observe(host=HostRoot(tree), root=str(tmp_path))
    assert facts.warnings
    assert len(facts.gpus) == 8
    assert len(facts.nodes) == 2


def test_a_folder_in_a_files_place_is_warned_of(tmp_path: Path) -> None:
    tree = host_trees.small(tmp_path)
    (tree / "proc/meminfo").unlink()
    (tree / "proc/meminfo").mkdir()
    facts = observe(host=HostRoot(tree), root=str(tmp_path))
    assert any("meminfo" in warning for warning in facts.warnings)


_FILES = (
    "proc/meminfo",
    "proc/zoneinfo",
    "proc/buddyinfo",
    "proc/self/mountinfo",
    "proc/self/cgroup",
    "proc/self/status",
    "proc/self/limits",
    "proc/self/auxv",
    "proc/uptime",
    "proc/sys/kernel/osrelease",
    "sys/devices/system/node/node0/cpulist",
    "sys/devices/system/node/node0/meminfo",
    "sys/kernel/mm/transparent_hugepage/enabled",
    "sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages",
    "sys/fs/cgroup/cgroup.controllers",
    "sys/bus/pci/devices/0000:17:00.0/class",
    "sys/bus/pci/devices/0000:17:00.0/numa_node",
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=20)
@given(st.dictionaries(st.sampled_from(_FILES), st.binary(max_size=80), min_size=1))
def test_whatever_the_host_prints_observe_does_not_raise(
    tmp_path: Path, contents: dict[str, bytes]
) -> None:
    shutil.rmtree(tmp_path / "kubepod", ignore_errors=True)
    tree = host_trees.kubepod(tmp_path)
    for path, data in contents.items():
        (tree / path).write_bytes(data)
    observe(host=HostRoot(tree), root=str(tmp_path))


def test_an_error_inside_a_probe_leaves_its_fallback_and_a_warning() -> None:
    def fail() -> int:
        raise PermissionError(13, "Permission denied")

    probes = Probes()
    assert probes.run("memory", fail, 7) == 7
    assert probes.warnings == ("memory: [Errno 13] Permission denied",)


def test_a_warning_is_said_once() -> None:
    probes = Probes()
    probes.warn("twice")
    probes.warn("twice")
    assert probes.warnings == ("twice",)
