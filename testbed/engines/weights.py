"""A llama of random weights that are the same for the same seed: a checkpoint as users have one.

vLLM's dummy weights have no identity, so that nothing that was computed with them is kept.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

_SPREAD = 0.02
"""Standard deviation of the weights, as llamas are initialised."""


def write_weights(
    folder: Path, *, seed: int = 1, changes: Mapping[str, object] | None = None
) -> Path:
    """Write model.safetensors for the folder's config.json, with `changes` made to it.

    The format: 8 bytes length, a JSON header, then the tensors
    (https://github.com/huggingface/safetensors, README, "Format").
    """
    path = folder / "config.json"
    config = json.loads(path.read_text("utf-8")) | dict(changes or {})
    path.write_text(json.dumps(config, indent=2), "utf-8")
    chance = np.random.default_rng(seed)
    header: dict[str, Any] = {}
    tensors: list[bytes] = []
    size_bytes = 0
    for name, shape in _shapes(config).items():
        if len(shape) == 1:  # of a norm
            values = np.ones(shape, np.float32)
        else:
            values = chance.standard_normal(shape, np.float32) * np.float32(_SPREAD)
        # bfloat16 is the upper half of a float32.
        data = (values.view(np.uint32) >> 16).astype("<u2").tobytes()
        offsets = [size_bytes, size_bytes + len(data)]
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": offsets}
        tensors.append(data)
        size_bytes += len(data)
    described = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()
    described += b" " * (-len(described) % 8)
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(described).to_bytes(8, "little") + described)
        file.writelines(tensors)
    return folder


def _shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    hidden, inner, words = (
        config[name] for name in ("hidden_size", "intermediate_size", "vocab_size")
    )
    queries = config["num_attention_heads"] * config["head_dim"]
    values = config["num_key_value_heads"] * config["head_dim"]
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (words, hidden)}
    for number in range(config["num_hidden_layers"]):
        layer = f"model.layers.{number}"
        shapes |= {
            f"{layer}.input_layernorm.weight": (hidden,),
            f"{layer}.self_attn.q_proj.weight": (queries, hidden),
            f"{layer}.self_attn.k_proj.weight": (values, hidden),
            f"{layer}.self_attn.v_proj.weight": (values, hidden),
            f"{layer}.self_attn.o_proj.weight": (hidden, queries),
            f"{layer}.post_attention_layernorm.weight": (hidden,),
            f"{layer}.mlp.gate_proj.weight": (inner, hidden),
            f"{layer}.mlp.up_proj.weight": (inner, hidden),
            f"{layer}.mlp.down_proj.weight": (hidden, inner),
        }
    return shapes | {"model.norm.weight": (hidden,), "lm_head.weight": (words, hidden)}
