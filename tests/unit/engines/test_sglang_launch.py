"""What `--engine sglang` asks of a pool, and how SGLang starts over its leases."""

from __future__ import annotations

import importlib.metadata
import json
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

from hostprep.backing import GIB
from hostprep.engines.catalogue import integration_of
from hostprep.engines.launching import EngineStart, Launch, Options, Requirements
from hostprep.engines.sglang import launch
from hostprep.errors import BadInputError, NotReadyError
from hostprep.node.apply.publish import build_zipapp
from tests.unit.engines.leases import leases_of

pytestmark = pytest.mark.unit

ROOT = Path(__file__).parents[3]
SGLANG = integration_of("sglang")
SERVER = ("python3", "-m", "sglang.launch_server", "--model-path", "m")
NOTHING = {"PATH": "/nowhere"}
HICACHE = "--enable-hierarchical-cache"


def _required(*options: str, told: Options | None = None) -> Requirements:
    return launch.requirements(EngineStart(SGLANG, (*SERVER, *options), NOTHING, told or Options()))


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("root")
    (folder / "hostprep.pyz").write_bytes(build_zipapp())
    return folder


def _completed(root: Path, *options: str, environ: dict[str, str] | None = None) -> Launch:
    return launch.complete(
        EngineStart(SGLANG, (*SERVER, *options), environ or NOTHING),
        leases_of(8 * GIB, root=str(root)),
    )


def test_the_server_gets_its_cache_and_the_plugin(root: Path) -> None:
    assert _required() == Requirements(count=1)
    done = _completed(root)
    fraction = ("--hicache-host-memory-fraction", "1.0")
    assert done.command == (*SERVER, HICACHE, *fraction)
    assert done.variables == {"HOSTPREP_SGLANG": "1", "PYTHONPATH": f"{root}/hostprep.pyz"}
    assert done.links == ()
    assert done.notes == ()


def test_what_is_there_stays(root: Path) -> None:
    words = ("sglang", "serve", "m", "--enable-hicache", "--hicache-size=4")
    environ = {
        **NOTHING,
        "SGLANG_PLUGINS": "mine",
        "PYTHONPATH": "/x",
        "SGLANG_HUGEPAGE_SIZE": "2MB",
    }
    done = launch.complete(EngineStart(SGLANG, words, environ), leases_of(8 * GIB, root=str(root)))
    assert done.command == words
    assert done.variables["SGLANG_PLUGINS"] == "mine,hostprep"
    assert done.variables["PYTHONPATH"] == f"{root}/hostprep.pyz:/x"
    assert "SGLANG_HUGEPAGE_SIZE has no effect" in done.notes[0]
    ours = {**NOTHING, "SGLANG_PLUGINS": "mine, hostprep"}
    assert (
        "SGLANG_PLUGINS"
        not in launch.complete(
            EngineStart(SGLANG, words, ours), leases_of(8 * GIB, root=str(root))
        ).variables
    )


def test_a_decode_servers_pools_are_its_own_business(root: Path) -> None:
    assert HICACHE not in _completed(root, "--disaggregation-mode", "decode").command


@pytest.mark.parametrize(
    ("options", "told", "required"),
    [
        (("--hicache-size", "30"), Options(), (1, 30, 1)),
        (("--hicache-size", "30", "--tp", "4"), Options(), (1, 30, 4)),
        (("--hicache-size", "30", "--tensor-parallel-size=4"), Options(count=4), (4, 30, 1)),
        (("--hicache-size", "30", "--tp-size", "4"), Options(count=2), (2, 30, 2)),
        (("--hicache-size", "5", "--tp", "2", "--pp-size", "2", "--dp", "2"), Options(), (1, 5, 8)),
        (
            ("--hicache-size", "5", "--tp", "8", "--dp-size", "8", "--enable-dp-attention"),
            Options(),
            (1, 5, 8),
        ),
        (("--hicache-size", "5", "--tp", "16", "--nnodes", "2"), Options(), (1, 5, 8)),
    ],
)
def test_each_rank_needs_its_size(
    options: tuple[str, ...], told: Options, required: tuple[int, int, int]
) -> None:
    count, size_gb, sharing = required
    asked = _required(*options, told=told)
    assert (asked.count, asked.size_bytes) == (count, size_gb * 10**9 * sharing)
    assert f"--hicache-size is {size_gb} for each rank" in asked.because


def test_a_ratio_is_known_to_sglang_only(root: Path) -> None:
    assert _required("--hicache-ratio", "3", "--tp", "2", told=Options(count=2)) == Requirements(
        count=2
    )
    assert "--hicache-host-memory-fraction" not in _completed(root, "--hicache-ratio", "3").command


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--disable-radix-cache",), "nothing to be kept"),
        (("--enable-lmcache",), "--engine lmcache"),
        (("--enable-unified-cache-external-linker",), "another store"),
        (("--use-ray",), "outside of this command"),
        (("--hicache-storage-backend", "shm"), "allocates the host pools itself"),
        (("--hicache-storage-backend=tensorcast",), "allocates the host pools itself"),
        (
            (
                "--hicache-storage-backend", "dynamic",
                "--hicache-storage-backend-extra-config", '{"allocator": "shm"}',
            ),
            "allocates the host pools itself",
        ),
        (
            (
                "--hicache-storage-backend", "mooncake",
                "--hicache-storage-backend-extra-config", '{"standalone_storage": true}',
            ),
            "allocates the host pools itself",
        ),
        (("--tp", "2", "--hicache-size", "1.5"), "'1.5' is no size"),
        (("--tp", "0"), "--tp-size '0'"),
        (("--tp", "x"), "--tp-size 'x'"),
        (("--tp", "3"), "3 on this node finds 2 region"),
    ],
)  # fmt: skip
def test_what_contradicts_is_refused(options: tuple[str, ...], says: str) -> None:
    with pytest.raises(BadInputError, match=says) as caught:
        _required(*options, told=Options(count=2))
    assert caught.value.remedy


def test_other_storage_backends_lie_below_the_host_pools() -> None:
    for backend in ("file", "mooncake", "nixl", "hf3fs"):
        assert _required("--hicache-storage-backend", backend) == Requirements(count=1)
    config = (
        "--hicache-storage-backend",
        "dynamic",
        "--hicache-storage-backend-extra-config",
        "@f",
    )
    assert _required(*config) == Requirements(count=1)


def test_options_in_a_file_have_to_be_seen(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("model-path: m\n")
    assert _required("--config", str(path)) == Requirements(count=1)
    for line in (
        "hicache-size: 30",
        "tensor_parallel_size: 8",
        '"tp-size": 8',
        "enable-hicache: true",
    ):
        path.write_text(f"model-path: m\n{line}\n")
        with pytest.raises(BadInputError, match="c.yaml sets"):
            _required("--config", str(path))


@pytest.mark.parametrize(
    "command", [("python3", "engine.py"), ("sglang", "generate"), ("-m",), SERVER[1:]]
)
def test_another_program_is_refused(command: tuple[str, ...]) -> None:
    with pytest.raises(BadInputError, match="starts no server"):
        launch.requirements(EngineStart(SGLANG, command, NOTHING))


def test_a_plugin_that_would_not_be_found_is_said(tmp_path: Path) -> None:
    """SGLang would start without it, and allocate as much again."""
    with pytest.raises(NotReadyError, match="would not find our plugin") as caught:
        _completed(tmp_path)
    assert caught.value.reason == "NoPlugin"
    with zipfile.ZipFile(tmp_path / "hostprep.pyz", "w") as older:
        older.writestr("hostprep/__init__.py", "")
    with pytest.raises(NotReadyError):
        _completed(tmp_path)


def test_the_zipapp_is_found_as_if_it_were_installed(root: Path) -> None:
    code = (
        "import json, importlib.metadata as m;"
        "(p,) = m.entry_points(group='sglang.srt.plugins');"
        "p.load()();"
        "print(json.dumps([p.name, p.value, p.dist.version, p.load().__code__.co_filename]))"
    )
    done = subprocess.run(
        [sys.executable, "-S", "-P", "-c", code],
        env={"PYTHONPATH": f"{root}/hostprep.pyz"},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    name, value, version, file = json.loads(done.stdout)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert {name: value} == project["entry-points"]["sglang.srt.plugins"]
    assert version == project["version"] == importlib.metadata.version("hostprep")
    assert file.startswith(f"{root}/hostprep.pyz/")
