"""The command line as a person uses it: the README's lines, and everything that can be mistyped."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import hostprep
from hostprep.node.apply.service import Node
from testbed.machine import OLD_PYTHON, POOL, huge_pages_total, pool_of
from tests.support.processes import hostprep as run_hostprep
from tests.support.processes import hostprep_as

pytestmark = pytest.mark.kernel

POOL_YAML = """\
apiVersion: hostprep.dev/v1alpha1
kind: HostMemoryPool
metadata: {name: kv}
spec:
  size: 32Mi
  backings: [HugeTLB2Mi, Base]
  regions: 2
"""


def test_prepare_verify_status_and_release_leave_the_huge_pages_as_they_were(node: Node) -> None:
    before = huge_pages_total()
    where = ("--root", node.root)
    prepared = run_hostprep(
        "prepare", "--name", "kv", "--size", "64Mi", "--backing", "HugeTLB2Mi,Base", *where
    )
    assert prepared.returncode == 0, prepared.stderr
    assert "64 MiB prepared in HugeTLB2Mi" in prepared.stdout
    assert run_hostprep("verify", "kv", *where).returncode == 0
    assert run_hostprep("verify", "kv", "--pages", *where).returncode == 0
    status = json.loads(run_hostprep("status", "-o", "json", *where).stdout)
    assert status["pools"][0]["ready"] is True
    assert status["pools"][0]["regions"][0]["state"] == "Free"
    assert huge_pages_total() == before + 32
    assert run_hostprep("release", "kv", *where).returncode == 0
    assert huge_pages_total() == before


def test_the_custom_resource_file_works_without_a_cluster(node: Node, tmp_path: Path) -> None:
    file = tmp_path / "pool.yaml"
    file.write_text(POOL_YAML)
    planned = run_hostprep("plan", "-f", str(file), "--root", node.root, "-o", "json")
    assert not os.path.exists(node.root)
    actions = json.loads(planned.stdout)["actions"]
    assert sum(action["action"] == "CreateRegion" for action in actions) == 2
    dry = run_hostprep("prepare", "--dry-run", "-f", str(file), "--root", node.root)
    assert "populate node0-0" in dry.stdout
    assert not os.path.exists(node.root)
    done = run_hostprep("prepare", "-f", str(file), "--root", node.root, "--progress", "plain")
    assert done.returncode == 0
    assert "populate node0-1" in done.stderr
    assert "Nothing to do" in run_hostprep("plan", "-f", str(file), "--root", node.root).stdout


def test_progress_as_json_lines_adds_up_to_the_region(node: Node) -> None:
    done = run_hostprep(
        "prepare", "--name", "kv", "--size", "64Mi", "--root", node.root, "--progress", "json"
    )
    events = [json.loads(line) for line in done.stderr.splitlines()]
    ends = [e for e in events if e["event"] == "end" and e["action"] == "CreateRegion"]
    begins = [e for e in events if e["event"] == "begin" and e["action"] == "CreateRegion"]
    assert begins[0]["expected_bytes"] == 64 << 20
    assert ends[0]["took_s"] > 0


def test_demo_shows_the_two_side_by_side_and_gives_all_back() -> None:
    before = huge_pages_total()
    done = run_hostprep("demo", "--size", "64Mi", "-o", "json", timeout_s=120)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["size_bytes"] == 64 << 20
    assert result["attach_s"] > 0
    assert result["cold_s"] > 0
    assert huge_pages_total() == before


def test_exec_becomes_the_command_and_the_lease_lives_as_long(node: Node) -> None:
    node.prepare([pool_of(regions=2)])
    code = (
        "import hostprep, os, json\n"
        "m = hostprep.join()\n"
        "m.buffer[:5] = b'hello'\n"
        "path = os.environ['HOSTPREP_PATH']\n"
        "print(json.dumps([os.environ['HOSTPREP_SIZE_BYTES'], open(path, 'rb').read(5).decode(),"
        " os.environ['HOSTPREP_REGIONS']]))\n"
    )
    done = run_hostprep("exec", "--pool", POOL, "--root", node.root, "--count", "2", "--",
                        sys.executable, "-c", code)  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [str(8 << 20), "hello", "node0-0:node0-1"]
    hostprep.attach_many(POOL, count=2, root=node.root)[0].close()


def test_exec_passes_the_commands_own_exit_code_on(node: Node) -> None:
    node.prepare([pool_of()])
    command = ("exec", "--pool", POOL, "--root", node.root, "--", "sh", "-c", "exit 7")
    assert run_hostprep(*command).returncode == 7


def test_what_a_device_plugin_sets_need_not_be_said_again(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    node.prepare([pool_of()])
    monkeypatch.setenv("HOSTPREP_ROOT", node.root)
    for command in (("wait", "--wait", "0"), ("attach",), ("exec", "--", "true")):
        told = _bad(*command)
        assert "HOSTPREP_POOL" in told
    monkeypatch.setenv("HOSTPREP_POOL", POOL)
    for command in (("wait", "--wait", "0"), ("attach",), ("exec", "--", "true")):
        done = run_hostprep(*command)
        assert done.returncode == 0, done.stderr
        node.prepare([pool_of()])
    told = _bad("wait", "--wait", "0", "--pool", "other", code=1)
    assert "other" in told
    monkeypatch.setenv("HOSTPREP_POOL", "../x")
    assert "../x" in _bad("wait", "--wait", "0")


def test_exec_links_the_region_where_the_engine_looks(node: Node, tmp_path: Path) -> None:
    node.prepare([pool_of(regions=2)])
    link = f"{tmp_path}/engine-{{index}}.bin"
    show = f"readlink -f {tmp_path}/engine-0.bin {tmp_path}/engine-1.bin"
    done = run_hostprep(
        "exec", "--pool", POOL, "--root", node.root, "--count", "2", "--link", link, "--",
        "sh", "-c", show,
    )  # fmt: skip
    assert done.stdout.split() == [
        f"{node.root}/{POOL}/mem/node0-0",
        f"{node.root}/{POOL}/mem/node0-1",
    ]

    stale = tmp_path / "engine-0.bin"
    for memory in hostprep.attach_many(POOL, count=2, root=node.root):
        memory.close()
    assert not os.path.lexists(stale), "the next claim removes the link"


def test_a_stale_link_is_harmless_and_can_be_taken_again(node: Node, tmp_path: Path) -> None:
    node.prepare([pool_of(regions=2)])
    link = tmp_path / "engine.bin"
    command = ("exec", "--pool", POOL, "--root", node.root, "--link", str(link), "--", "true")
    assert run_hostprep(*command).returncode == 0
    node.prepare([pool_of(regions=2)])  # scrubs, and takes the lease's own link away
    link.unlink(missing_ok=True)
    os.symlink(f"{node.root}/{POOL}/links/node0-0@gone", link)
    assert not link.exists()

    assert run_hostprep(*command).returncode == 0


def test_exec_does_not_overwrite_what_is_not_its_own(node: Node, tmp_path: Path) -> None:
    node.prepare([pool_of()])
    precious = tmp_path / "file"
    precious.write_text("mine")
    done = run_hostprep(
        "exec", "--pool", POOL, "--root", node.root, "--link", str(precious), "--", "true"
    )
    assert done.returncode == 2
    assert precious.read_text() == "mine"
    hostprep.attach(POOL, root=node.root).close()


@pytest.mark.parametrize("python", [sys.executable, *([OLD_PYTHON] if OLD_PYTHON else [])])
def test_the_published_zipapp_does_exec_wait_and_attach(node: Node, python: str) -> None:
    node.prepare([pool_of()])
    zipapp = f"{node.root}/hostprep.pyz"
    for command in (
        ["wait", "--pool", POOL, "--root", node.root, "--wait", "1"],
        ["attach", "--pool", POOL, "--root", node.root, "-o", "json"],
        ["exec", "--pool", POOL, "--root", node.root, "--", "true"],
    ):
        done = subprocess.run(
            [python, "-I", zipapp, *command], capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
    node.prepare([pool_of()])
    code = f"import sys; sys.path.insert(0, {zipapp!r}); import hostprep\n"
    code += f"hostprep.attach({POOL!r}, root={node.root!r}, read_only=True, region='node0-0')"
    subprocess.run([python, "-c", code], check=True, env={})


def _bad(*arguments: str, code: int = 2) -> str:
    done = run_hostprep(*arguments)
    assert done.returncode == code, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    return done.stderr


@pytest.mark.parametrize(
    ("size", "words"),
    [
        ("0", "more than zero"),
        ("-1Gi", "more than zero"),
        ("lots", "not a quantity"),
        ("1.5", "whole number"),
        ("1000Ti", "more than the machine has"),
        ("9999Ti", "1pi"),
        ("0%", "equal to 1"),
        ("62.5%", "whole percent"),
        ("101%", "100"),
        ("1Ki", "page"),
    ],
)
def test_bad_sizes_are_refused(node: Node, size: str, words: str) -> None:
    told = _bad("prepare", "--name", "kv", "--size", size, "--root", node.root)
    assert words in told.lower()
    assert len(told.strip().splitlines()) <= 4
    assert not os.path.exists(node.root)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--backing", "HugeTLB4Mi"), "HugeTLB2Mi"),
        (("--regions", "some"), "PerNUMANode"),
        (("--regions", "0"), "region"),
        (("--mode", "99"), "mode"),
        (("--gid", "-4"), "gid"),
        (("--reserve", "much"), "reserve"),
    ],
)
def test_bad_options_are_refused(node: Node, options: tuple[str, str], words: str) -> None:
    command = ("prepare", "--name", "kv", "--size", "8Mi", "--root", node.root, *options)
    assert words in _bad(*command)
    assert not os.path.exists(node.root)


@pytest.mark.parametrize("name", ["a/b", "..", "Kv", "", "-kv", "k" * 64])
def test_bad_pool_names_are_refused(node: Node, name: str) -> None:
    _bad("prepare", "--name", name, "--size", "8Mi", "--root", node.root)
    _bad("exec", "--pool", name, "--root", node.root, "--", "true")
    assert not os.path.exists(node.root)


def test_bad_roots_are_refused(node: Node, tmp_path: Path) -> None:
    real = tmp_path / "real"
    real.mkdir()
    link = tmp_path / "link"
    link.symlink_to(real)
    file = tmp_path / "file"
    file.write_text("")
    pool = ("--name", "kv", "--size", "8Mi", "--backing", "Base")
    for root in (link, file, file / "below"):
        assert str(root) in _bad("prepare", *pool, "--root", str(root)).replace("\n", "")
        _bad("exec", "--pool", "kv", "--root", str(link), "--", "true")
    assert list(real.iterdir()) == []
    _bad("prepare", *pool, "--root", "relative/path")
    _bad("status", "--root", str(link))


def test_a_read_only_root_is_refused(tmp_path: Path) -> None:
    pool = ("--name", "kv", "--size", "8Mi", "--backing", "Base")
    subprocess.run(["mount", "-t", "tmpfs", "-o", "ro", "ro", tmp_path], check=True)
    try:
        assert "read-only" in _bad("prepare", *pool, "--root", f"{tmp_path}/root")
    finally:
        subprocess.run(["umount", tmp_path], check=True)


def test_a_full_root_is_not_ready_and_nothing_looks_ready(tmp_path: Path) -> None:
    pool = ("--name", "kv", "--size", "8Mi", "--backing", "Base")
    options = "mode=0755,size=64k,nr_inodes=4"
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "full", tmp_path], check=True)
    try:
        assert "no space" in _bad("prepare", *pool, "--root", str(tmp_path), code=1)
        assert not (tmp_path / "kv/handoff.json").exists()
    finally:
        subprocess.run(["umount", tmp_path], check=True)


def test_bad_files_are_refused(node: Node, tmp_path: Path) -> None:
    file = tmp_path / "pool.yaml"
    for text in ("", "a: [", "kind: Pod", POOL_YAML + "  extra: 1\n", POOL_YAML * 2):
        file.write_text(text)
        assert str(file) in _bad("prepare", "-f", str(file), "--root", node.root)
    _bad("prepare", "-f", str(tmp_path / "missing"), "--root", node.root)
    _bad("prepare", "-f", str(file), "--name", "kv", "--root", node.root)
    _bad("prepare", "--root", node.root)
    assert not os.path.exists(node.root)


def test_what_is_not_there_is_not_ready(node: Node) -> None:
    for command in (
        ("release", "kv"),
        ("verify", "kv"),
        ("status", "kv"),
        ("wait", "--pool", "kv", "--wait", "0"),
        ("exec", "--pool", "kv", "--", "true"),
    ):
        told = _bad(command[0], "--root", node.root, *command[1:], code=1)
        assert "prepare" in told or "status" in told


@pytest.mark.parametrize("command", ["release", "status", "verify"])
@pytest.mark.parametrize("name", ["a/b", "../kv", ""])
def test_what_names_no_pool_is_refused(node: Node, command: str, name: str) -> None:
    assert "not a DNS label" in _bad(command, "--root", node.root, "--", name)


def test_a_missing_command_is_refused_before_anything_is_claimed(node: Node) -> None:
    node.prepare([pool_of()])
    _bad("exec", "--pool", POOL, "--root", node.root, "--", "no-such-program")
    _bad("exec", "--pool", POOL, "--root", node.root)
    told = _bad("exec", "--pool", POOL, "--root", node.root, "--size", "1Ti", "--", "true", code=1)
    assert "node0-0 8 MiB" in told


def test_errors_are_json_where_json_was_asked_for(node: Node) -> None:
    done = run_hostprep("verify", "kv", "-o", "json", "--root", node.root)
    assert json.loads(done.stdout)["reason"] == "NotPrepared"


def test_not_root_prepares_base_pages_in_a_folder_of_its_own(tmp_path: Path) -> None:
    """Without own mounts, on the tmpfs that is there; and says what root would add."""
    folder = Path("/dev/shm/hostprep-test-nobody")
    shutil.rmtree(folder, ignore_errors=True)
    root = f"{folder}/root"
    folder.mkdir()
    shutil.chown(folder, 65534, 65534)
    try:
        wanted = ("--name", "kv", "--size", "16Mi", "--root", root)
        planned = _as_nobody("plan", *wanted)
        assert "root" in planned.stdout, planned.stderr
        assert _as_nobody("prepare", *wanted).returncode == 0
        for _ in range(2):
            attached = _as_nobody("attach", "--pool", "kv", "--root", root, "-o", "json")
            assert attached.returncode == 0, attached.stderr
        assert _as_nobody("verify", "kv", "--root", root).returncode == 0
        assert _as_nobody("release", "kv", "--root", root).returncode == 0
        refused = _as_nobody("prepare", "--name", "kv", "--size", "16Mi", "--root", "/run/hp-no")
        assert refused.returncode == 2
        assert "root" in refused.stderr
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _as_nobody(*arguments: str) -> subprocess.CompletedProcess[str]:
    return hostprep_as(65534, 65534, *arguments)
