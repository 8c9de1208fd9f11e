"""MODEL of `hostprep size`: folders, hub caches, names in them, standard input; hostile files."""

from __future__ import annotations

import io
import json
import os
import struct
import sys
from pathlib import Path

import pytest

from hostprep.cli.size_model import find_model, find_tensors
from hostprep.errors import BadInputError
from tests.unit.sizing.models import MODELS

pytestmark = pytest.mark.unit

CONFIG = (MODELS / "llama-3.1-8b.json").read_bytes()
NAME = "meta-llama/Llama-3.1-8B"
REVISION = "0e9e39f249a16976918f6564b8830bc894c89659"


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A hub cache with one model, as huggingface_hub lays it out."""
    cache = tmp_path / "hub"
    model = cache / "models--meta-llama--Llama-3.1-8B"
    for folder in ("blobs", "refs", f"snapshots/{REVISION}"):
        (model / folder).mkdir(parents=True)
    (model / "blobs" / "0bb6fd75b3ad2fe988565929f329945262c2814e").write_bytes(CONFIG)
    (model / "snapshots" / REVISION / "config.json").symlink_to(
        "../../blobs/0bb6fd75b3ad2fe988565929f329945262c2814e"
    )
    (model / "refs" / "main").write_text(REVISION)
    for key in ("HF_HOME", "HUGGINGFACE_HUB_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(key, raising=False)
    monkeypatch.setenv("HF_HUB_CACHE", str(cache))
    return cache


def refused(text: str | Path) -> BadInputError:
    with pytest.raises(BadInputError) as caught:
        find_model(str(text))
    assert caught.value.remedy
    return caught.value


def test_a_folder_is_its_config_and_what_is_beside_it(tmp_path: Path) -> None:
    folder = tmp_path / "Llama-FP8"
    folder.mkdir()
    (folder / "config.json").write_bytes(CONFIG)
    (folder / "hf_quant_config.json").write_text("{}")
    for text in (folder, folder / "config.json", f"{folder}/"):
        found = find_model(str(text))
        assert (found.name, found.config, found.quantization) == ("Llama-FP8", CONFIG, b"{}")
        assert found.folder == folder


def test_a_file_of_another_name_has_nothing_beside_it(tmp_path: Path) -> None:
    (tmp_path / "mine.json").write_bytes(CONFIG)
    (tmp_path / "hf_quant_config.json").write_text("{}")
    found = find_model(str(tmp_path / "mine.json"))
    assert (found.name, found.quantization, found.folder) == ("mine", None, None)


def test_a_model_is_found_in_the_hub_cache_by_name_by_folder_and_by_snapshot(hub: Path) -> None:
    model = hub / "models--meta-llama--Llama-3.1-8B"
    for text in (NAME, model, model / "snapshots" / REVISION):
        found = find_model(str(text))
        assert (found.name, found.config) == (NAME, CONFIG)


@pytest.mark.parametrize(
    ("variable", "below"),
    [
        ("HF_HUB_CACHE", ""),
        ("HUGGINGFACE_HUB_CACHE", ""),
        ("HF_HOME", "hub"),
        ("XDG_CACHE_HOME", "huggingface/hub"),
        ("HOME", ".cache/huggingface/hub"),
    ],
)
def test_the_cache_is_where_the_hubs_own_library_looks(
    hub: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str, below: str
) -> None:
    base = tmp_path / "elsewhere"
    (base / below).parent.mkdir(parents=True, exist_ok=True)
    hub.rename(base / below)
    monkeypatch.delenv("HF_HUB_CACHE")
    monkeypatch.setenv(variable, str(base))
    assert find_model(NAME).name == NAME


def test_the_only_snapshot_does_where_main_names_none(hub: Path) -> None:
    model = hub / "models--meta-llama--Llama-3.1-8B"
    (model / "refs" / "main").write_text("f" * 40)
    assert find_model(NAME).config == CONFIG
    (model / "snapshots" / ("a" * 40)).mkdir()
    assert "has 2 snapshots, and refs/main names none of them" in refused(NAME).message


@pytest.mark.parametrize("ref", ["../../../../etc", "", "a/b", "\0", "x" * 300])
def test_a_reference_names_a_snapshot_and_no_path(hub: Path, ref: str) -> None:
    (hub / "models--meta-llama--Llama-3.1-8B" / "refs" / "main").write_text(ref)
    told = refused(NAME).message
    assert "names no revision" in told or "is larger than" in told


def test_a_model_that_is_not_there_says_how_to_get_it(hub: Path) -> None:
    error = refused("Qwen/Qwen3-8B")
    assert f"not in the hub cache {hub}" in error.message
    assert "hf download Qwen/Qwen3-8B --include '*.json'" in str(error.remedy)
    assert "hf download ORG/Qwen3-8B --include" in str(refused("Qwen3-8B").remedy)
    assert "is a hub cache with 1 models" in refused(hub).message
    assert NAME in str(refused(hub).remedy)


@pytest.mark.parametrize("text", ["/nowhere/config.json", "./nowhere", "a/b/c", "nowhere.json", ""])
def test_what_looks_like_a_path_is_one(hub: Path, text: str) -> None:
    assert refused(text).message.startswith(f"cannot read {text}: ")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("params.json", "Mistral's own format"),
        ("model_index.json", "a diffusion pipeline"),
        ("model-Q4_K_M.gguf", "a GGUF file"),
        ("notes.txt", "holds no config.json"),
    ],
)
def test_a_folder_of_another_format_is_told_as_such(tmp_path: Path, name: str, words: str) -> None:
    (tmp_path / name).write_text("{}")
    assert words in refused(tmp_path).message


def test_standard_input_is_a_config(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(CONFIG)))
    found = find_model("-")
    assert (found.config, found.folder) == (CONFIG, None)
    assert "standard input is empty" in refused("-").message


def test_no_pipe_device_or_loop_is_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "config.json")
    assert "no regular file" in refused(tmp_path).message
    assert "no regular file" in refused("/dev/zero").message
    (tmp_path / "loop").symlink_to("loop")
    assert "symbolic links" in refused(tmp_path / "loop").message
    (tmp_path / "gone").symlink_to("nowhere")
    assert "No such file" in refused(tmp_path / "gone").message


def test_what_cannot_be_read_to_its_end_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first page of a process's memory is mapped nowhere: reading it is an I/O error."""
    told = refused("/proc/self/mem").message
    assert told == "cannot read /proc/self/mem: Input/output error"
    monkeypatch.setattr(sys, "stdin", None)
    assert refused("-").message == "cannot read standard input: it is closed"
    with open("/proc/self/mem", encoding="latin-1") as memory:
        monkeypatch.setattr(sys, "stdin", memory)
        assert refused("-").message == "cannot read standard input: Input/output error"


def test_a_huge_file_is_not_read(tmp_path: Path) -> None:
    with (tmp_path / "config.json").open("wb") as file:
        file.truncate(1 << 40)
    assert "is larger than 4 MiB" in refused(tmp_path).message


def safetensors(path: Path, tensors: dict[str, tuple[str, list[int], int]]) -> None:
    """Write a file of that format: names to data type, shape and bytes."""
    header, end = {}, 0
    for name, (dtype, shape, size_bytes) in tensors.items():
        offsets = [end, end + size_bytes]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": offsets}
        end += size_bytes
    text = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + end)


def index(folder: Path, total: object, *files: str) -> None:
    content = {
        "metadata": {"total_size": total},
        "weight_map": {f"model.layers.{number}.w": file for number, file in enumerate(files)},
    }
    (folder / "model.safetensors.index.json").write_text(json.dumps(content))


def test_weights_are_the_files_tensors_before_the_indexs_sum(tmp_path: Path) -> None:
    assert find_tensors(tmp_path) == (None, None, "model.safetensors.index.json")
    safetensors(tmp_path / "a.safetensors", {"x.weight": ("BF16", [4, 8], 64)})
    index(tmp_path, 1000, "a.safetensors", "b.safetensors")
    assert find_tensors(tmp_path)[1] == 1000
    safetensors(tmp_path / "b.safetensors", {"norm.weight": ("F32", [8], 32)})
    tensors, total, source = find_tensors(tmp_path)
    assert [(one.name, one.size_bytes, one.dims) for one in tensors or ()] == [
        ("x.weight", 64, 2),
        ("norm.weight", 32, 1),
    ]
    assert (total, source) == (None, "2 safetensors files")


def test_weights_that_are_there_twice_count_once(tmp_path: Path) -> None:
    for name in ("model-00001-of-00001", "consolidated"):
        safetensors(tmp_path / f"{name}.safetensors", {"x.weight": ("BF16", [4, 8], 64)})
    assert len(find_tensors(tmp_path)[0] or ()) == 1


def test_a_part_of_the_weights_is_not_taken_for_all(tmp_path: Path) -> None:
    for number in (1, 3):
        path = tmp_path / f"model-0000{number}-of-00003.safetensors"
        safetensors(path, {f"x.{number}.weight": ("BF16", [4, 8], 64)})
    with pytest.raises(BadInputError, match="of the 3 parts of model it holds 2"):
        find_tensors(tmp_path)
    path = tmp_path / "model-00002-of-00003.safetensors"
    safetensors(path, {"x.2.weight": ("BF16", [4, 8], 64)})
    assert len(find_tensors(tmp_path)[0] or ()) == 3
    safetensors(tmp_path / "other.safetensors", {"x.weight": ("BF16", [4, 8], 64)})
    with pytest.raises(BadInputError, match="more than one kind: model-00001-of-00003"):
        find_tensors(tmp_path)


@pytest.mark.parametrize(
    "data", [b"", b"12345678", struct.pack("<Q", 1 << 60) + b"{}", struct.pack("<Q", 2) + b"[]"]
)
def test_a_damaged_file_of_weights_is_refused(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "model.safetensors").write_bytes(data)
    with pytest.raises(BadInputError, match=r"model\.safetensors"):
        find_tensors(tmp_path)


@pytest.mark.parametrize("file", ["../../etc/passwd", "/etc/passwd", "..", ""])
def test_an_index_names_files_beside_it_only(tmp_path: Path, file: str) -> None:
    index(tmp_path, 1000, file)
    with pytest.raises(BadInputError, match="that is not beside it"):
        find_tensors(tmp_path)
