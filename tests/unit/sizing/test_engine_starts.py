"""What engines refuse at their start, or serve otherwise than they are asked, is refused here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hostprep.cli.main import main
from hostprep.sizing.config import load_config
from hostprep.sizing.engines.starting import ALLOW_LONGER, longest_served
from tests.unit.sizing.models import MODELS

pytestmark = pytest.mark.unit

ENGINES = tuple(ALLOW_LONGER)


def _size(model: str | Path, *options: str) -> int:
    path = str(MODELS / f"{model}.json" if isinstance(model, str) else model)
    return main(["size", path, "--gpu-memory", "100Gi", *options])


def _refused(capsys: pytest.CaptureFixture[str], model: str | Path, *options: str) -> str:
    assert _size(model, *options) == 2
    told = capsys.readouterr()
    assert not told.out
    return " ".join(told.err.split())


def _changed(tmp_path: Path, name: str, **fields: Any) -> Path:
    path = tmp_path / "config.json"
    known = json.loads((MODELS / f"{name}.json").read_text())
    kept = {key: value for key, value in (known | fields).items() if value is not None}
    path.write_text(json.dumps(kept))
    return path


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(("name", "ranks"), [("gemma-3-270m", "8"), ("deepseek-v3", "3")])
def test_ranks_divide_the_attention_heads(
    capsys: pytest.CaptureFixture[str], engine: str, name: str, ranks: str
) -> None:
    """Those of latents too, of which every rank keeps all."""
    said = _refused(capsys, name, "--engine", engine, "--tp", ranks, "--max-seq-len", "8192")
    assert f"--tp: is {ranks}, which does not divide" in said
    assert "(num_attention_heads)" in said


@pytest.mark.parametrize("engine", ENGINES)
def test_no_more_tokens_than_the_model_has(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, engine: str
) -> None:
    monkeypatch.delenv(ALLOW_LONGER[engine], raising=False)
    options = ("--engine", engine, "--max-seq-len")
    said = _refused(capsys, "gemma-2-9b", *options, "40000")
    assert "--max-seq-len: is 40000" in said
    assert "--max-seq-len 8192" in said
    assert f"{ALLOW_LONGER[engine]}=1" in said
    assert _size("gemma-2-9b", *options, "8192") == 0
    monkeypatch.setenv(ALLOW_LONGER[engine], "1")
    assert _size("gemma-2-9b", *options, "40000") == 0


@pytest.mark.parametrize(
    ("scaling", "vllm", "sglang", "trtllm"),
    [
        ({}, 8192, 8192, 8192),
        ({"rope_type": "linear", "factor": 4.0}, 32768, 32768, 32768),
        ({"type": "dynamic", "factor": 2}, 16384, 16384, 16384),
        ({"rope_type": "llama3", "factor": 8.0}, 8192, 8192, 8192),
        ({"rope_type": "yarn", "factor": 4.0}, 8192, 32768, 8192),
        (
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048},
            8192, 8192, 8192,
        ),
        ({"rope_type": "linear", "factor": None}, 8192, 8192, 8192),
    ],
)  # fmt: skip
def test_scaled_positions_make_it_longer_as_each_engine_has_it(
    scaling: dict[str, Any], vllm: int, sglang: int, trtllm: int
) -> None:
    fields = {
        "model_type": "llama", "max_position_embeddings": 8192, "rope_scaling": scaling,
    }  # fmt: skip
    config = load_config(json.dumps(fields).encode(), source="config.json")
    found = tuple(longest_served(engine, config) for engine in ("vllm", "sglang", "trtllm"))
    assert found == (vllm, sglang, trtllm)


@pytest.mark.parametrize(
    "names", [None, [], ["MyOwnForCausalLM"], ["LlamaForSequenceClassification"]]
)
def test_vllm_has_a_class_of_its_own_for_the_model(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, names: list[str] | None
) -> None:
    model = _changed(tmp_path, "llama-3.1-8b", architectures=names)
    said = _refused(capsys, model, "--engine", "vllm", "--max-seq-len", "8192")
    assert "architectures" in said
    assert _size(model, "--max-seq-len", "8192", "--max-batch-size", "1") == 0


def test_ranks_divide_the_groups_of_states_unless_there_is_one(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    options = ("--engine", "vllm", "--tp", "16", "--max-seq-len", "8192")
    said = _refused(capsys, _changed(tmp_path, "nemotron-h-8b", n_groups=8), *options)
    assert "--tp: is 16, which does not divide 8 groups of states (n_groups)" in said
    assert _size(_changed(tmp_path, "nemotron-h-8b", n_groups=1), *options) == 0
