"""Run by an engine's interpreter: how many parameters transformers' classes make of a config.json.

Reads {model: config.json} from standard input, prints {model: parameters} for those that it can
build without code of the model's own. No memory is taken for them: they are on the meta device.
"""

from __future__ import annotations

import json
import sys
import warnings
from typing import Any


def main() -> None:
    """Answer for all models at once: the import takes seconds."""
    warnings.simplefilter("ignore")
    counts = {name: _count(config) for name, config in json.load(sys.stdin).items()}
    json.dump(counts, sys.stdout)


def _count(config: dict[str, Any]) -> int:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

    fields = {k: v for k, v in config.items() if k not in ("quantization_config", "auto_map")}
    kind = fields.pop("model_type")
    # DeepSeek-V3's class under a name of its own, as its code beside the model says.
    kind = "deepseek_v3" if kind == "kimi_k2" else kind
    built = AutoModelForImageTextToText if "vision_config" in fields else AutoModelForCausalLM
    with torch.device("meta"):
        model = built.from_config(AutoConfig.for_model(kind, **fields))
    tensors = {id(tensor): tensor for tensor in model.parameters()}
    # Routers' biases are parameters of the checkpoint, and buffers of the class.
    buffers = [tensor for name, tensor in model.named_buffers() if "e_score_correction" in name]
    return sum(tensor.numel() for tensor in (*tensors.values(), *buffers))


if __name__ == "__main__":
    main()
