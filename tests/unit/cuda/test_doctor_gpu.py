"""`hostprep doctor --gpu`: what it says of drivers, GPUs and pools that tests cannot have."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from hostprep.api.pool_resource import spec_from_options
from hostprep.backing import GIB
from hostprep.cli.main import main
from hostprep.cuda.driver import DeviceTraits
from hostprep.node.doctor import Finding, Severity
from hostprep.node.doctor.gpus import check_registering
from hostprep.node.facts import Facts
from hostprep.node.observe import HostRoot, observe
from hostprep.node.observe.gpus import CudaFacts, NvidiaFacts, observe_nvidia
from testbed.standin import build, environment
from tests.support import host_trees
from tests.support.node_facts import machine, numa_node, pool, region

pytestmark = pytest.mark.unit

MODULE = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build"
LARGE = machine(numa_node(0, size=2048 * GIB), numa_node(1, size=2048 * GIB), gpus=[0, 0, 1, 1])


def said(facts: Facts, nvidia: NvidiaFacts, *sizes: str) -> list[Finding]:
    specs = [
        spec_from_options(name=f"p{n}", size=size, backings="HugeTLB2Mi", regions="PerNUMANode")
        for n, size in enumerate(sizes)
    ]
    findings = list(check_registering(facts, nvidia, specs))
    assert all(finding.what and finding.remedy for finding in findings)
    assert all("\n" not in finding.what + finding.remedy for finding in findings)
    return findings


def severities(findings: list[Finding]) -> list[str]:
    return [finding.severity.value for finding in findings]


def test_without_a_driver_it_says_so_plainly() -> None:
    (with_gpus,) = said(LARGE, NvidiaFacts(None))
    assert with_gpus.severity is Severity.ERROR
    assert "no NVIDIA driver is loaded" in with_gpus.what
    assert "modprobe nvidia" in with_gpus.remedy
    (without,) = said(machine(), NvidiaFacts(None))
    assert "no NVIDIA GPU and no driver" in without.what


def test_amd_gpus_are_named(tmp_path: Path) -> None:
    facts = observe(host=HostRoot(host_trees.eight_node_8gpu(tmp_path)), root=str(tmp_path))
    (finding,) = said(facts, NvidiaFacts(None))
    assert "AMD" in finding.what


def test_a_healthy_node_tells_the_price_of_each_pool() -> None:
    findings = said(LARGE, NvidiaFacts(MODULE, is_open=True), "256Gi")
    (price,) = [finding for finding in findings if "p0: registering takes" in finding.what]
    assert price.severity is Severity.INFO
    # 256 GiB over four ranks: 64 GiB each, 2 MiB of the GPU for each GiB, 8 MiB of the kernel's.
    assert "128 MiB of each GPU and 2 GiB of the kernel's memory" in price.what
    assert "512 MiB and 8 GiB if each registers all" in price.what
    assert any("NVIDIA driver 580.65.06, open kernel module" in f.what for f in findings)
    assert "warning" not in severities(findings)
    assert "error" not in severities(findings)


def test_without_a_pool_the_price_is_an_example() -> None:
    findings = said(LARGE, NvidiaFacts(MODULE))
    assert any("for every 100 GiB: registering takes" in finding.what for finding in findings)


def test_a_price_that_the_node_cannot_well_pay_is_a_warning() -> None:
    poor = replace(
        LARGE,
        memory=replace(LARGE.memory, available_bytes=16 * GIB),
        pools=(pool(region("node0-0", 512 * GIB), region("node1-0", 512 * GIB)),),
    )
    findings = said(poor, NvidiaFacts(MODULE))
    (price,) = [finding for finding in findings if "registering takes" in finding.what]
    assert price.severity is Severity.WARNING
    assert "slices" in price.remedy


def test_pools_of_512_gib_and_old_drivers() -> None:
    findings = said(LARGE, NvidiaFacts(MODULE), "600Gi")
    assert any("512 GiB" in finding.what for finding in findings)
    old = said(LARGE, NvidiaFacts("535.183.01"), "64Gi")
    (lock,) = [finding for finding in old if "lock" in finding.what]
    assert lock.severity is Severity.WARNING


def test_a_release_that_cannot_be_told() -> None:
    findings = said(LARGE, NvidiaFacts("built from source"))
    assert findings[0].severity is Severity.WARNING
    assert "cannot be told" in findings[0].what


def tree(tmp_path: Path, files: dict[str, str]) -> HostRoot:
    for path, text in files.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    return HostRoot(tmp_path)


def test_what_the_kernel_shows(tmp_path: Path) -> None:
    group = "sys/bus/pci/devices/0000:00:00.0/iommu_group/type"
    host = tree(tmp_path, {"proc/driver/nvidia/version": f"{MODULE}\nGCC\n", group: "DMA-FQ\n"})
    nvidia = observe_nvidia(host, LARGE.gpus)
    assert nvidia == NvidiaFacts(MODULE, is_open=True, translated=("0000:00:00.0",))
    assert any("IOMMU translates" in finding.what for finding in said(LARGE, nvidia))


def test_a_container_shows_the_release_alone(tmp_path: Path) -> None:
    host = tree(tmp_path, {"sys/module/nvidia/version": "570.86.10\n"})
    assert observe_nvidia(host, ()) == NvidiaFacts("570.86.10", is_open=None)


def test_cuda_is_not_asked_where_no_module_is_loaded(tmp_path: Path) -> None:
    def never() -> CudaFacts:
        raise AssertionError("asked")

    assert observe_nvidia(HostRoot(tmp_path), LARGE.gpus, query=never) == NvidiaFacts(None)


def test_why_cuda_could_not_be_asked_is_told() -> None:
    cuda = CudaFacts(problem="cuda-python is not installed", remedy="pip install cuda-bindings")
    findings = said(LARGE, NvidiaFacts(MODULE, cuda=cuda))
    (told,) = [finding for finding in findings if "could not be asked" in finding.what]
    assert (told.severity, told.remedy) == (Severity.INFO, "pip install cuda-bindings")


def device(**traits: object) -> DeviceTraits:
    known: dict[str, object] = {
        "ordinal": 0,
        "uuid": "GPU-0",
        "name": "NVIDIA H200",
        "total_bytes": 141 * GIB,
        "host_register_supported": True,
        "read_only_supported": True,
        "uses_host_page_tables": False,
        "can_use_host_pointer": True,
        "can_map_host_memory": True,
        "unified_addressing": True,
    }
    return DeviceTraits(**(known | traits))  # type: ignore[arg-type]


def test_devices_are_told_one_by_one() -> None:
    cuda = CudaFacts((device(), device(host_register_supported=False)))
    findings = said(LARGE, NvidiaFacts(MODULE, cuda=cuda))
    assert any("GPU 0 (NVIDIA H200, 141 GiB) registers host memory" in f.what for f in findings)
    (broken,) = [finding for finding in findings if "GPU 1" in finding.what]
    assert (broken.severity, "cannot register" in broken.what) == (Severity.ERROR, True)


def test_a_device_with_addresses_of_its_own_is_told() -> None:
    cuda = CudaFacts((device(can_use_host_pointer=False),))
    findings = said(LARGE, NvidiaFacts(MODULE, cuda=cuda))
    (told,) = [finding for finding in findings if "WSL2" in finding.what]
    assert told.severity == Severity.ERROR


def test_where_the_hosts_page_tables_are_used_there_is_no_price() -> None:
    cuda = CudaFacts((device(uses_host_page_tables=True),))
    findings = said(LARGE, NvidiaFacts(MODULE, cuda=cuda), "600Gi")
    assert any("only huge pages are registered there" in finding.what for finding in findings)
    assert all("registering takes" not in finding.what for finding in findings)
    assert set(severities(findings)) <= {"ok", "info"}


@pytest.mark.parametrize(
    ("settings", "shown"),
    [
        ({"devices": 2}, "2 devices, Stand-in 0, "),
        ({"init": 100}, "0 devices, , the CUDA driver sees no device"),
        ({"devices": 1, "ats": 1}, "1 devices, Stand-in 0, "),
    ],
)
def test_cuda_is_asked_by_its_own_library(
    tmp_path: Path, settings: dict[str, int], shown: str
) -> None:
    pytest.importorskip("cuda.bindings.driver")
    code = (
        "from hostprep.node.observe.gpus import query_cuda; c = query_cuda(); names = "
        "[d.name for d in c.devices][:1]; "
        "print(f'{len(c.devices)} devices, {\"\".join(names)}, {c.problem}')"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=environment(build(tmp_path), log=tmp_path / "l", lock=tmp_path / "k", **settings),
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stdout.strip() == shown.strip()


def test_the_command_tells_it_with_the_rest(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if Path("/proc/driver/nvidia/version").exists():
        pytest.skip("this machine has a driver")
    code = main(["doctor", "--gpu", "-o", "json", "--root", str(tmp_path)])
    findings = json.loads(capsys.readouterr().out)["findings"]
    assert code == 1
    (first,) = [finding for finding in findings if finding["check"] == "register"]
    assert first["severity"] == "error"
    assert findings.index(first) == 0
    assert "nothing can be registered" in first["what"]
    main(["doctor", "-o", "json", "--root", str(tmp_path)])
    without = json.loads(capsys.readouterr().out)["findings"]
    assert all(finding["check"] != "register" for finding in without)
