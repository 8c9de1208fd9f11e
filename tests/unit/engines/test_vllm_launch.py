"""What `--engine vllm` and its two plugins ask of a pool, and how they start over their leases."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hostprep.backing import MIB
from hostprep.client.lease import Lease
from hostprep.engines.catalogue import integration_of
from hostprep.engines.launching import EngineStart, Launch, Options, Requirements, reconcile_options
from hostprep.engines.vllm import launch as launcher
from hostprep.engines.vllm.command_parser import CONFIG
from hostprep.engines.vllm.launch import SIMPLE, TIERING, usable_bytes
from hostprep.errors import BadInputError
from tests.unit.engines.leases import leases_of

pytestmark = pytest.mark.unit

SERVE = ("vllm", "serve", "some/model")
NOTHING: dict[str, str] = {"PATH": "/nowhere"}


def _required(*options: str, name: str = "vllm") -> Requirements:
    command = (*SERVE, *options)
    return launcher.requirements(EngineStart(integration_of(name), command, NOTHING))


def _complete(
    command: tuple[str, ...], environ: dict[str, str], leases: list[Lease], name: str = "vllm"
) -> Launch:
    return launcher.complete(EngineStart(integration_of(name), command, environ), leases)


def _completed(
    *options: str, sizes: tuple[int, ...] = (64,), name: str = "vllm", **environ: str
) -> Launch:
    return _complete(
        (*SERVE, *options), NOTHING | environ, leases_of(*(size * MIB for size in sizes)), name
    )


def _config(launch: Launch) -> dict[str, Any]:
    config: dict[str, Any] = json.loads(launch.command[launch.command.index(CONFIG) + 1])
    return config


def test_one_engine_gets_one_link_under_the_leases_name() -> None:
    assert _required() == Requirements()
    launch = _completed()
    assert launch.links == (("/dev/shm/vllm_offload_1ea5e.mmap", 0),)
    assert _config(launch)["engine_id"] == "1ea5e"
    assert _config(launch)["kv_connector_extra_config"]["cpu_bytes_to_use"] == 64 * MIB
    assert launch.variables == {}
    assert launch.notes == ()


@pytest.mark.parametrize(
    ("options", "numbers"),
    [
        (["--data-parallel-size", "2"], [0, 1]),
        (["-dp", "2"], [0, 1]),
        (["--data_parallel_size=3"], [0, 1, 2]),
        (["-dp=4", "-dpl", "2", "-dpr", "2"], [2, 3]),
        (["-dp", "4", "-dpl=2"], [0, 1]),
        (["-dp", "4", "-dpn", "3"], [3]),
        (["-dpn", "3"], [3]),
        (["-dpl", "1", "-dpr", "2"], [2]),
        (["-dp", "3", "-dp", "2"], [0, 1]),
        (["-dp", "4", "-dpl", "2", "-dpr", "2", "-dpm"], [2, 3]),
        (["-dp", "4", "-n", "2", "-r", "1", "-dpl", "2", "-dpr", "2"], [2, 3]),
    ],
)
def test_each_data_parallel_rank_has_a_region_of_its_own(
    options: list[str], numbers: list[int]
) -> None:
    assert _required(*options).count == len(numbers)
    launch = _completed(*options, sizes=(64, 32, 48)[: len(numbers)])
    assert launch.links == tuple(
        (f"/dev/shm/vllm_offload_1ea5e_dp{number}.mmap", index)
        for index, number in enumerate(numbers)
    )
    smallest = min((64, 32, 48)[: len(numbers)])
    assert _config(launch)["kv_connector_extra_config"]["cpu_bytes_to_use"] == smallest * MIB


@pytest.mark.parametrize(
    "options", [["-dp", "1"], ["-tp", "8"], ["-n", "2"], ["-dpn", "0"], ["-dpr", "2"]]
)
def test_a_rank_alone_has_no_suffix(options: list[str]) -> None:
    assert _completed(*options).links == (("/dev/shm/vllm_offload_1ea5e.mmap", 0),)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["-dp", "two"], "no whole number"),
        (["-dp", "0"], "not from 1"),
        (["-dp", "5000"], "not from 1"),
        (["-dp", "4", "-dpl", "0"], "nothing to claim for"),
        (["-dp", "4", "-n", "2"], "for vLLM to find out"),
        (["-dp", "4", "-dpe"], "for vLLM to find out"),
        (["-dp", "4", "-dpr", "2"], "for vLLM to find out"),
        (["-dp", "4", "-dpl", "2", "-r", "1", "-dpm"], "for vLLM to find out"),
        (["-dp", "4", "-dpb", "ray"], "Ray"),
        (["-dp", "4", "-dpn", "-1"], "negative"),
        (["--kv-offloading-size", "8"], "another connector and size"),
        (["--kv_offloading_backend=native"], "another connector and size"),
        ([f"{CONFIG}.kv_connector", "NixlConnector"], "needs OffloadingConnector"),
        ([f"{CONFIG}.kv_connector", "MultiConnector"], "needs OffloadingConnector"),
        ([f"{CONFIG}.kv_connector_module_path", "x.y"], "loads no module"),
        ([f"{CONFIG}.engine_id", "../x"], "file's name"),
        ([f"{CONFIG}.engine_id", '"a/b"'], "file's name"),
        ([f"{CONFIG}.kv_connector_extra_config", "7"], "no JSON object"),
        ([f"{CONFIG}.kv_connector_extra_config.spec_name", "Mine"], "TieringOffloadingSpec"),
        ([f"{CONFIG}.kv_connector_extra_config.secondary_tiers", "7"], "no list"),
        ([f"{CONFIG}.kv_connector_extra_config.cpu_bytes_to_use", "0"], "no number of bytes"),
        ([f"{CONFIG}.kv_connector_extra_config.cpu_bytes_to_use", "true"], "no number of bytes"),
        ([f"{CONFIG}.kv_connector_extra_config.cpu_bytes_to_use", "lots"], "no number of bytes"),
    ],
)
def test_contradictions_are_refused_before_the_claim(options: list[str], words: str) -> None:
    with pytest.raises(BadInputError, match=words) as caught:
        _required(*options)
    assert caught.value.exit_code == 2
    assert caught.value.reason == "BadCommand"


def test_the_spec_of_32_files_is_refused_with_what_to_use_instead() -> None:
    options = [f"{CONFIG}.kv_connector_extra_config.spec_name", "CPUOffloadingSpec"]
    with pytest.raises(BadInputError, match="32 files.*huge pages cannot.*--engine vllm-off"):
        _required(*options)
    assert _required(*options, name="vllm-offloading") == Requirements()
    spec = _config(_completed(*options, name="vllm-offloading"))["kv_connector_extra_config"]
    assert spec["spec_name"] == "HostprepOffloadingSpec"
    assert spec["spec_module_path"] == "hostprep.engines.vllm"


def test_the_connector_of_per_tensor_memory_is_replaced_by_ours() -> None:
    options = [f"{CONFIG}.kv_connector", "SimpleCPUOffloadConnector"]
    config = _config(_completed(*options, name="vllm-simple"))
    assert config["kv_connector"] == "HostprepSimpleConnector"
    assert config["kv_connector_module_path"] == "hostprep.engines.vllm"
    with pytest.raises(BadInputError, match="on disk"):
        _required(f"{CONFIG}.kv_connector_extra_config.kv_offload_backend=disk", name="vllm-simple")


def test_the_users_own_number_must_fit_and_stays() -> None:
    key = f"{CONFIG}.kv_connector_extra_config.cpu_bytes_to_use"
    assert _required(key, "32M") == Requirements(size_bytes=32 * MIB, because="cpu_bytes_to_use")
    launch = _completed(key, "32M")
    assert _config(launch)["kv_connector_extra_config"]["cpu_bytes_to_use"] == 32 * MIB
    assert _completed(key, "64M").links
    with pytest.raises(BadInputError, match=r"128 MiB: the region has 64 MiB"):
        _completed(key, "128M")


def test_bytes_for_each_rank_are_added_up() -> None:
    key = f"{CONFIG}.kv_connector_extra_config.cpu_bytes_to_use_per_rank"
    required = _required(key, "8M", "-tp", "4", "-pp=2", name="vllm-simple")
    assert required == Requirements(size_bytes=64 * MIB, because="cpu_bytes_to_use_per_rank")


@given(
    size_mib=st.integers(2, 1 << 20),
    workers=st.integers(1, 64),
    page_bytes=st.sampled_from([4096, 2 * MIB, 1024 * MIB]),
    runs=st.integers(1, 4),
)
def test_tensors_of_a_few_sizes_fit_in_what_they_are_left(
    size_mib: int, workers: int, page_bytes: int, runs: int
) -> None:
    size_bytes = size_mib * MIB
    usable = usable_bytes(SIMPLE, size_bytes, page_bytes=page_bytes, workers=workers)
    assert 0 < usable <= size_bytes
    assert usable >= size_bytes * 15 // 16 - workers * page_bytes
    part = size_bytes // workers // page_bytes * page_bytes
    if part >= 64 * page_bytes:
        # Each run but the last may leave most of a page unused.
        assert usable // workers + runs * page_bytes <= part
    assert usable_bytes(TIERING, size_bytes, page_bytes=page_bytes, workers=workers) == size_bytes


def test_an_engine_id_of_the_users_own_is_kept_and_its_place_looked_at_first() -> None:
    options = (f"{CONFIG}.engine_id", "mine", "-dp", "2")
    places = ("/dev/shm/vllm_offload_mine_dp0.mmap", "/dev/shm/vllm_offload_mine_dp1.mmap")
    assert _required(*options).link_paths == places
    assert tuple(path for path, _ in _completed(*options, sizes=(8, 8)).links) == places


@pytest.mark.parametrize("key", ["kv-transfer-config", "kv_offloading_size", "data-parallel-size"])
def test_vllms_own_file_may_not_say_what_we_have_to_see(tmp_path: Path, key: str) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text(f"port: 8000\n{key}: 2\n")
    with pytest.raises(BadInputError, match=f"sets {key}"):
        _required("--config", str(file))
    file.write_text(f"port: 8000\n# {key}: 2\n")
    assert _required("--config", str(file)) == Requirements()


@pytest.mark.parametrize(
    ("options", "required", "words"),
    [
        (Options(count=3), Requirements(count=2), "needs 2 region.*--count gives it 3"),
        (Options(regions=("a",)), Requirements(count=2), "needs 2 region.*--region gives it 1"),
    ],
)
def test_counts_must_agree(options: Options, required: Requirements, words: str) -> None:
    with pytest.raises(BadInputError, match=words):
        reconcile_options(options, required)


def test_the_larger_size_counts() -> None:
    required = Requirements(size_bytes=8, because="cpu_bytes_to_use")
    assert reconcile_options(Options(size_bytes=9), required) == Requirements(size_bytes=9)
    assert reconcile_options(Options(size_bytes=7), required) == required


def test_plugins_are_imported_from_this_very_hostprep(tmp_path: Path) -> None:
    (tmp_path / "hostprep.pyz").touch()
    leases = leases_of(64 * MIB, root=str(tmp_path))
    for name in ("vllm-offloading", "vllm-simple"):
        launch = _complete(SERVE, NOTHING, leases, name)
        assert launch.variables == {"PYTHONPATH": f"{tmp_path}/hostprep.pyz"}
        assert launch.links == ()
        after = _complete(SERVE, {**NOTHING, "PYTHONPATH": "/a:/b"}, leases, name)
        assert after.variables == {"PYTHONPATH": f"{tmp_path}/hostprep.pyz:/a:/b"}
        again = _complete(SERVE, {**NOTHING, **after.variables}, leases, name)
        assert again.variables == {}


def _venv(folder: Path, version: str) -> str:
    """A Python environment as far as one looks at it: vllm's script, and what is installed."""
    (folder / "bin").mkdir(parents=True)
    (folder / f"lib/python3.12/site-packages/vllm-{version}.dist-info").mkdir(parents=True)
    script = folder / "bin/vllm"
    script.write_text(f"#!{folder}/bin/python3\n")
    script.chmod(0o755)
    return str(script)


def test_a_release_never_tried_is_a_note(tmp_path: Path) -> None:
    leases = leases_of(64 * MIB)
    for version, noted in (("0.99.0", True), ("0.33.0", False), ("0.33.0+cpu", False)):
        script = _venv(tmp_path / version, version)
        launch = _complete((script, "serve", "m"), NOTHING, leases)
        assert bool(launch.notes) == noted
        if noted:
            assert "vLLM 0.99.0 has never been tried" in launch.notes[0]
            named = {**NOTHING, "PATH": os.path.dirname(script)}
            assert _complete(SERVE, named, leases).notes == launch.notes


@pytest.mark.parametrize(
    ("protected", "mode", "is_maker_owner", "is_told"),
    [
        ("1", 0o1777, False, True),
        ("1", 0o1777, True, False),
        ("1", 0o0777, False, False),
        ("0", 0o1777, False, False),
    ],
)
def test_a_command_that_changes_the_user_is_told_of_protected_links(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    *,
    protected: str,
    mode: int,
    is_maker_owner: bool,
    is_told: bool,
) -> None:
    sysctl, folder = tmp_path / "protected_symlinks", tmp_path / "shm"
    sysctl.write_text(f"{protected}\n")
    folder.mkdir()
    folder.chmod(mode)
    owner = folder.stat().st_uid
    monkeypatch.setattr(os, "geteuid", lambda: owner if is_maker_owner else owner + 1)
    monkeypatch.setattr(launcher, "_PROTECTED", str(sysctl))
    monkeypatch.setattr(launcher, "_FILE", f"{folder}/vllm_offload_{{}}.mmap")
    command = ("setpriv", "--reuid=1000", *SERVE)
    notes = _complete(command, NOTHING, leases_of(64 * MIB)).notes
    assert ["fs.protected_symlinks" in note for note in notes] == [True] * is_told
