"""Models and limits that SGLang was asked about, as its own classes answered them.

tests/engines/test_sglang_sizing.py asks again; sglang_answers.json is what it answered.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hostprep.sizing.config import load_config
from hostprep.sizing.dtypes import AUTO, TypeChoice
from hostprep.sizing.engines.rules import DEFAULT_DEVICE, Device, EngineSizing
from hostprep.sizing.engines.sglang import SGLangRules
from hostprep.sizing.families import read_model
from hostprep.sizing.groups import Limits
from hostprep.sizing.model import Kind, Model
from hostprep.sizing.size import Memory
from tests.unit.sizing.models import MODELS

GIB = 1 << 30
ANSWERS = Path(__file__).with_name("sglang_answers.json")
RULES = SGLangRules()
H200 = DEFAULT_DEVICE
B200 = Device(name="B200", capability=100, memory_bytes=179 * GIB)
CONTEXT = 32_768

_ARCHITECTURES = {
    "cohere": "CohereForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
    "deepseek_v32": "DeepseekV32ForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3": "Gemma3ForConditionalGeneration",
    "gemma3_text": "Gemma3ForCausalLM",
    "gemma4": "Gemma4ForConditionalGeneration",
    "gpt_oss": "GptOssForCausalLM",
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "nemotron_h": "NemotronHForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "qwen3_next": "Qwen3NextForCausalLM",
    "qwen3_5_text": "Qwen3_5ForCausalLM",
}
"""The examples are published fields of caches alone, without the class that SGLang goes by."""
OVERRIDES = {
    "gemma2": "_gemma2_gemma3_overrides",
    "gemma3": "_gemma2_gemma3_overrides",
    "gemma3_text": "_gemma2_gemma3_overrides",
}
"""SGLang's function that turns the pool of windows off for the family."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One question."""

    example: str
    tensor_parallel: int
    size_bytes: int
    page: int
    kv: str = AUTO
    speculative_tokens: int = 0
    host_bytes: int | None = None

    @property
    def name(self) -> str:
        parts = [self.example, f"tp{self.tensor_parallel}", f"{self.size_bytes >> 20}Mi"]
        parts += [f"page{self.page}", self.kv]
        return "-".join([*parts, *(["draft"] if self.speculative_tokens else [])])

    def model(self, device: Device = H200) -> Model:
        data = json.dumps(self.document()).encode()
        config = load_config(data, source=f"{self.example}.json")
        choice = RULES.types(config, TypeChoice(kv=self.kv), device)
        return read_model(config, name=self.example, choice=choice, drafts=self.speculative_tokens)

    def document(self) -> dict[str, Any]:
        path = MODELS / f"{self.example}.json"
        document: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        if self.speculative_tokens:
            document["num_nextn_predict_layers"] = 1
        return document

    def limits(self) -> Limits:
        return Limits(
            max_batch_size=64,
            max_seq_len=CONTEXT,
            tokens_per_block=self.page,
            tensor_parallel=self.tensor_parallel,
            speculative_tokens=self.speculative_tokens,
        )

    def ours(self) -> EngineSizing:
        memory = Memory(gpu_bytes=self.size_bytes, host_bytes=self.host_bytes)
        return RULES.size(self.model(), self.limits(), memory, H200)

    def question(self, folder: Path) -> Mapping[str, Any]:
        """Write the model as SGLang reads it, and return what its classes are asked."""
        document = self.document()
        family = document["model_type"]
        document.setdefault("architectures", [_ARCHITECTURES[family]])
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(document), encoding="utf-8")
        model = self.model()
        latents = sum(
            store.rank_bytes(self.tensor_parallel)
            for layer in model.layers
            for store in layer
            if store.kind in (Kind.FULL, Kind.WINDOW, Kind.LATENT)
        )
        kv = "fp8_e4m3" if model.types.kv.name == "fp8" else "auto"
        return {
            "folder": str(folder),
            "tp": self.tensor_parallel,
            "page": self.page,
            "bytes": self.size_bytes,
            "kv_dtype": kv,
            "dsa_backend": "flashmla_kv",
            "family_windows": OVERRIDES.get(model.family, ""),
            "drafts": self.speculative_tokens,
            "context": CONTEXT,
            "window": 128,
            "host_gigabytes": gigabytes_of(self.ours()),
            "host_token_bytes": latents,
        }


def answer_of(sizing: EngineSizing) -> dict[str, int]:
    """Return our figures by the names of SGLang's."""
    assert sizing.gpu is not None
    lines = " ".join(sizing.gpu.log_lines)
    found = {"tokens": sizing.gpu.tokens, "swa_tokens": 0, "state_slots": 0}
    for key, name in (
        ("swa_layer_tokens=", "swa_tokens"),
        ("max_mamba_cache_size: ", "state_slots"),
    ):
        if key in lines:
            found[name] = int(re.match(r"\d+", lines.partition(key)[2])[0])  # type: ignore[index]
    return found


def gigabytes_of(sizing: EngineSizing) -> int:
    """Return the `--hicache-size` that our answer says to give; 0 without a host tier."""
    if not sizing.host:
        return 0
    found = re.search(r"--hicache-size (\d+)", sizing.host[0].notes[0])
    assert found is not None
    return int(found[1])


def cases() -> list[Case]:
    """Return all of them: every example that SGLang serves, on one rank and on several."""
    found = []
    for example in (
        "command-r-35b", "deepseek-v3", "deepseek-v3.2", "gemma-2-9b", "gemma-3-270m",
        "gemma-3-27b", "gemma-4-31b", "gpt-oss-120b", "llama-3.1-70b", "llama-3.1-8b",
        "mistral-7b-v0.1", "nemotron-h-8b", "qwen3-1.7b", "qwen3-235b-a22b",
        "qwen3-next-80b-a3b", "qwen3.5-4b",
    ):  # fmt: skip
        page = 64 if example == "deepseek-v3.2" else 1
        found += [
            Case(example=example, tensor_parallel=ranks, size_bytes=size_bytes, page=page)
            for ranks, size_bytes in ((1, 60 * GIB + 12_345_678), (4, 43 * GIB), (8, 97 * GIB))
        ]
    for example, drafts in (("deepseek-v3", 3), ("deepseek-v3.2", 3)):
        found.append(
            Case(example=example, tensor_parallel=8, size_bytes=50 * GIB, page=64,
                 speculative_tokens=drafts)
        )  # fmt: skip
    for example, page in (
        ("gpt-oss-120b", 64), ("llama-3.1-8b", 64), ("qwen3-235b-a22b", 16),
        ("deepseek-v3.2", 64), ("deepseek-v3", 64),
    ):  # fmt: skip
        host_bytes = None if example == "gpt-oss-120b" else 80 * 10**9
        found.append(
            Case(example=example, tensor_parallel=4, size_bytes=31 * GIB, page=page, kv="fp8",
                 host_bytes=host_bytes)
        )  # fmt: skip
    return found
