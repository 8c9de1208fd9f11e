"""Figures that others published, each with its address and as it stands there, and ours."""

from __future__ import annotations

from dataclasses import dataclass

from hostprep.sizing.dtypes import TypeChoice
from tests.unit.sizing.models import groups, limits, per_token

GIB, MIB, KIB = 1 << 30, 1 << 20, 1 << 10


@dataclass(frozen=True, slots=True)
class Figure:
    """One published number. `unit` is what it is counted in, `digit` the last digit's worth."""

    model: str
    what: str
    quote: str
    address: str
    published: float
    ours: float
    unit: int = 1
    digit: float = 1
    shown: str = "bytes"

    @property
    def ours_in_unit(self) -> float:
        return self.ours / self.unit


def _state(name: str) -> int:
    return groups(name)["state"].slot_bytes


_FLASH = TypeChoice(kv="q8_0", index="float16")
_FLASH_PER_TOKEN = per_token("deepseek-v4-flash", "compressed-4", "compressed-128", types=_FLASH)
_FLASH_ISSUE = "https://github.com/ikawrakow/ik_llama.cpp/pull/2266"
_PRO_TOKENS = 1 << 20
_16_BITS = TypeChoice(kv="bfloat16", index="bfloat16")
_PRO = (
    per_token("deepseek-v4-pro", "compressed-4", "compressed-128", types=_16_BITS) * _PRO_TOKENS
    + per_token("deepseek-v4-pro", "window-128", types=_16_BITS) * 128
)
_VLLM_V4 = "https://24-ai.news/en/vijest/2026-04-24/vllm-deepseek-v4-kv-cache-kompresija/"


def _flash(tokens: int) -> float:
    return _FLASH_PER_TOKEN * tokens + _state("deepseek-v4-flash")


FIGURES = (
    Figure(
        "llama-3.1-8b",
        "1952 blocks of 16 tokens, vLLM's log",
        "kv_cache_size=3.81GiB",
        "https://github.com/vllm-project/vllm/issues/10517",
        3.81,
        1952 * groups("llama-3.1-8b", served=limits(tokens_per_block=16))["full"].slot_bytes,
        GIB,
        0.01,
        "GiB",
    ),
    Figure(
        "llama-3.1-70b",
        "128,000 tokens in FP16, Hugging Face's table",
        "39.06 GB",
        "https://github.com/huggingface/blog/issues/2345",
        39.06,
        128_000 * per_token("llama-3.1-70b", types=TypeChoice(kv="float16")),
        GIB,
        0.01,
        "GiB",
    ),
    Figure(
        "command-r-35b",
        "2,048 tokens, llama.cpp",
        "c4ai-command-r-v01 | (35B) | 2560 MiB",
        "https://huggingface.co/dranger003/c4ai-command-r-v01-iMat.GGUF/discussions/6",
        2560,
        2048 * per_token("command-r-35b"),
        MIB,
        1,
        "MiB",
    ),
    Figure(
        "qwen3-1.7b",
        "175,856 tokens, vLLM's log",
        "Available KV cache memory: 18.78 GiB",
        "https://github.com/vllm-project/vllm/issues/33263",
        18.78,
        175_856 * per_token("qwen3-1.7b"),
        GIB,
        0.01,
        "GiB",
    ),
    Figure(
        "qwen3-235b-a22b",
        "367,404 tokens on each rank of TP 4, keys and values, SGLang's log",
        "#tokens: 367404, K size: 8.23 GB, V size: 8.23 GB",
        "https://github.com/vllm-project/vllm/issues/21348",
        16.46,
        367_404 * per_token("qwen3-235b-a22b", served=limits(tensor_parallel=4)),
        GIB,
        0.02,
        "GiB",
    ),
    Figure(
        "gpt-oss-120b",
        "a token in all 36 layers, as vLLM's log gives it",
        "73,728 bytes/token",
        "https://github.com/alvarobartt/hf-mem/issues/60",
        73_728,
        per_token("gpt-oss-120b"),
    ),
    Figure(
        "gpt-oss-120b",
        "131,072 tokens in FP8, AWS Neuron's documentation",
        "~4.83 GB in FP8",
        "https://awsdocs-neuron.readthedocs-hosted.com/en/latest/_sources/vllm-neuron/docs/design/"
        "vllm/kv-cache-quantization.md",
        4.83,
        131_072 * per_token("gpt-oss-120b", types=TypeChoice(kv="fp8")),
        10**9,
        0.01,
        "GB",
    ),
    Figure(
        "gemma-3-270m",
        "1,536 cells of all layers, llama.cpp",
        "1536 cells / 27.0 MiB",
        "https://github.com/unslothai/unsloth/pull/7530",
        27.0,
        1536 * per_token("gemma-3-270m"),
        MIB,
        0.1,
        "MiB",
    ),
    Figure(
        "gemma-4-12b",
        "one token more, in the layers without a window",
        "true growth is 16 KB/token",
        "https://github.com/raullenchai/Rapid-MLX/pull/1423",
        16,
        per_token("gemma-4-12b", "full"),
        KIB,
        1,
        "KiB",
    ),
    Figure(
        "deepseek-v3",
        "a token in 16 bits",
        "~68.6 KB per token at FP16",
        "https://tooljolt.com/tools/deepseek-v3-kv-cache-calculator",
        68.6,
        per_token("deepseek-v3", types=TypeChoice(kv="float16")),
        KIB,
        0.1,
        "KiB",
    ),
    Figure(
        "deepseek-v4-pro",
        "a sequence of 1,048,576 tokens in 16 bits, vLLM",
        "approximately 9.62 GiB per sequence in bf16",
        _VLLM_V4,
        9.62,
        _PRO,
        GIB,
        0.01,
        "GiB",
    ),
    Figure(
        "deepseek-v3.2",
        "the same sequence over DeepSeek-V4-Pro's, vLLM",
        "8.7× smaller KV cache compared to V3.2",
        _VLLM_V4,
        8.7,
        per_token("deepseek-v3.2", types=_16_BITS) * _PRO_TOKENS / _PRO,
        1,
        0.1,
        "times",
    ),
    *(
        Figure(
            "deepseek-v4-flash",
            f"compressed cache and state at {tokens // KIB}K tokens, q8_0 with a 16-bit index",
            f"{tokens // KIB}K | ... | {published:.2f} MiB",
            _FLASH_ISSUE,
            published,
            _flash(tokens),
            MIB,
            0.01,
            "MiB",
        )
        for tokens, published in ((32 * KIB, 145.55), (128 * KIB, 547.27), (768 * KIB, 3225.39))
    ),
    Figure(
        "deepseek-v4-flash",
        "keys of the window's layers for 32K tokens, were all kept, q8_0",
        "32K | 731.00 MiB",
        _FLASH_ISSUE,
        731.00,
        32 * KIB * per_token("deepseek-v4-flash", "window-128", types=_FLASH),
        MIB,
        0.01,
        "MiB",
    ),
    Figure(
        "qwen3.5-4b",
        "one recurrent state, SGLang",
        "a full SSM snapshot (~51 MB for Qwen3.5-4B)",
        "https://github.com/sgl-project/sglang/pull/39851",
        51,
        _state("qwen3.5-4b"),
        10**6,
        1,
        "MB",
    ),
)
