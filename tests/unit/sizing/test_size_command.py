"""`hostprep size` as people and programs see it."""

from __future__ import annotations

import io
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from hostprep.api.pool_resource import load_pools
from hostprep.api.pool_spec import RegionLayout
from hostprep.api.slot_layout import round_up
from hostprep.backing import GIB
from hostprep.cli.main import main
from hostprep.cli.size_model import model_name
from hostprep.layout import Layout
from hostprep.sizing.examples import EXAMPLES
from hostprep.sizing.families import KINDS
from hostprep.slots import Directory
from hostprep.units import format_bytes, parse_quantity
from tests.unit.sizing.models import MODELS

pytestmark = pytest.mark.unit

LLAMA = str(MODELS / "llama-3.1-8b.json")
GEMMA = str(MODELS / "gemma-3-27b.json")
FLASH = str(MODELS / "deepseek-v4-flash.json")
MAMBA = str(MODELS / "mamba2-2.7b.json")
BLOCKS = ["--tokens-per-block", "32"]
SERVED = ["--max-batch-size", "64", "--max-seq-len", "8192"]


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["size", *arguments]) == 0
    return capsys.readouterr().out


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["size", *arguments]) == 2
    told = capsys.readouterr()
    assert told.err.count("\n") == 1
    assert not told.out
    return told.err


def as_json(capsys: pytest.CaptureFixture[str], *arguments: str) -> Any:
    return json.loads(run(capsys, *arguments, "-o", "json"))["models"]


def test_the_table_tells_groups_slots_and_what_limits(capsys: pytest.CaptureFixture[str]) -> None:
    told = run(capsys, GEMMA, *SERVED, "--gpu-memory", "60Gi", "--host-memory", "300Gi")
    for words in (
        "gemma-3-27b (gemma3_text): 64 requests of up to 8192 tokens",
        "one request of 8192 tokens may never end",
        "64 at once can come to a standstill",
        "window-1024",
        "first to fill: ",
        "SHARE",
        "GPU:",
        "Host:",
    ):
        assert words in told


def test_every_example_has_its_table_in_one_go(capsys: pytest.CaptureFixture[str]) -> None:
    paths = sorted(map(str, MODELS.glob("*.json")))
    told = run(capsys, *paths, *SERVED, "--tokens-per-block", "256")
    for path in paths:
        assert f"{Path(path).stem} (" in told


def test_programs_get_both_tiers_and_the_layout(capsys: pytest.CaptureFixture[str]) -> None:
    (found,) = as_json(capsys, GEMMA, *SERVED, "--gpu-memory", "60Gi", "--host-memory", "300Gi")
    assert found["smallest_bytes"] < found["floor_bytes"] <= 60 << 30
    for tier in ("gpu", "host"):
        sizes = [group["size_bytes"] for group in found[tier]["groups"]]
        assert sum(sizes) <= found[tier]["size_bytes"]
        assert sum(group["share"] for group in found[tier]["groups"]) == pytest.approx(1, abs=1e-5)
        names = {group["name"]: group["requests"] for group in found[tier]["groups"]}
        assert found[tier]["requests"] == min(names.values())
        assert names[found[tier]["limiting_group"]] == min(names.values())
    layout = Layout.parse(found["layout"], found["host"]["size_bytes"])
    assert [group.name for group in layout.groups] == ["full", "window-1024"]


def test_without_memory_the_floor_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    (found,) = as_json(capsys, LLAMA, *SERVED)
    assert found["gpu"] is None
    host = found["host"]
    assert host["size_bytes"] - host["directory_bytes"] == found["floor_bytes"]
    slots = [(group["slots"], group["min_slots"]) for group in found["host"]["groups"]]
    assert slots == [(256, 256)]


def test_the_models_own_length_is_the_longest_request(capsys: pytest.CaptureFixture[str]) -> None:
    (found,) = as_json(capsys, LLAMA, "--max-batch-size", "1")
    assert found["limits"]["max_seq_len"] == 131_072


def test_a_folder_is_a_models_name_where_the_file_is_config_json(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    folder = tmp_path / "Llama-3.1-8B-Instruct"
    folder.mkdir()
    (folder / "config.json").write_bytes(Path(LLAMA).read_bytes())
    told = run(capsys, str(folder / "config.json"), *SERVED, "-o", "yaml")
    assert yaml.safe_load(told)["metadata"]["name"] == "llama-3-1-8b-instruct"


@pytest.mark.parametrize("given", ["config.json", "./config.json", "../my model/config.json"])
def test_a_path_need_not_name_the_folder(
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    given: str,
) -> None:
    (tmp_path / "my model").mkdir()
    (tmp_path / "my model" / "config.json").write_bytes(Path(LLAMA).read_bytes())
    monkeypatch.chdir(tmp_path / "my model")
    assert run(capsys, given, *SERVED).startswith("my model (llama)")
    (pool,) = load_pools(run(capsys, given, *SERVED, "-o", "yaml"), source="told")
    assert pool.name == "my-model"


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("/config.json", "config"),
        ("/a/b/../config.json", "a"),
        ("/a/llama.json", "llama"),
        ("/\udcff\n/config.json", "??"),
        ("/" + "m" * 200 + "/config.json", "m" * 128),
    ],
)
def test_a_models_name_is_a_line_that_a_pool_can_have(path: str, name: str) -> None:
    assert model_name(Path(path)) == name


def test_a_folder_of_no_letters_is_a_pool_too(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    folder = tmp_path / ("模" * 70)
    folder.mkdir()
    (folder / "config.json").write_bytes(Path(LLAMA).read_bytes())
    told = run(capsys, str(folder / "config.json"), *SERVED, "-o", "yaml")
    assert load_pools(told, source="told")[0].name == "kv"


def test_links_of_a_cache_of_models_are_not_followed(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "blobs").mkdir()
    (tmp_path / "snapshot").mkdir()
    (tmp_path / "blobs" / "0f3a").write_bytes(Path(LLAMA).read_bytes())
    link = tmp_path / "snapshot" / "config.json"
    link.symlink_to("../blobs/0f3a")
    assert run(capsys, str(link), *SERVED).startswith("snapshot (llama)")


def test_of_several_models_those_that_can_be_are_sized(capsys: pytest.CaptureFixture[str]) -> None:
    paths = sorted(map(str, MODELS.glob("*.json")))
    assert main(["size", *paths, "--max-batch-size", "64", *BLOCKS]) == 2
    told = capsys.readouterr()
    refused_lines = told.err.splitlines()
    assert len(refused_lines) == 3
    for name in ("deepseek-v4-flash", "deepseek-v4-pro", "mamba2-2.7b"):
        path = str(MODELS / f"{name}.json")
        paths.remove(path)
        assert f"{name} (" not in told.out
        assert sum(line.startswith(f"hostprep: {path}: ") for line in refused_lines) == 1
    for path in paths:
        assert f"{Path(path).stem} (" in told.out


def test_programs_are_told_which_models_were_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["size", LLAMA, "/nowhere.json", FLASH, *SERVED, *BLOCKS, "-o", "json"]) == 2
    told = capsys.readouterr()
    found = json.loads(told.out)
    assert [model["model"] for model in found["models"]] == ["llama-3.1-8b"]
    messages = [one["error"] for one in found["refused"]]
    assert messages[0] == "cannot read /nowhere.json: No such file or directory"
    assert messages[1].startswith(f"{FLASH}: --tokens-per-block: is 32")
    assert told.err.count("\n") == 2


def test_blocks_are_as_large_as_compressed_caches_need(capsys: pytest.CaptureFixture[str]) -> None:
    (found,) = as_json(capsys, FLASH, *SERVED)
    assert found["limits"]["tokens_per_block"] == found["layout"]["tokens_per_block"] == 128
    assert any("a block has 128 tokens and not 32" in note for note in found["notes"])
    (found,) = as_json(capsys, FLASH, *SERVED, "--tokens-per-block", "256")
    assert found["limits"]["tokens_per_block"] == 256
    assert not any("a block has" in note for note in found["notes"])
    (found,) = as_json(capsys, LLAMA, *SERVED)
    assert (found["limits"]["tokens_per_block"], found["notes"]) == (32, [])


def test_ratios_that_no_block_can_have_are_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    fields = json.loads(Path(FLASH).read_text(encoding="utf-8"))
    ratios = fields["compress_ratios"]
    fields["compress_ratios"] = [65_536 - index for index in range(len(ratios))]
    (tmp_path / "odd.json").write_text(json.dumps(fields))
    told = refused(capsys, str(tmp_path / "odd.json"), *SERVED)
    assert "--tokens-per-block: is 32, no multiple of the 65536 tokens" in told


@pytest.mark.parametrize(
    ("batch", "words"),
    [
        ("1", "Below 1 GiB one request of 8192 tokens may never end\n"),
        ("64", "never end; from there on 64 at once come to no standstill, though"),
        ("300", "never end; below 1.2 GiB 300 at once can come to a standstill\n"),
        ("257", "Below 1024 MiB one request of 8192 tokens may never end; below 1028 MiB 257 at"),
    ],
)
def test_what_happens_with_less_is_told(
    capsys: pytest.CaptureFixture[str], batch: str, words: str
) -> None:
    assert words in run(capsys, LLAMA, "--max-batch-size", batch, "--max-seq-len", "8192")


def test_the_pool_is_one_that_prepare_takes(capsys: pytest.CaptureFixture[str]) -> None:
    told = run(capsys, GEMMA, *SERVED, "--tp", "4", "--host-memory", "80Gi", "-o", "yaml")
    (spec,) = load_pools(told, source="pool.yaml")
    (found,) = as_json(capsys, GEMMA, *SERVED, "--tp", "4", "--host-memory", "80Gi")
    assert spec.sizing is not None
    assert spec.sizing.to_json() == found["layout"] | {"regions_per_engine": 4}
    assert (spec.name, spec.region_count) == ("gemma-3-27b", 4)


def test_with_an_engine_the_pool_is_one_region_for_all_ranks_and_says_its_blocks(
    capsys: pytest.CaptureFixture[str],
) -> None:
    length = ("--max-seq-len", "8192", "--tp", "8")
    asked = (LLAMA, "--engine", "vllm", *length, "--host-memory", "20Gi")
    told = run(capsys, *asked, "--name", "kv", "-o", "yaml")
    (spec,) = load_pools(told, source="pool.yaml")
    assert spec.layout is RegionLayout.SINGLE
    assert spec.sizing is not None
    assert (spec.sizing.integration, spec.sizing.regions_per_engine) == ("vllm-offloading", 1)
    assert 8 * 20 * 0.99 <= (spec.region_bytes or 0) / GIB <= 8 * 20
    assert "hostprep exec kv --engine vllm-offloading -- vllm serve" in told
    (table,) = re.findall(r"^vllm-offloading .*$", run(capsys, *asked), flags=re.MULTILINE)
    (blocks,) = re.findall(r"has (\d+) host blocks in it", told)
    assert blocks in table.split()


@pytest.mark.parametrize(
    ("engine", "integration"),
    [("vllm", "vllm-offloading"), ("sglang", "sglang"), ("trtllm", "lmcache")],
)
def test_every_engine_has_a_pool_of_its_usual_integration(
    capsys: pytest.CaptureFixture[str], engine: str, integration: str
) -> None:
    asked = (LLAMA, "--max-seq-len", "8192", "--tp", "4", "--gpu-memory", "40Gi", "-o", "yaml")
    for memory in (("--host-memory", "20Gi"), ("--host-tokens", "500000"), ()):
        told = run(capsys, *asked, *memory, "--engine", engine)
        (spec,) = load_pools(told, source="pool.yaml")
        assert spec.sizing is not None
        assert spec.sizing.integration == integration
        assert spec.region_bytes == spec.sizing.least_bytes
        if memory[:1] == ("--host-memory",):
            assert 79 * GIB <= spec.region_bytes <= 80 * GIB


def test_a_way_of_attaching_names_its_engine(capsys: pytest.CaptureFixture[str]) -> None:
    asked = (LLAMA, "--max-seq-len", "8192", "--host-memory", "20Gi", "-o", "yaml")
    told = run(capsys, *asked, "--integration", "vllm-simple")
    assert told == run(capsys, *asked, "--integration", "vllm-simple", "--engine", "vllm")
    (spec,) = load_pools(told, source="pool.yaml")
    assert spec.sizing is not None
    assert spec.sizing.integration == "vllm-simple"


def test_the_directory_is_a_row_of_the_host_alone(capsys: pytest.CaptureFixture[str]) -> None:
    memory = ("--gpu-memory", "9Gi", "--host-memory", "9Gi")
    gpu, host = run(capsys, LLAMA, *SERVED, *memory).split("Host:\n")
    assert "directory" not in gpu
    (row,) = [line.split() for line in host.splitlines() if line.startswith("directory")]
    (found,) = as_json(capsys, LLAMA, *SERVED, *memory)
    assert found["gpu"]["directory_bytes"] == 0
    slots = found["host"]["groups"][0]["slots"]
    assert row[5:7] == [str(slots), f"{found['host']['directory_bytes'] / 1024:.0f}"]
    assert found["host"]["directory_bytes"] == Directory.size_bytes_for(slots)


def test_a_region_of_the_pool_has_room_for_its_directory(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for memory in ("16Gi", "32770Mi"):  # the first is 4,096 whole slots: one less fits now
        asked = (*SERVED, "--host-memory", memory)
        (spec,) = load_pools(run(capsys, LLAMA, *asked, "-o", "yaml"), source="pool.yaml")
        (found,) = as_json(capsys, LLAMA, *asked)
        slots = sum(group["slots"] for group in found["layout"]["groups"])
        room_bytes = (spec.region_bytes or 0) - found["layout"]["size_bytes"]
        assert room_bytes >= Directory.size_bytes_for(slots, 40)
        assert (spec.region_bytes or 0) <= parse_quantity(memory)


def test_regions_of_a_pool_that_was_sized_without_a_directory_stay_as_they_are(
    capsys: pytest.CaptureFixture[str],
) -> None:
    told = run(capsys, LLAMA, *SERVED, "--host-memory", "16Gi", "-o", "yaml")
    (now,) = load_pools(told, source="pool.yaml")
    (before,) = load_pools(told.replace("    directory: true\n", ""), source="pool.yaml")
    assert now.sizing is not None
    assert now.region_bytes == round_up(now.sizing.size_bytes + now.sizing.directory_bytes, 2 << 20)
    assert before.region_bytes == round_up(now.sizing.size_bytes, 2 << 20)


def test_states_reach_the_pool(capsys: pytest.CaptureFixture[str]) -> None:
    told = run(capsys, str(MODELS / "nemotron-h-8b.json"), *SERVED, "--name", "kv", "-o", "yaml")
    kinds = {g["name"]: g.get("kind") for g in yaml.safe_load(told)["spec"]["sizing"]["groups"]}
    assert kinds == {"full": None, "state": "Recurrent"}


def test_several_models_are_several_pools(capsys: pytest.CaptureFixture[str]) -> None:
    told = run(capsys, LLAMA, GEMMA, *SERVED, "-o", "yaml", "--backing", "HugeTLB1Gi")
    specs = load_pools(told, source="pool.yaml")
    assert [spec.name for spec in specs] == ["llama-3-1-8b", "gemma-3-27b"]
    assert all((spec.region_bytes or 1) % (1 << 30) == 0 for spec in specs)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([LLAMA, "--max-batch-size", "0"], "--max-batch-size: is 0"),
        ([LLAMA, *SERVED, "--tp", "3"], "--tp: is 3"),
        ([LLAMA, *SERVED, "--gpu-memory", "lots"], "--gpu-memory: size 'lots'"),
        ([LLAMA, *SERVED, "--host-memory", "-1Gi"], "--host-memory: size '-1Gi'"),
        ([LLAMA, *SERVED, "--host-tokens", "0"], "--host-tokens: is 0"),
        ([LLAMA, *SERVED, "--host-tokens", str(1 << 45)], "group full would have"),
        ([LLAMA, *SERVED, "--gpu-memory", "512Mi"], "give --gpu-memory 1024Mi"),
        ([LLAMA, *SERVED, "--host-memory", "1Mi"], "--host-memory: 1 MiB a rank is less than"),
        ([LLAMA, *SERVED, "--host-memory", "9Gi", "--host-tokens", "9"], "exclude each other"),
        ([LLAMA, *SERVED, "--typical-seq-len", "8193"], "--typical-seq-len: is 8193"),
        ([LLAMA, *SERVED, "--kv-dtype", "int3"], "--kv-dtype: there is no data type"),
        ([LLAMA, *SERVED, "--index-dtype", "int3"], "--index-dtype: there is no data type"),
        ([LLAMA, *SERVED, "--name", "kv"], "--name is for a pool"),
        ([], "no model is named"),
        (["-", "-"], "- is given twice"),
        ([LLAMA, *SERVED, "--gpu", "h2OO"], "--gpu: there is no GPU 'h2OO'"),
        ([LLAMA, *SERVED, "--gpu", "h200x4", "--tp", "8"], "--gpu: 4 GPUs are fewer than the 8"),
        ([LLAMA, *SERVED, "--gpu", "h200", "--weights", "heavy"], "--weights: size 'heavy'"),
        ([LLAMA, *SERVED, "--gpu", "h200", "--weights", "999Gi"], "--gpu: 999 GiB of weights"),
        ([LLAMA, *SERVED, "--gpu", "h200"], "vocab_size is missing; give the model's folder"),
        ([GEMMA, *SERVED, "--gpu", "h200"], "or --weights with their bytes"),
        ([LLAMA, *SERVED, "--weights", "16Gi"], "--weights is for the memory of GPUs"),
        ([LLAMA, *SERVED, "--gpu-reserve", "1Gi"], "--gpu-reserve is for the memory of GPUs"),
        ([LLAMA, *SERVED, "--gpu-memory-utilization", "2"], "--gpu-memory-utilization: is 2"),
        (
            [LLAMA, "--gpu", "24Gi", "--weights", "16Gi", "--gpu-reserve", "1Gi"],
            "requests can wait for ever: 90 % of 24 GiB - 16 GiB weights - 1 GiB reserve = 4.6 GiB",
        ),
        ([LLAMA, GEMMA, *SERVED, "--name", "kv", "-o", "yaml"], "--name is for one model"),
        ([LLAMA, *SERVED, "--regions", "2"], "--regions is for a pool"),
        ([LLAMA, *SERVED, "--integration", "vlm"], "--integration: there is no"),
        ([LLAMA, *SERVED, "--name", "K V", "-o", "yaml"], "hostprep: --name: pool name 'K V'"),
        ([LLAMA, LLAMA, *SERVED, "-o", "yaml"], "two models have one name"),
        ([LLAMA, *SERVED, "--regions", "0", "-o", "yaml"], "hostprep: --regions: '0' is no way"),
        ([LLAMA, *SERVED, "--backing", "Huge", "-o", "yaml"], "hostprep: --backing: there is no"),
        (["/nowhere/config.json", *SERVED], "cannot read /nowhere/config.json"),
        ([str(MODELS), *SERVED], "holds no config.json"),
        ([str(MODELS / "README.md"), *SERVED], "is not JSON"),
        ([MAMBA, "--max-batch-size", "1"], "give --max-seq-len"),
        ([LLAMA, GEMMA, *SERVED, "--tp", "0"], "hostprep: --tp: is 0"),
        ([LLAMA, GEMMA, *SERVED, "--state-dtype", "int3"], "hostprep: --state-dtype: there is no"),
        ([LLAMA, FLASH, *SERVED, *BLOCKS, "-o", "yaml"], f"{FLASH}: --tokens-per-block: is 32"),
    ],
)
def test_bad_input_is_refused_in_one_line(
    capsys: pytest.CaptureFixture[str], arguments: list[str], words: str
) -> None:
    assert words in refused(capsys, *arguments)


def folder_of(tmp_path: Path, **changes: Any) -> str:
    """A folder with the untrimmed fields that tell Llama-3.1-8B's weights."""
    fields = json.loads(Path(LLAMA).read_text(encoding="utf-8"))
    folder = tmp_path / "Llama-3.1-8B"
    folder.mkdir(exist_ok=True)
    fields |= {"intermediate_size": 14336, "vocab_size": 128256, "torch_dtype": "bfloat16"}
    (folder / "config.json").write_text(json.dumps(fields | changes))
    return str(folder)


def test_gpu_memory_for_caches_is_computed_and_every_term_told(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    folder = folder_of(tmp_path)
    asked = ("--gpu", "h200x8", "--tp", "2", "--max-seq-len", "8192")
    (found,) = as_json(capsys, folder, *asked)
    budget = found["gpu_budget"]
    assert budget["weights"]["total_bytes"] == 16_060_522_496
    assert budget["weights"]["least_bytes"] == 8_030_261_248
    assert budget["weights"]["rank_bytes"] < 1.001 * 8_030_261_248
    assert (budget["gpu"], budget["gpus"], budget["utilization"]) == ("NVIDIA H200", 8, 0.9)
    left = budget["memory_bytes"] * 0.9 - budget["weights"]["rank_bytes"] - budget["reserve_bytes"]
    assert budget["caches_bytes"] == pytest.approx(left, abs=1)
    assert 0.99 * budget["caches_bytes"] < found["gpu"]["size_bytes"] <= budget["caches_bytes"]
    told = run(capsys, folder, *asked)
    assert (
        "(8 x NVIDIA H200): 90 % of 139.7 GiB - 7.5 GiB weights - 8 GiB reserve = 110.3 GiB\n"
        in told
    )
    assert "  weights 7.5 GiB of 15.0 GiB (config.json)" in told


def test_a_sum_that_is_merely_divided_is_told_as_such(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_bytes(Path(GEMMA).read_bytes())
    index = {"metadata": {"total_size": 54_864_813_056}, "weight_map": {"a": "a.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    asked = (str(tmp_path), *SERVED, "--gpu", "h200", "--tp", "2")
    assert (
        "  weights 25.5 GiB of 51.1 GiB (model.safetensors.index.json), as if all of it were "
        "divided evenly: some is kept by every rank\n"
    ) in run(capsys, *asked)
    assert "divided evenly" not in run(capsys, *asked[:-2])


def test_an_engines_host_tier_may_be_smaller_than_a_request(
    capsys: pytest.CaptureFixture[str],
) -> None:
    asked = (LLAMA, "--engine", "vllm", "--host-memory", "1Gi")
    (found,) = as_json(capsys, *asked)
    blocks = {host["way"]: host["blocks"] for host in found["engine"]["host"]}
    assert 0 < blocks["vllm-offloading"] * 16 < found["limits"]["max_seq_len"]
    for engine in ("vllm", "sglang", "trtllm"):
        told = run(capsys, LLAMA, "--engine", engine, "--host-memory", "1Gi", "-o", "yaml")
        (spec,) = load_pools(told, source="pool.yaml")
        assert spec.region_bytes == 1 << 30
    assert "--host-memory: 1 KiB" in refused(capsys, *asked[:3], "--host-memory", "1Ki")


def test_options_win_over_what_is_found(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    folder = folder_of(tmp_path)
    given = ("--weights", "20Gi", "--gpu-memory-utilization", "0.5", "--gpu-reserve", "0")
    (found,) = as_json(capsys, folder, *SERVED, "--gpu", "100Gix1", *given)
    assert found["gpu_budget"]["caches_bytes"] == 30 << 30
    (found,) = as_json(capsys, folder, *SERVED, "--gpu", "h200", "--gpu-memory", "9Gi")
    assert found["gpu_budget"] is None
    assert found["gpu"]["size_bytes"] <= 9 << 30


def test_without_a_batch_size_one_is_taken_and_told(capsys: pytest.CaptureFixture[str]) -> None:
    (found,) = as_json(capsys, LLAMA)
    assert found["limits"]["max_batch_size"] == 64
    assert any("64 requests at once are taken" in note for note in found["notes"])
    (found,) = as_json(capsys, LLAMA, *SERVED)
    assert not any("requests at once are taken" in note for note in found["notes"])


def test_all_that_a_node_needs_adds_up(capsys: pytest.CaptureFixture[str]) -> None:
    asked = (LLAMA, GEMMA, *SERVED, "--tp", "4", "--host-memory", "80Gi")
    found = json.loads(run(capsys, *asked, "-o", "json"))
    sizes = [4 * model["host"]["size_bytes"] for model in found["models"]]
    assert found["node"] == {"ranks": 8, "host_bytes": sum(sizes)}
    assert "Host memory of all that is above: 640.0 GiB" in run(capsys, *asked)
    told = run(capsys, *asked, "-o", "yaml")
    specs = load_pools(told, source="pool.yaml")
    assert [spec.priority for spec in specs] == [2, 1]
    sizes = [(spec.region_bytes or 0) * int(spec.region_count or 0) for spec in specs]
    assert told.startswith(f"# Host memory of each node: {format_bytes(sum(sizes))} (llama")


def test_models_that_do_not_fit_at_once_are_told(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    folder = folder_of(tmp_path)
    other = tmp_path / "other.json"
    other.write_bytes((Path(folder) / "config.json").read_bytes())
    told = run(capsys, folder, str(other), *SERVED, "--tp", "4", "--gpu", "h200x4")
    assert "They need 8 GPUs at once, and 4 are given" in told
    told = run(capsys, folder, str(other), *SERVED, "--tp", "4", "--gpu", "h200x8")
    assert "They need" not in told
    asked = ("--tp", "4", "--gpu", "h200x4", "--gpu-memory", "40Gi")
    told = run(capsys, folder, str(other), *SERVED, *asked)
    assert "They need 8 GPUs at once, and 4 are given" in told


def test_caches_have_no_more_than_the_whole_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    asked = (LLAMA, *SERVED, "--gpu", "l4x8", "--gpu-memory")
    assert "500 GiB are more than the 22.0 GiB" in refused(capsys, *asked, "500Gi")
    assert run(capsys, *asked, "20Gi")


def test_host_memory_is_that_of_the_way_of_attaching(capsys: pytest.CaptureFixture[str]) -> None:
    """Latents are once in the default way's region, and once a rank with vllm-simple."""
    model = str(MODELS / "deepseek-v3.json")
    asked = (model, "--engine", "vllm", "--tp", "8", "--gpu-memory", "40Gi")
    document = json.loads(run(capsys, *asked, "-o", "json"))
    tiers = {one["way"]: one["size_bytes"] for one in document["models"][0]["engine"]["host"]}
    assert tiers["vllm-offloading"] < tiers["vllm-simple"]
    assert document["node"]["host_bytes"] == tiers["vllm-offloading"]
    size = format_bytes(tiers["vllm-offloading"])
    assert f"Host memory of all that is above, by vllm-offloading: {size}" in run(capsys, *asked)
    size = format_bytes(tiers["vllm-simple"])
    told = run(capsys, *asked, "--integration", "vllm-simple")
    assert f"Host memory of all that is above, by vllm-simple: {size}" in told


def test_no_pool_is_for_a_model_of_states_alone(capsys: pytest.CaptureFixture[str]) -> None:
    asked = (str(MODELS / "mamba2-2.7b.json"), "--engine", "vllm", "--host-memory", "20Gi")
    told = refused(capsys, *asked, "--max-seq-len", "4096", "-o", "yaml")
    assert "vllm has no host tier for mamba2-2.7b" in told


def test_without_a_host_tier_it_is_told_and_nothing_added_up(
    capsys: pytest.CaptureFixture[str],
) -> None:
    asked = (LLAMA, "--engine", "vllm", "--pp", "3", "--gpu-memory", "40Gi")
    told = " ".join(run(capsys, *asked).split())
    assert "HOST TIER" not in told
    assert "Host memory of all" not in told
    assert "stages of different sizes" in told
    assert json.loads(run(capsys, *asked, "-o", "json"))["node"]["host_bytes"] == 0


def test_all_that_is_known_is_listed(capsys: pytest.CaptureFixture[str]) -> None:
    told = run(capsys, "--list")
    for words in ("meta-llama/Llama-3.1-70B", "gpt_oss", "h200", "139.7 GiB"):
        assert words in told
    assert set(EXAMPLES) <= set(KINDS)
    assert "leave out" in refused(capsys, "--list", LLAMA)


def test_standard_input_is_a_model(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(Path(LLAMA).read_bytes())))
    assert run(capsys, "-", *SERVED).startswith("model (llama): 64 requests")


def test_without_a_gpu_the_node_says_so(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    told = refused(capsys, LLAMA, *SERVED, "--gpu", "node")
    assert "--gpu: this node shows no NVIDIA GPU" in told
    assert "name the GPUs" in told


def test_nvidia_smi_says_what_a_node_has(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text(
        "#!/bin/sh\necho 'NVIDIA H200, 143771, 607'\necho 'NVIDIA H200, 143771, 607'\n"
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    asked = ("--gpu", "node", "--weights", "16Gi", "--max-seq-len", "8192")
    (found,) = as_json(capsys, LLAMA, *asked)
    assert found["gpu_budget"]["gpus"] == 2
    assert found["gpu_budget"]["memory_bytes"] == (143771 - 607) << 20
    assert "2 GPUs are fewer than the 4 of" in refused(capsys, LLAMA, *asked, "--tp", "4")
    program.write_text("#!/bin/sh\necho 'NVIDIA H200, 143771, 607'\necho 'NVIDIA L4, 23034, 500'\n")
    assert "this node's GPUs differ: NVIDIA H200, NVIDIA L4" in refused(capsys, LLAMA, *asked)


def test_programs_are_told_errors_too(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["size", LLAMA, "--max-batch-size", "0", "-o", "json"]) == 2
    assert json.loads(capsys.readouterr().out)["reason"] == "BadInput"


def test_notes_say_what_is_odd(capsys: pytest.CaptureFixture[str]) -> None:
    told = run(capsys, GEMMA, "--max-batch-size", "1", "--max-seq-len", "512")
    assert "the window of 1024 never closes within 512 tokens" in told
    told = run(capsys, GEMMA, "--max-batch-size", "1", "--max-seq-len", "200000")
    assert "the model was made for 131072 tokens" in told


def test_the_example_is_what_its_command_prints(capsys: pytest.CaptureFixture[str]) -> None:
    example = (MODELS.parent / "pool-sized.yaml").read_text(encoding="utf-8")
    command = example.replace("#", "").replace("\\\n", " ").split("hostprep size ")[1]
    arguments = command.split("\n")[0].split()
    assert Path(arguments[0]).name == Path(GEMMA).name
    told = run(capsys, GEMMA, *arguments[1:])
    assert load_pools(told, source="told") == load_pools(example, source="example")


def test_sglangs_share_of_a_gpu_is_by_the_chunk_that_is_given(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Half as much again as a GiB for 1,024 tokens of a chunk, and graphs up to it."""
    model = str(MODELS / "llama-3.1-8b.json")
    gpu = ("--engine", "sglang", "--gpu", "h200", "--weights", "16Gi", "--max-seq-len", "8192")
    total_mib = 139.72 * 1024
    for given, chunk, graphs in (((), 8192, 58), (("--max-num-tokens", "32768"), 32768, 106)):
        budget = as_json(capsys, model, *gpu, *given)[0]["gpu_budget"]
        reserved_mib = 512 + 1.5 * chunk + 128 + 2 * 256 + 8 * graphs
        share = 1 - reserved_mib / total_mib
        assert budget["utilization"] == pytest.approx(share, abs=0.0006)
    # Graphs are for no more requests than are served at once.
    small = ("--engine", "sglang", "--gpu", "l40s", "--weights", "16Gi", "--max-seq-len", "8192")
    shares = [
        as_json(capsys, model, *small, *given)[0]["gpu_budget"]["utilization"]
        for given in ((), ("--max-batch-size", "8"))
    ]
    assert shares[1] - shares[0] == pytest.approx(24 * 2 / (44.39 * 1024), abs=0.001)
    assert shares[1] > shares[0]


def test_readme_s_command_can_be_tried_without_the_model(
    capsys: pytest.CaptureFixture[str],
) -> None:
    root = MODELS.parent.parent
    example = "examples/models/gpt-oss-120b.json --weights 61Gi"
    for page in ("README.md", "docs/commands/size.md"):
        text = (root / page).read_text()
        assert example in text
        command = re.search(
            r"^hostprep size openai/gpt-oss-120b (.*--host-memory .*)$", text, re.MULTILINE
        )
        assert command
        name, *weights = example.split()
        told = run(capsys, str(root / name), *weights, *command[1].split())
        assert "Maximum concurrency for 131,072 tokens per request: 178.26x" in told


def test_sizes_as_they_are_printed_can_be_given(capsys: pytest.CaptureFixture[str]) -> None:
    (one,) = as_json(capsys, GEMMA, "--gpu", "h100", "--weights", "51.1Gi", "--max-seq-len", "4096",
                     "--max-batch-size", "4")  # fmt: skip
    assert one["gpu_budget"]["weights"]["total_bytes"] == -(-511 * GIB // 10)


def test_a_host_tier_for_less_than_a_request_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    limits = (GEMMA, "--engine", "sglang", "--max-seq-len", "8192")
    note = "note: of a request of 8192 tokens sglang keeps a part"
    assert note in run(capsys, *limits, "--host-memory", "3Gi")
    assert note not in run(capsys, *limits, "--host-memory", "30Gi")
