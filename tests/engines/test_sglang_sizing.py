"""SGLang's own classes size its pools, without a GPU, and ours come to the same.

They choose the layout, the windows, the states and the tokens from a model's configuration; only
what a start measures is given to them.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from hostprep.errors import BadInputError
from hostprep.sizing.config import load_config
from hostprep.sizing.dtypes import TypeChoice
from hostprep.sizing.families import read_model
from hostprep.sizing.groups import Limits
from hostprep.sizing.size import Memory
from testbed.engines.interpreters import EnginePython, engine_python
from tests.engines.published import published_or_skip
from tests.unit.sizing.sglang_cases import ANSWERS, GIB, H200, OVERRIDES, RULES, answer_of, cases

pytestmark = [pytest.mark.engines, pytest.mark.long]

_SCENE = Path(__file__).with_name("sglang_sizes.py")
_LEAST = 60
"""Published models that SGLang serves by rules that are known here."""


@pytest.fixture(scope="module")
def python() -> EnginePython:
    return engine_python("sglang")


def _ask(python: EnginePython, questions: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    done = subprocess.run(
        [python.path, str(_SCENE)],
        input=json.dumps(questions),
        env={**os.environ, **python.variables},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    answers: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    return answers


def test_the_answers_that_unit_tests_compare_with_are_sglangs(
    python: EnginePython, tmp_path: Path
) -> None:
    asked = cases()
    answers = _ask(python, [case.question(tmp_path / case.name) for case in asked])
    found = {case.name: answer for case, answer in zip(asked, answers, strict=True)}
    if os.environ.get("WRITE_ANSWERS"):
        ANSWERS.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    assert found == json.loads(ANSWERS.read_text(encoding="utf-8"))


def test_published_models_have_the_pools_that_sglang_gives_them(
    python: EnginePython, tmp_path: Path
) -> None:
    asked, ours = [], []
    for name, published in published_or_skip().items():
        data = published.config.read_bytes()
        for ranks in (1, 8):
            try:
                config = load_config(data, source=name)
                choice = RULES.types(config, TypeChoice(), H200)
                model = read_model(config, name=name, choice=choice)
                page = RULES.defaults(model, None, H200).tokens_per_block.value
                limits = Limits(
                    max_batch_size=64,
                    max_seq_len=32_768,
                    tokens_per_block=page,
                    tensor_parallel=ranks,
                )
                memory = Memory(gpu_bytes=60 * GIB + 500_000_000)
                ours.append(answer_of(RULES.size(model, limits, memory, H200)))
            except BadInputError:
                continue
            beside = tmp_path / name.replace("/", "--")
            _write_plain(data, beside)
            asked.append(
                {
                    "name": f"{name} on {ranks}",
                    "folder": str(beside),
                    "tp": ranks,
                    "page": page,
                    "bytes": memory.gpu_bytes,
                    "kv_dtype": "fp8_e4m3" if model.types.kv.name == "fp8" else "auto",
                    "dsa_backend": "flashmla_kv",
                    "family_windows": OVERRIDES.get(model.family, ""),
                    "drafts": 0,
                    "context": 32_768,
                    "window": 128,
                    "host_gigabytes": 0,
                    "host_token_bytes": 1,
                }
            )
    answers = _ask(python, asked)
    wrong = {
        question["name"]: (mine, theirs)
        for question, mine, theirs in zip(asked, ours, answers, strict=True)
        if any(theirs.get(key) != value for key, value in mine.items())
    }
    assert not wrong
    assert len(asked) >= 2 * _LEAST


def _write_plain(data: bytes, folder: Path) -> None:
    """Write a configuration without code of its own and without its weights' quantization."""
    document = json.loads(data)
    for part in (document, document.get("text_config") or {}):
        part.pop("auto_map", None)
        part.pop("quantization_config", None)
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(document), encoding="utf-8")
