"""The boot unit on file systems that refuse, through PID 1's root, and kept by a real worker."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from hostprep.agent.messages import ReconcileResult
from hostprep.api.pool_spec import PoolSpec, PoolState
from hostprep.node.apply.service import Node
from hostprep.node.boot.install import UNIT, sync_boot_unit
from testbed.machine import pool_of
from tests.kernel.worker_process import WorkerProcess, wanted

pytestmark = pytest.mark.kernel

ROOT = "/run/hostprep"


@pytest.fixture
def host(machine: None, tmp_path: Path) -> Iterator[Path]:
    """A node's root on a small file system of its own."""
    if os.geteuid() != 0:
        pytest.skip("needs root: mounts")
    folder = tmp_path / "host"
    folder.mkdir()
    _run("mount", "-t", "tmpfs", "-o", "size=64k", "test", str(folder))
    for path in ("run/systemd/system", "etc/systemd/system/multi-user.target.wants"):
        (folder / path).mkdir(parents=True)
    yield folder
    _run("umount", str(folder))


def _run(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def _why(host: Path) -> str:
    ((_, why),) = sync_boot_unit([pool_of()], (), root=ROOT, host=str(host)).failures
    return why


def test_a_read_only_etc_is_said_with_what_to_do(host: Path) -> None:
    _run("mount", "-o", "remount,ro", str(host))
    why = _why(host)
    assert "read-only" in why
    assert "/etc/hostprep" in why
    assert "hostprep boot --script" in why
    assert "--root" not in why


def test_a_full_disk_is_said_and_leaves_no_half_script(host: Path) -> None:
    with pytest.raises(OSError, match="No space"):
        (host / "filler").write_bytes(bytes(1 << 20))
    why = _why(host)
    assert "no space" in why
    assert "/etc/hostprep/kv.sh" in why
    assert not (host / "etc/hostprep/kv.sh").exists()
    assert not (host / "etc/systemd/system" / UNIT).exists()

    (host / "filler").unlink()
    assert sync_boot_unit([pool_of()], (), root=ROOT, host=str(host)).pools == ("kv",)


def test_a_read_only_etc_keeps_an_absent_pool_in_the_answer(host: Path) -> None:
    """Else the next boot would reserve pages for nobody, and nobody would know."""
    sync_boot_unit([pool_of()], (), root=ROOT, host=str(host))
    _run("mount", "-o", "remount,ro", str(host))
    said = sync_boot_unit([], ("kv",), root=ROOT, host=str(host))
    assert dict(said.failures).keys() == {"kv"}


def test_another_mount_namespace_than_the_nodes_is_recognised(machine: None) -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root: namespaces")
    program = "from hostprep.node.boot.install import host_folder; print(host_folder())"
    inner = f"unshare --mount {sys.executable} -c '{program}'; exit $?"
    nested = ("unshare", "--pid", "--fork", "--mount-proc", "sh", "-c")
    assert _run(*nested, inner).strip() == "/proc/1/root"
    assert _run(*nested, f"{sys.executable} -c '{program}'; exit $?").strip() == "/"


def test_a_worker_that_no_longer_reaches_the_node_remembers_the_script(
    node: Node, host: Path, tmp_path: Path
) -> None:
    """An agent that was given hostPID once, and is not now."""
    (present,) = wanted(pool_of())
    absent = wanted(PoolSpec(name="kv", state=PoolState.ABSENT, size_bytes=1))
    options = ("--state-dir", str(tmp_path))
    with WorkerProcess(node.root, "--host", str(host), *options) as worker:
        worker.round(replace(present, at_boot=True))
    with WorkerProcess(node.root, "--host", str(tmp_path / "none"), *options) as worker:
        worker.round(*absent)
        answer = worker.round(*absent)[0]
        assert isinstance(answer, ReconcileResult)
        assert dict(answer.boot.failures).keys() == {"kv"}


def test_the_worker_keeps_the_unit_from_an_entry_to_its_absence(node: Node, host: Path) -> None:
    (present,) = wanted(pool_of())
    absent = wanted(PoolSpec(name="kv", state=PoolState.ABSENT, size_bytes=1))
    with WorkerProcess(node.root, "--host", str(host)) as worker:
        answer = worker.round(replace(present, at_boot=True))[0]
        assert isinstance(answer, ReconcileResult)
        assert answer.boot.pools == ("kv",)
        script = (host / "etc/hostprep/kv.sh").read_text()
        assert f"ROOT={node.root}" in script
        assert subprocess.run(["sh", "-n", str(host / "etc/hostprep/kv.sh")], check=True)

        worker.round()
        assert (host / "etc/systemd/system" / UNIT).exists()

        worker.round(*absent)
        assert not (host / "etc/hostprep").exists()
        assert not (host / "etc/systemd/system" / UNIT).exists()
