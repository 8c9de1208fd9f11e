"""Cost and known faults of registering, seen at attach, before anything is registered."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

import hostprep
from hostprep import known_issues as issues
from hostprep.backing import GIB, MIB, Backing
from hostprep.client.handoff import AttachAdvice, Region
from hostprep.engines.main import main
from hostprep.known_issues import issues_of
from hostprep.node.apply.service import Node
from testbed.machine import POOL, pool_of
from tests.kernel.cuda.turns import CHECKOUT

ZONE = "Node {node}, zone {name:>8}\n  pages free     100\n        managed  {pages}\n"
REGION = Region(
    name="node1-0",
    path="mem/node1-0",
    st_dev=1,
    st_ino=1,
    size_bytes=4 * GIB,
    backing=Backing.HUGETLB_2MI,
    page_bytes=2 * MIB,
    placement="node:1",
    pinned=True,
)

Driver = Callable[[str], None]


@pytest.fixture
def driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Driver:
    """Return what loads a driver of some release, as far as a process can see."""
    version = tmp_path / "version"

    def load(release: str) -> None:
        version.write_text(f"NVRM version: NVIDIA UNIX x86_64 Kernel Module  {release}\nGCC\n")

    monkeypatch.setattr(issues, "VERSION_FILES", (str(version),))
    monkeypatch.setattr(issues, "_ZONEINFO", str(tmp_path / "zoneinfo"))
    return load


def zones(tmp_path: Path, *lines: tuple[int, str, int]) -> None:
    text = "".join(ZONE.format(node=node, name=name, pages=pages) for node, name, pages in lines)
    (tmp_path / "zoneinfo").write_text(text)


def names(region: Region) -> set[str]:
    return {fault.name for fault in issues_of(region)}


@pytest.mark.kernel
def test_without_a_driver_nothing_is_said(tmp_path: Path, driver: Driver) -> None:
    zones(tmp_path, (1, "Normal", 1000), (1, "Movable", 1000))
    assert issues_of(REGION) == ()


@pytest.mark.kernel
def test_where_registering_is_skipped_nothing_is_said(driver: Driver) -> None:
    driver("535.183.01")
    assert "ExclusiveLock" in names(REGION)
    assert issues_of(replace(REGION, attach=AttachAdvice(skip_register=True))) == ()


@pytest.mark.kernel
def test_a_call_is_as_large_as_the_region_advises(driver: Driver) -> None:
    driver("580.65.06")
    assert "LargeCall" not in names(REGION)
    large = AttachAdvice(register_chunk_bytes=GIB)
    assert "LargeCall" in names(replace(REGION, attach=large))
    pages = replace(REGION, backing=Backing.HUGETLB_1GI, page_bytes=GIB)
    assert "LargeCall" not in names(pages), "calls end inside pages, too"


@pytest.mark.kernel
@pytest.mark.parametrize(
    ("placement", "found"),
    [("node:1", True), ("node:0", False), ("interleave", True), ("node:2", False)],
)
def test_movable_memory_counts_where_the_region_may_be(
    tmp_path: Path, driver: Driver, placement: str, found: bool
) -> None:
    driver("580.65.06")
    # Node 2 is the memory of a GPU or an expander: no region is ever there.
    zones(
        tmp_path,
        (0, "Normal", 1000),
        (1, "Normal", 1000),
        (1, "Movable", 262144),
        (2, "Movable", 9999),
    )
    region = replace(REGION, placement=placement)
    assert ("MovableZone" in names(region)) is found
    assert "MovableZone" not in names(replace(region, backing=Backing.HUGETLB_1GI))


@pytest.mark.kernel
def test_the_same_is_told_at_registration(
    tmp_path: Path, driver: Driver, caplog: pytest.LogCaptureFixture
) -> None:
    driver("535.183.01")
    zones(tmp_path, (1, "Normal", 1000), (1, "Movable", 1000))
    issues._logged.clear()
    told = {fault.name for fault in issues.warn_once(GIB, 256 * MIB, REGION)}
    assert {"ExclusiveLock", "MovableZone"} <= told
    assert "use driver 565 or newer" in caplog.text


@pytest.fixture
def root(memory_folder: Path) -> Iterator[str]:
    """Prepare a small pool of base pages: of the machine's huge pages nothing is touched."""
    node = Node(f"{memory_folder}/root")
    node.prepare([pool_of(regions=2)])
    try:
        yield node.root
    finally:
        node.release([POOL], force=True)


@pytest.mark.kernel
def test_an_attachment_tells_when_asked(root: str, driver: Driver) -> None:
    with hostprep.attach(POOL, root=root) as memory:
        assert not memory.warnings
        driver("535.183.01")
        (warning,) = [text for text in memory.warnings if "535" in text]
    assert warning.endswith("use driver 565 or newer")


@pytest.mark.kernel
def test_the_trial_tells_cost_and_faults(
    root: str, driver: Driver, capsys: pytest.CaptureFixture[str]
) -> None:
    driver("535.183.01")
    limit, most = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (4096, most))
    try:
        assert main(["attach", "--pool", POOL, "--root", root]) == 0
        shown = capsys.readouterr().out
        assert main(["attach", "--pool", POOL, "--root", root, "-o", "json"]) == 0
        told = json.loads(capsys.readouterr().out)
    finally:
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (limit, most))
    assert "registering it takes" in shown
    assert "warning: NVIDIA driver 535.183.1 registers with its global lock" in shown
    assert "note: RLIMIT_MEMLOCK is 4 KiB" in shown
    registering = told["registering"]
    assert registering["vram_bytes_per_gpu"] == told["size_bytes"] // 512
    assert registering["kernel_bytes"] > 0
    severities = {fault["name"]: fault["severity"] for fault in registering["faults"]}
    assert severities["ExclusiveLock"] == "warning"
    assert severities["LockedMemoryLimit"] == "info"


@pytest.mark.kernel
def test_without_a_driver_the_trial_says_what_it_took_alone(
    root: str, driver: Driver, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["attach", "--pool", POOL, "--root", root, "-o", "json"]) == 0
    assert json.loads(capsys.readouterr().out)["registering"] is None
    assert main(["attach", "--pool", POOL, "--root", root]) == 0
    assert "registering" not in capsys.readouterr().out


@pytest.mark.kernel
def test_attaching_looks_up_none_of_it(root: str) -> None:
    code = (
        "import sys, hostprep\n"
        f"memory = hostprep.attach({POOL!r}, root={root!r})\n"
        "print(sorted(m for m in sys.modules if 'faults' in m or m.startswith('hostprep.register')"
        " or m == 'hostprep.linux.numa'))\n"
        "memory.warnings\n"
        "assert 'hostprep.known_issues' in sys.modules\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={"PYTHONPATH": str(CHECKOUT)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "[]\n", "")
