"""Whatever goes wrong, the boot script ends with 0 and leaves what the next run can go on from."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from hostprep.api.pool_resource import spec_from_options
from hostprep.api.pool_spec import PoolSpec, PoolState
from hostprep.errors import BadInputError
from hostprep.node.boot import boot_script, systemd_unit
from tests.support import host_trees
from tests.support.boot_runs import SHELLS, BootHost
from tests.support.host_tree_files import BOOT_ID

pytestmark = pytest.mark.unit


@pytest.fixture(params=SHELLS, ids=lambda shell: shell[0])
def host(tmp_path: Path, request: pytest.FixtureRequest) -> BootHost:
    folder = tmp_path / "host"
    folder.mkdir()
    return BootHost(host_trees.two_socket_8gpu(folder), tmp_path / "run", request.param)


def _spec(backings: str = "HugeTLB2Mi", **options: Any) -> PoolSpec:
    return spec_from_options(name="kv", size="64Gi", backings=backings, **options)


def test_a_run_after_a_kill_completes_what_was_begun(host: BootHost) -> None:
    host.run(_spec())
    host.pages_file(1).write_text("700\n")  # what a kill during the second node's write leaves
    (host.root / "kv" / "boot.json").unlink()
    assert host.run(_spec())["complete"] is True
    assert host.pages(0, 1) == [16384, 16384]


def test_a_part_that_a_killed_run_left_goes_back_when_the_rest_cannot_be_had(
    host: BootHost,
) -> None:
    host.run(_spec("HugeTLB1Gi", regions="Single"))
    host.pages_file(1, 1 << 20).write_text("7\n")
    meminfo = host.tree / "sys/devices/system/node/node1/meminfo"
    meminfo.write_text("Node 1 MemTotal: 1000000000 kB\nNode 1 MemFree: 16000000 kB\n")
    result = host.run(_spec("HugeTLB1Gi,Base", regions="Single"))
    assert result["backing"] == "Base"
    assert host.pages(0, 1, kib=1 << 20) == [0, 0]


def test_a_pool_that_the_agent_holds_is_left_alone(host: BootHost) -> None:
    host.run(_spec())
    (host.root / "kv" / "agent.json").write_text(f'{{"boot_id": "{BOOT_ID}"}}')
    for node in (0, 1):
        host.pages_file(node).write_text("5\n")
    host.run(_spec())
    assert host.pages(0, 1) == [5, 5]
    assert "the agent holds this pool" in host.stderr


def test_the_agents_record_of_another_boot_counts_for_nothing(host: BootHost) -> None:
    (host.root / "kv").mkdir(parents=True)
    (host.root / "kv" / "agent.json").write_text('{"boot_id": "another"}')
    assert host.run(_spec())["complete"] is True


def test_a_ledger_of_another_boot_counts_for_nothing(host: BootHost) -> None:
    (host.root / "kv").mkdir(parents=True)
    (host.root / "kv" / "boot.ledger").write_text("another\n2048 0 9 0 9\n2048 1 9 0 9\n")
    host.run(_spec())
    assert host.pages(0, 1) == [16384, 16384]


def test_a_torn_ledger_counts_for_nothing(host: BootHost) -> None:
    (host.root / "kv").mkdir(parents=True)
    (host.root / "kv" / "boot.ledger").write_text(f"{BOOT_ID}\n2048 0 x$(id) 0 9\n2048 1\n")
    assert host.run(_spec())["complete"] is True
    assert host.pages(0, 1) == [16384, 16384]


def test_a_mount_that_fails_is_told(host: BootHost) -> None:
    host.mount_fails = True
    result = host.run(_spec())
    assert (result["complete"], result["mounted"]) == (True, False)
    assert "mounting hugetlbfs" in result["why"]


def test_a_mount_of_somebody_else_is_left_alone(host: BootHost) -> None:
    with (host.tree / "proc/self/mountinfo").open("a") as file:
        file.write(f"99 1 0:9 / {host.root}/kv/mem rw - tmpfs x rw\n")
    result = host.run(_spec())
    assert result["mounted"] is False
    assert "tmpfs already" in result["why"]
    assert not host.memory_mounts


def test_a_root_that_is_a_symbolic_link_is_refused(host: BootHost) -> None:
    host.root.symlink_to(host.tree)
    assert host.run(_spec()) == {}
    assert "symbolic link" in host.stderr
    assert host.pages(0, 1) == [0, 0]


def test_a_root_that_cannot_be_made_keeps_everything_as_it_is(host: BootHost) -> None:
    host.root.write_text("a file")
    assert host.run(_spec()) == {}
    assert host.pages(0, 1) == [0, 0]


@pytest.mark.parametrize("junk", ["", "MemTotal: - kB\n", "\0\0", "Node 0 MemTotal: 9x kB\n"])
def test_junk_from_the_kernel_is_no_reason_to_fail(host: BootHost, junk: str) -> None:
    for name in ("proc/meminfo", "proc/buddyinfo", "sys/devices/system/node/node0/meminfo"):
        (host.tree / name).write_text(junk)
    host.pages_file(1).write_text(junk)
    assert host.run(_spec())["pool"] == "kv"


@pytest.mark.parametrize("junk", ["", "9x", "-1"])
def test_a_count_that_is_no_number_counts_as_none(host: BootHost, junk: str) -> None:
    host.pages_file(1).write_text(junk)
    assert host.run(_spec())["complete"] is True
    assert host.pages(0, 1) == [16384, 16384]


def test_even_a_fatal_error_of_the_shell_ends_with_0(host: BootHost) -> None:
    command = host.command(_spec())
    script = Path(command[-1])
    script.write_text(script.read_text().replace("main() {\n", "main() {\n    : $((8z))\n"))
    done = subprocess.run(command, env=host.environment, capture_output=True, check=False)
    assert (done.returncode, host.result()) == (0, {})
    assert done.stderr


def test_scripts_of_several_pools_may_stand_in_one_file(host: BootHost) -> None:
    first, second = _spec(), spec_from_options(name="b", size="2Gi", backings="HugeTLB2Mi")
    command = host.command(first)
    script = Path(command[-1])
    script.write_text(script.read_text() + boot_script(second, root=str(host.root)))
    assert subprocess.run(command, env=host.environment, check=False).returncode == 0
    assert host.pages(0, 1) == [16384 + 512, 16384 + 512]
    assert host.result("kv")["complete"] is True
    assert [entry["got"] for entry in host.result("b")["nodes"]] == [512, 512]


def test_what_was_passed_over_once_is_not_taken_on_top_later(host: BootHost) -> None:
    host.gives_none(1, 1 << 20)
    backings = "HugeTLB1Gi,HugeTLB2Mi"
    assert host.run(_spec(backings))["nodes"][1]["backing"] == "HugeTLB2Mi"
    host.pages_file(1, 1 << 20).unlink()
    host.pages_file(1, 1 << 20).write_text("0\n")
    assert host.run(_spec(backings))["nodes"][1]["backing"] == "HugeTLB2Mi"
    assert host.pages(0, 1, kib=1 << 20) == [32, 0]


def test_missing_proc_and_sys_are_no_reason_to_fail(host: BootHost) -> None:
    shutil.rmtree(host.tree / "proc")
    shutil.rmtree(host.tree / "sys")
    assert host.run(_spec()) == {}


def test_the_end_of_systemds_patience_keeps_what_is_done(host: BootHost) -> None:
    meminfo = host.tree / "sys/devices/system/node/node1/meminfo"
    text = meminfo.read_text()
    meminfo.unlink()
    os.mkfifo(meminfo)
    process = subprocess.Popen(host.command(_spec()), env=host.environment)
    with meminfo.open("w") as pipe:  # opens once the script reads it
        process.send_signal(signal.SIGTERM)
        pipe.write(text)
    assert process.wait(30) == 0
    result = host.result()
    assert (result["complete"], result["why"]) == (False, "stopped before it was done")
    assert host.pages(0, 1) == [0, 0]


@pytest.mark.parametrize("arguments", [["-n"], ["kv", "pool.yaml"]])
def test_arguments_are_refused(host: BootHost, arguments: list[str]) -> None:
    done = subprocess.run(
        [*host.command(_spec()), *arguments],
        env=host.environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert "takes no arguments" in done.stderr


def test_a_system_root_that_is_not_there_is_refused(host: BootHost) -> None:
    environment = host.environment | {"HOSTPREP_SYSROOT": "/nowhere/at/all"}
    done = subprocess.run(host.command(_spec()), env=environment, check=False)
    assert done.returncode == 2


def test_the_result_is_renamed_into_place(host: BootHost) -> None:
    host.run(_spec())
    assert sorted(entry.name for entry in (host.root / "kv").iterdir()) == [
        "boot.json",
        "boot.ledger",
        "mem",
    ]


@pytest.mark.parametrize(
    "root",
    ["run", "/", "/run/../etc", "/run/a b", "/run/$(id)", "/run/x'y", "/run/x\ny", "/run//x"],
)
def test_roots_that_a_shell_could_misread_are_refused(root: str) -> None:
    with pytest.raises(BadInputError, match="plain absolute path"):
        boot_script(_spec(), root=root)


def test_names_are_checked_again_before_they_are_written_into_a_script() -> None:
    with pytest.raises(BadInputError, match="DNS label"):
        boot_script(PoolSpec(name="kv; reboot", size_bytes=1 << 30), root="/run/hostprep")


def test_a_pool_to_be_released_has_no_script() -> None:
    spec = PoolSpec(name="kv", size_bytes=1 << 30, state=PoolState.ABSENT)
    with pytest.raises(BadInputError, match="released"):
        boot_script(spec, root="/run/hostprep")


def test_the_unit_runs_before_kubelet_and_never_keeps_it() -> None:
    unit = systemd_unit("/etc/hostprep/kv.sh", "/etc/hostprep/other.sh").splitlines()
    for line in ("Type=oneshot", "RemainAfterExit=yes", "TimeoutStartSec=120"):
        assert line in unit
    assert any(line.startswith("Before=kubelet.service") for line in unit)
    assert unit.index("ExecStart=-/bin/sh /etc/hostprep/kv.sh") + 1 == unit.index(
        "ExecStart=-/bin/sh /etc/hostprep/other.sh"
    )
    assert not any(line.startswith(("RequiredBy", "Requires=")) for line in unit)


@pytest.mark.parametrize("paths", [(), ("kv.sh",), ("/etc/a b.sh",), ("/etc/%h.sh",)])
def test_a_unit_takes_plain_absolute_paths_only(paths: tuple[str, ...]) -> None:
    with pytest.raises(BadInputError):
        systemd_unit(*paths)
