"""`hostprep exec --engine vllm` on real memory: the program that is exec'd reads its own link."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hostprep.backing import MIB, Backing
from hostprep.node.apply.service import Node
from testbed.machine import POOL, pool_of
from testbed.processes import wait_for
from tests.kernel.engines import fake_vllm
from tests.support.processes import hostprep_as

pytestmark = pytest.mark.kernel

CONFIG = "--kv-transfer-config"


@pytest.fixture
def vllm(tmp_path: Path) -> Iterator[str]:
    """A script named vllm; links that it was given in /dev/shm are gone afterwards."""
    before = set(os.listdir("/dev/shm"))
    script = tmp_path / "bin" / "vllm"
    script.parent.mkdir()
    source = Path(fake_vllm.__file__).read_text()
    script.write_text(f"#!{sys.executable}\n{source}")
    script.chmod(0o755)
    yield str(script)
    for name in set(os.listdir("/dev/shm")) - before:
        if name.startswith("vllm_offload_"):
            os.unlink(f"/dev/shm/{name}")


@pytest.fixture
def huge(node: Node) -> Node:
    """Two regions of huge pages."""
    node.prepare([pool_of(regions=2, backing=Backing.HUGETLB_2MI)])
    return node


def _start(node: Node, vllm: str, *options: str, way: str = "vllm", told: Any = ()) -> list[str]:
    command = [sys.executable, "-m", "hostprep", "exec", "--pool", POOL, "--root", node.root]
    return [*command, *told, "--engine", way, "--", vllm, "serve", "some/model", *options]


def _run(*arguments: Any, **named: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        _start(*arguments, **named), capture_output=True, text=True, check=False, timeout=60
    )


def _found(done: subprocess.CompletedProcess[str]) -> list[dict[str, Any]]:
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def _state(node: Node) -> dict[str, Any]:
    command = [sys.executable, "-m", "hostprep", "status", "--root", node.root, "-o", "json"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    (pool,) = json.loads(done.stdout)["pools"]
    return {region["name"]: region["state"] for region in pool["regions"]}


def _links(node: Node) -> list[str]:
    return os.listdir(f"{node.root}/{POOL}/links")


def test_vllm_finds_its_region_by_its_own_name_and_joins_it(huge: Node, vllm: str) -> None:
    (found,) = _found(_run(huge, vllm, "--port", "8000"))
    assert found["argv"][:4] == ["serve", "some/model", "--port", "8000"]
    assert found["creator"] is False
    assert found["leads_to"] == f"{huge.root}/{POOL}/mem/node0-0"
    assert found["file_bytes"] == 8 * MIB
    assert found["config"]["kv_connector_extra_config"]["cpu_bytes_to_use"] == 8 * MIB
    assert Path(found["leads_to"]).read_bytes()[:5] == b"rank\0"


def test_the_next_engine_reads_zeros_under_a_name_of_its_own(huge: Node, vllm: str) -> None:
    regions = ("--region", "node0-0")
    (first,) = _found(_run(huge, vllm, told=regions))
    (second,) = _found(_run(huge, vllm, told=regions))
    assert second["path"] != first["path"]
    assert second["leads_to"] == first["leads_to"]
    assert second["was_zero"]
    assert not os.path.lexists(first["path"])


def test_each_data_parallel_rank_has_a_region(huge: Node, vllm: str) -> None:
    found = _found(_run(huge, vllm, "-dp", "2"))
    paths = [rank["leads_to"] for rank in found]
    assert sorted(os.path.basename(path) for path in paths) == ["node0-0", "node0-1"]
    assert [Path(path).read_bytes()[4] for path in paths] == [0, 1]
    assert [rank["path"].rpartition("_")[2] for rank in found] == ["dp0.mmap", "dp1.mmap"]


def test_the_plugins_get_a_lease_and_the_zipapp_to_import(huge: Node, tmp_path: Path) -> None:
    script = tmp_path / "vllm"
    script.write_text(
        "#!/bin/sh\ncd / && exec python3 -c "
        "'import json, os, sys; import hostprep.engines.vllm as v; "
        'print(json.dumps([v.__file__, os.environ["HOSTPREP_REGIONS"], sys.argv[1:]]))\' "$@"\n'
    )
    script.chmod(0o755)
    for way, name in (
        ("vllm-offloading", "HostprepOffloadingSpec"),
        ("vllm-simple", "HostprepSimpleConnector"),
    ):
        done = _run(huge, str(script), way=way)
        assert done.returncode == 0, done.stderr
        file, regions, argv = json.loads(done.stdout)
        assert re.fullmatch(
            r".*/hostprep-0\.1\.0-\w{12}\.pyz/hostprep/engines/vllm/__init__\.py", file
        )
        assert regions in ("node0-0", "node0-1")
        assert name in argv[-1]
        assert not _links(huge)


@pytest.mark.parametrize(
    ("options", "told", "words"),
    [
        ([f"{CONFIG}.kv_connector_extra_config.cpu_bytes_to_use", "16M"], (), "16 MiB.*8 MiB"),
        ([f"{CONFIG}.kv_connector", "NixlConnector"], (), "needs OffloadingConnector"),
        (["--kv-offloading-size", "1"], (), "another connector"),
        (["-dp", "2"], ("--count", "1"), "needs 2 region.*gives it 1"),
        ([CONFIG, "{"], (), "no JSON"),
    ],
)
def test_bad_input_is_2_and_nothing_was_claimed(
    huge: Node, vllm: str, options: list[str], told: tuple[str, ...], words: str
) -> None:
    before = _state(huge)
    done = _run(huge, vllm, *options, told=told)
    assert done.returncode == 2
    assert not done.stdout
    assert re.search(words, done.stderr), done.stderr
    assert _state(huge) == before == {"node0-0": "Free", "node0-1": "Free"}
    assert not _links(huge)


def test_a_file_that_a_dead_engine_left_is_refused_before_the_claim(huge: Node, vllm: str) -> None:
    left = Path("/dev/shm/vllm_offload_hostprep-test-left.mmap")
    left.touch()
    try:
        done = _run(huge, vllm, f"{CONFIG}.engine_id", "hostprep-test-left")
        assert done.returncode == 2
        assert "dead engine" in done.stderr
        assert _state(huge)["node0-0"] == "Free"
    finally:
        left.unlink()


def test_the_same_engine_id_again_while_the_first_runs_is_refused(huge: Node, vllm: str) -> None:
    options = (f"{CONFIG}.engine_id", "hostprep-test-twice")
    environ = {**os.environ, "FAKE_VLLM_SLEEP_S": "100"}
    running = subprocess.Popen(
        _start(huge, vllm, *options), env=environ, stdout=subprocess.PIPE, text=True
    )
    try:
        assert running.stdout is not None
        assert json.loads(running.stdout.readline())["creator"] is False
        done = _run(huge, vllm, *options)
        assert done.returncode == 2
        assert "leads to a region that is leased" in done.stderr
        assert _state(huge) == {"node0-0": "Leased", "node0-1": "Free"}
    finally:
        running.kill()
        running.wait()
        assert running.stdout is not None
        running.stdout.close()
    wait_for(lambda: _state(huge)["node0-0"] != "Leased", 30, why="the lease did not end")
    (again,) = _found(_run(huge, vllm, *options))
    assert again["was_zero"]


def test_an_engine_of_the_group_links_and_joins_and_another_is_told_which(
    node: Node, vllm: str
) -> None:
    Path(node.root).parent.chmod(0o755)
    for parent in Path(vllm).parents[:-2]:
        parent.chmod(0o755)
    node.prepare([pool_of(backing=Backing.HUGETLB_2MI, gid=4242)])
    command = _start(node, vllm)[3:]
    refused = hostprep_as(4321, 1234, *command)
    assert refused.returncode == 2
    assert "the pool's group (gid 4242)" in refused.stderr
    (found,) = _found(hostprep_as(4321, 4242, *command))
    assert found["creator"] is False
    assert found["leads_to"].endswith("/mem/node0-0")


def test_the_zipapp_alone_starts_an_engine_and_lists_them(huge: Node, vllm: str) -> None:
    python = shutil.which("python3", path="/usr/bin") or sys.executable
    zipapp = [python, f"{huge.root}/hostprep.pyz"]
    command = _start(huge, vllm)
    done = subprocess.run(
        [*zipapp, *command[3:]], capture_output=True, text=True, check=False, timeout=60
    )
    assert _found(done)[0]["file_bytes"] == 8 * MIB
    listed = subprocess.run(
        [*zipapp, "engines", "-o", "json"], capture_output=True, text=True, check=True, timeout=60
    )
    assert json.loads(listed.stdout)[0]["name"] == "vllm"
    Path(vllm).write_text('#!/bin/sh\necho "$PYTHONPATH"\n')
    command = _start(huge, vllm, way="vllm-simple")
    done = subprocess.run(
        [*zipapp, *command[3:]], capture_output=True, text=True, check=False, timeout=60
    )
    assert re.fullmatch(rf"{huge.root}/hostprep-0\.1\.0-\w{{12}}\.pyz\n", done.stdout)
