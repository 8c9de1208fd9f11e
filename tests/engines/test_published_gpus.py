"""`hostprep size FOLDER --engine ... --tp 8 --gpu h200x8`, for every published configuration."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hostprep.cli.main import main
from tests.engines.published import published_or_skip

pytestmark = pytest.mark.engines

_LEAST = {"vllm": 40, "sglang": 35, "trtllm": 30}
"""Models that each engine's rules and the weights that are known answer for."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """A folder for each model, with its files under the names that they have on the hub."""
    published = published_or_skip()
    base = tmp_path_factory.mktemp("models")
    found = []
    for name, model in published.items():
        folder = base / name.replace("/", "--")
        folder.mkdir()
        (folder / "config.json").write_bytes(model.config.read_bytes())
        if model.quantization is not None:
            (folder / "hf_quant_config.json").write_bytes(model.quantization.read_bytes())
        found.append(folder)
    return found


def _answer(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, Any]:
    code = main(["size", *arguments, "-o", "json"])
    return code, json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("engine", _LEAST)
def test_each_folder_is_answered_or_refused_with_a_next_step(
    engine: str, folders: list[Path], capsys: pytest.CaptureFixture[str]
) -> None:
    answered = []
    for folder in folders:
        asked = (str(folder), "--engine", engine, "--tp", "8", "--gpu", "h200x8")
        code, found = _answer(capsys, *asked)
        if code:
            assert code == 2, found
            assert found["error"], folder
            assert found["remedy"], folder
            continue
        (model,) = found["models"]
        budget, gpu = model["gpu_budget"], model["engine"]["gpu"]
        weights = budget["weights"]
        even = -(-weights["total_bytes"] // 8)
        assert even == weights["least_bytes"] <= weights["rank_bytes"] <= weights["most_bytes"]
        assert weights["most_bytes"] <= weights["total_bytes"]
        assert 0 < budget["caches_bytes"] < budget["memory_bytes"] - weights["rank_bytes"]
        assert gpu["blocks"] * gpu["block_bytes"] <= budget["caches_bytes"] or engine != "vllm"
        assert gpu["log_lines"]
        answered.append(folder.name)
    assert len(answered) >= _LEAST[engine], answered


def test_given_weights_every_known_model_has_an_answer_on_large_gpus(
    folders: list[Path], capsys: pytest.CaptureFixture[str]
) -> None:
    refused = []
    for folder in folders:
        asked = (str(folder), "--gpu", "10Tix8", "--tp", "8", "--weights", "1Ti")
        code, found = _answer(capsys, *asked, "--max-batch-size", "1", "--kv-dtype", "auto")
        if code:
            assert found["error"].startswith(str(folder / "config.json")), found
            refused.append(folder.name)
    assert len(refused) < len(folders) // 10, refused
