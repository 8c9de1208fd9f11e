"""What engines logged on others' machines, and what their rules say of the same pools."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from hostprep.api.pool_resource import load_pools
from hostprep.cli.main import main
from hostprep.sizing.config import load_config
from hostprep.sizing.dtypes import TypeChoice
from hostprep.sizing.engines import rules_of
from hostprep.sizing.engines.rules import DEFAULT_DEVICE, EngineGroup
from hostprep.sizing.families import read_model
from hostprep.sizing.groups import Limits
from hostprep.sizing.size import Memory
from tests.unit.sizing.models import MODELS

pytestmark = pytest.mark.unit

LOGS = json.loads(Path(__file__).with_name("engine_logs.json").read_text(encoding="utf-8"))
_SWA_RATIO = 0.8


@pytest.mark.parametrize("log", LOGS, ids=lambda log: f"{log['engine']}-{log['model']}")
def test_the_same_pools_are_logged_in_the_same_words(log: dict[str, Any]) -> None:
    rules = rules_of(log["engine"])
    fields = log["config"]
    if isinstance(fields, str):
        fields = json.loads((MODELS / f"{fields}.json").read_text(encoding="utf-8"))
    config = load_config(json.dumps(fields).encode(), source=log["model"])
    choice = rules.types(config, TypeChoice(kv=log["kv"]), DEFAULT_DEVICE)
    model = read_model(config, name=log["model"], choice=choice)
    limits = Limits(
        max_batch_size=1,
        max_seq_len=1024,
        tokens_per_block=log["page"],
        tensor_parallel=log["tp"],
    )
    groups = rules.size(model, limits, Memory(), DEFAULT_DEVICE).groups
    taken = sum(_bytes(group, log) for group in groups)
    found = rules.size(model, limits, Memory(gpu_bytes=math.ceil(taken)), DEFAULT_DEVICE).gpu
    assert found is not None
    assert found.tokens == log["tokens"]
    for line in log["lines"]:
        assert line in found.log_lines
    assert log["address"].startswith("https://")


@pytest.mark.parametrize(
    ("engine", "integration", "said"),
    [
        ("sglang", "sglang", "give --hicache-size 21"),
        ("trtllm", "lmcache", "give kv_cache_config.host_cache_size 21474836480"),
    ],
)
def test_people_are_told_and_a_pool_is_made(
    capsys: pytest.CaptureFixture[str], engine: str, integration: str, said: str
) -> None:
    model = str(MODELS / "llama-3.1-8b.json")
    asked = ["size", model, "--engine", engine, "--gpu-memory", "40Gi", "--host-memory", "20Gi"]
    assert main(asked) == 0
    told = capsys.readouterr().out
    assert f"{engine} {rules_of(engine).version} serves a request of 131072 tokens" in told
    assert said in told
    assert main([*asked, "-o", "yaml"]) == 0
    (spec,) = load_pools(capsys.readouterr().out, source="pool.yaml")
    assert spec.sizing is not None
    assert spec.sizing.integration == integration


def test_pools_without_blocks_of_one_size_are_not_shown_with_one(
    capsys: pytest.CaptureFixture[str],
) -> None:
    model = str(MODELS / "gpt-oss-120b.json")
    asked = ["--max-seq-len", "8192", "--gpu-memory", "40Gi"]
    assert main(["size", model, "--engine", "sglang", *asked]) == 0
    told = capsys.readouterr().out
    assert "full_layer_tokens=" in told
    assert " of 0 B" not in told


def _bytes(group: EngineGroup, log: dict[str, Any]) -> float:
    """Return the memory of a group's pool with the tokens, or states, that were logged."""
    page_bytes = group.page_bytes * group.padded_layers
    if not group.tokens_per_block:
        return float((log["state_slots"] + 1) * page_bytes)
    size: float = log["tokens"] / group.tokens_per_block * page_bytes
    return size * _SWA_RATIO if group.window else size
