"""What published models keep, from their papers and the engines' sources: independent of sizing.

Each row states a model's facts as numbers; nothing here reads a config.json, and nothing of
hostprep.sizing is used. Sources, besides the models' own files: vLLM 0.32 (`get_kv_cache_spec` of
each model's layers; `mamba_utils.py` for states) and the papers named at the formulas.
"""

from __future__ import annotations

from dataclasses import dataclass

_BF16, _FP8, _FLOAT32 = 2, 1, 4
DS_MLA = "fp8_ds_mla"


@dataclass(frozen=True, slots=True)
class Part:
    """Something that each of a model's layers of one kind keeps; bytes on one rank by `on_rank`."""

    layers: int
    whole_bytes: int
    """Of one token and layer (of one sequence, for a state), kept whole by every rank."""
    heads: int = 0
    """Heads that ranks divide; each rank has one at least."""
    head_bytes: int = 0
    window: int | None = None
    ratio: int = 1
    is_state: bool = False
    groups: int = 0
    """Mamba 2: groups of B and C. On a number of ranks that does not divide them, vLLM gives each
    rank a group of its own (`extra_groups_for_head_shards`)."""
    group_bytes: int = 0
    head_input_bytes: int = 0
    """Of a head for each drafted token: a convolution keeps the inputs of those too."""
    group_input_bytes: int = 0

    def on_rank(self, ranks: int, drafts: int) -> int:
        """Bytes of all these layers on each of so many tensor-parallel ranks."""
        heads = max(1, self.heads // ranks) if self.heads else 0
        head_bytes = self.head_bytes + drafts * self.head_input_bytes
        group_bytes = self.group_bytes + drafts * self.group_input_bytes
        groups = self.groups // ranks if self.groups % ranks == 0 else 1
        if not self.groups:
            groups = 0
        each = self.whole_bytes + heads * head_bytes + groups * group_bytes
        return self.layers * each


def attention(
    layers: int,
    heads: int,
    key: int,
    value: int | None = None,
    *,
    window: int | None = None,
    element_bytes: int = _BF16,
) -> Part:
    """Keys and values: heads x (key + value) elements (arXiv 2305.13245)."""
    both = key + (key if value is None else value)
    return Part(layers, 0, heads=heads, head_bytes=both * element_bytes, window=window)


def latent(layers: int, size_bytes: int) -> Part:
    """A latent, or an indexer's key: one vector a token, whole on every rank (arXiv 2405.04434)."""
    return Part(layers, size_bytes)


def mamba2(layers: int, heads: int, size: int, state: int, groups: int) -> Part:
    """Mamba 2: a kernel of 4 over x, B and C in 16 bits, and the state in float32."""
    kept_inputs = 4 - 1
    return Part(
        layers,
        0,
        heads=heads,
        head_bytes=size * kept_inputs * _BF16 + size * state * _FLOAT32,
        groups=groups,
        group_bytes=2 * state * kept_inputs * _BF16,
        is_state=True,
        head_input_bytes=size * _BF16,
        group_input_bytes=2 * state * _BF16,
    )


def gated_delta(layers: int, key_heads: int, value_heads: int, size: int = 128) -> Part:
    """Gated delta net: a kernel of 4 over q, k and v in 16 bits, and value heads x size x size.

    Stated for each key head, of which every rank has a whole number here.
    """
    kept_inputs, shared = 4 - 1, value_heads // key_heads
    input_bytes = (2 + shared) * size * _BF16
    recurrent = shared * size * size * _FLOAT32
    return Part(
        layers,
        0,
        heads=key_heads,
        head_bytes=input_bytes * kept_inputs + recurrent,
        is_state=True,
        head_input_bytes=input_bytes,
    )


def _compressed(ratio_4: int, ratio_128: int, latent_bytes: int, index_bytes: int) -> list[Part]:
    """DeepSeek-V4: entries for 4 or 128 tokens, and the compressor's sums in float32.

    Ratio 4 overlaps its neighbour: 2 x 4 rows of keys' and scores' sums, of 2 x 512 elements, and
    the indexer's likewise with 128 (vLLM, deepseek_v4/compressor.py: state_dim = 2 x coff x dim).
    """
    sums_4 = 8 * 2 * 2 * (512 + 128) * _FLOAT32
    sums_128 = 128 * 2 * 512 * _FLOAT32
    return [
        Part(ratio_4, latent_bytes + index_bytes, ratio=4),
        Part(ratio_128, latent_bytes, ratio=128),
        Part(1, ratio_4 * sums_4 + ratio_128 * sums_128, is_state=True),
    ]


@dataclass(frozen=True, slots=True)
class Source:
    """Where a model's numbers stand."""

    text: str
    address: str


def _vllm(path: str) -> Source:
    address = f"https://github.com/vllm-project/vllm/blob/v0.32.0/vllm/{path}"
    return Source(f"vLLM 0.32, {path.rpartition('/')[2]}", address)


@dataclass(frozen=True, slots=True)
class Facts:
    """A model, or several that keep the same."""

    names: tuple[str, ...]
    kept: tuple[Part, ...]
    ranks: tuple[int, ...]
    """Tensor-parallel sizes to compare at, besides 1."""
    kv_dtype: str = "auto"
    """Given where engines differ in what `auto` means: for sparse MLA by GPU and release, and
    where files declare FP8 in a way that vLLM 0.32 does not see (no `quant_method` or producer)."""
    seen_in: tuple[Source, ...] = ()

    drafting: Part | None = None
    """The model's own layer for drafts (MTP); None where there is none, or not compared."""

    def on_rank(self, ranks: int, drafts: int = 0) -> dict[tuple[int | None, int, bool], int]:
        """Bytes on a rank, by window, ratio and whether a state: of a token, or of a sequence."""
        kept: dict[tuple[int | None, int, bool], int] = {}
        for part in (*self.kept, *((self.drafting,) if self.drafting and drafts else ())):
            key = (part.window, part.ratio, part.is_state)
            kept[key] = kept.get(key, 0) + part.on_rank(ranks, drafts)
        return kept


def _facts(
    names: str,
    *kept: Part,
    ranks: tuple[int, ...] = (8,),
    kv_dtype: str = "auto",
    drafting: Part | None = None,
    seen_in: Source | tuple[Source, ...],
) -> Facts:
    sources = seen_in if isinstance(seen_in, tuple) else (seen_in,)
    return Facts(tuple(names.split()), kept, ranks, kv_dtype, sources, drafting)


_MLA = 512 + 64
_DS_MLA = 512 + 4 * 4 + 64 * 2
_INDEX_FP8 = 128 + 4
_V4_DS_MLA = 448 + 64 * 2 + 8
_LLAMA = Source("The Llama 3 Herd of Models, table 3", "https://arxiv.org/abs/2407.21783")
_QWEN3 = Source("Qwen3 Technical Report, tables 1 and 2", "https://arxiv.org/abs/2505.09388")
_DSV3 = Source("DeepSeek-V3 Technical Report, 4.2", "https://arxiv.org/abs/2412.19437")
_KIMI_K2 = Source("Kimi K2, table 2", "https://arxiv.org/abs/2507.20534")
_GPT_OSS = Source("gpt-oss model card, section 2", "https://arxiv.org/abs/2508.10925")
_MIXTRAL = Source("Mixtral of Experts, table 1", "https://arxiv.org/abs/2401.04088")
_VL = _vllm("model_executor/models/qwen3_vl.py")
_DSA = _vllm("model_executor/models/deepseek_v2.py")
_DSV4 = _vllm("models/deepseek_v4/compressor.py")
_STATES = _vllm("model_executor/layers/mamba/mamba_utils.py")
_M2 = _vllm("model_executor/models/minimax_m2.py")
_M3 = _vllm("models/minimax_m3/common/indexer.py")
_GEMMA4 = _vllm("model_executor/models/gemma4.py")
_QUANTIZED = _vllm("utils/torch_utils.py")
"""Where vLLM takes FP8 from hf_quant_config.json or quantization_config."""

FACTS = (
    _facts("meta-llama/Meta-Llama-3.1-8B", attention(32, 8, 128), ranks=(2, 16), seen_in=_LLAMA),
    _facts("meta-llama/Meta-Llama-3.1-70B", attention(80, 8, 128), seen_in=_LLAMA),
    _facts("meta-llama/Meta-Llama-3.1-405B", attention(126, 8, 128), ranks=(16,), seen_in=_LLAMA),
    _facts(
        "nvidia/Llama-3.1-70B-Instruct-FP8",
        attention(80, 8, 128, element_bytes=_FP8),
        seen_in=(_LLAMA, _QUANTIZED),
    ),
    _facts(
        "mistralai/Mixtral-8x7B-v0.1",
        attention(32, 8, 128),
        seen_in=_MIXTRAL,
    ),
    _facts(
        "mistralai/Mixtral-8x22B-v0.1",
        attention(56, 8, 128),
        seen_in=_vllm("model_executor/models/mixtral.py"),
    ),
    _facts("Qwen/Qwen3-0.6B Qwen/Qwen3-1.7B", attention(28, 8, 128), seen_in=_QWEN3),
    _facts("Qwen/Qwen3-8B", attention(36, 8, 128), seen_in=_QWEN3),
    _facts("Qwen/Qwen3-32B Qwen/Qwen3-32B-FP8", attention(64, 8, 128), seen_in=_QWEN3),
    _facts(
        "Qwen/Qwen3-32B-FP8-Static-PerTensor",
        attention(64, 8, 128, element_bytes=_FP8),
        kv_dtype="fp8",
        seen_in=_QWEN3,
    ),
    _facts("Qwen/Qwen3-30B-A3B Qwen/Qwen3-30B-A3B-FP8", attention(48, 4, 128), seen_in=_QWEN3),
    _facts("Qwen/Qwen3-235B-A22B Qwen/Qwen3-235B-A22B-FP8", attention(94, 4, 128), seen_in=_QWEN3),
    _facts(
        "nvidia/Qwen3-235B-A22B-NVFP4",
        attention(94, 4, 128, element_bytes=_FP8),
        seen_in=(_QWEN3, _QUANTIZED),
    ),
    _facts(
        "Qwen/Qwen3-Coder-480B-A35B-Instruct",
        attention(62, 8, 128),
        ranks=(8, 16),
        seen_in=_vllm("model_executor/models/qwen3_moe.py"),
    ),
    _facts("Qwen/Qwen3-VL-2B-Instruct", attention(28, 8, 128), seen_in=_VL),
    _facts(
        "Qwen/Qwen3-VL-4B-Instruct Qwen/Qwen3-VL-8B-Instruct", attention(36, 8, 128), seen_in=_VL
    ),
    _facts(
        "Qwen/Qwen3-VL-32B-Instruct Qwen/Qwen3-VL-32B-Thinking", attention(64, 8, 128), seen_in=_VL
    ),
    _facts("Qwen/Qwen3-VL-30B-A3B-Instruct", attention(48, 4, 128), seen_in=_VL),
    _facts("Qwen/Qwen3-VL-235B-A22B-Instruct", attention(94, 4, 128), seen_in=_VL),
    _facts(
        "Qwen/Qwen3.5-27B",
        attention(16, 4, 256),
        gated_delta(48, 16, 48),
        ranks=(4, 8),
        drafting=attention(1, 4, 256),
        seen_in=_STATES,
    ),
    _facts(
        "Qwen/Qwen3.5-35B-A3B",
        attention(10, 2, 256),
        gated_delta(30, 16, 32),
        drafting=attention(1, 2, 256),
        seen_in=_STATES,
    ),
    _facts(
        "Qwen/Qwen3.5-122B-A10B",
        attention(12, 2, 256),
        gated_delta(36, 16, 64),
        drafting=attention(1, 2, 256),
        seen_in=_STATES,
    ),
    _facts(
        "Qwen/Qwen3.5-397B-A17B",
        attention(15, 2, 256),
        gated_delta(45, 16, 64),
        drafting=attention(1, 2, 256),
        seen_in=_STATES,
    ),
    _facts(
        "nvidia/Qwen3.5-122B-A10B-NVFP4",
        attention(12, 2, 256, element_bytes=_FP8),
        gated_delta(36, 16, 64),
        seen_in=(_STATES, _QUANTIZED),
    ),
    _facts(
        "nvidia/Qwen3.5-397B-A17B-NVFP4",
        attention(15, 2, 256, element_bytes=_FP8),
        gated_delta(45, 16, 64),
        seen_in=(_STATES, _QUANTIZED),
    ),
    _facts(
        "nvidia/Qwen3.6-27B-NVFP4",
        attention(16, 4, 256, element_bytes=_FP8),
        gated_delta(48, 16, 48),
        seen_in=(_STATES, _QUANTIZED),
    ),
    # hf_quant_config.json says FP8, config.json's own quantization does not: engines read either.
    _facts(
        "nvidia/Qwen3.6-35B-A3B-NVFP4",
        attention(10, 2, 256, element_bytes=_FP8),
        gated_delta(30, 16, 32),
        kv_dtype="fp8",
        seen_in=_STATES,
    ),
    _facts(
        "XiaomiMiMo/MiMo-7B-Base",
        attention(36, 8, 128),
        drafting=attention(1, 8, 128),
        seen_in=_vllm("model_executor/models/mimo.py"),
    ),
    _facts(
        "XiaomiMiMo/MiMo-V2-Flash",
        attention(9, 4, 192, 128),
        attention(39, 8, 192, 128, window=128),
        ranks=(4, 8),
        seen_in=_vllm("model_executor/models/mimo_v2.py"),
    ),
    _facts(
        "deepseek-ai/DeepSeek-V3 deepseek-ai/DeepSeek-R1",
        latent(61, _MLA * _BF16),
        drafting=latent(1, _MLA * _BF16),
        seen_in=_DSV3,
    ),
    _facts(
        "nvidia/DeepSeek-V3.1-NVFP4",
        latent(61, _MLA * _FP8),
        drafting=latent(1, _MLA * _FP8),
        seen_in=(_DSV3, _QUANTIZED),
    ),
    _facts(
        "deepseek-ai/DeepSeek-V3.2 nvidia/DeepSeek-V3.2-NVFP4",
        latent(61, _DS_MLA + _INDEX_FP8),
        kv_dtype=DS_MLA,
        drafting=latent(1, _DS_MLA + _INDEX_FP8),
        seen_in=_DSA,
    ),
    _facts(
        "deepseek-ai/DeepSeek-V3.2",
        latent(61, _MLA * _BF16 + _INDEX_FP8),
        kv_dtype="bfloat16",
        seen_in=_DSA,
    ),
    _facts(
        "zai-org/GLM-5 zai-org/GLM-5-FP8 zai-org/GLM-5.1 zai-org/GLM-5.1-FP8 nvidia/GLM-5-NVFP4 "
        "nvidia/GLM-5.1-NVFP4",
        latent(78, _DS_MLA + _INDEX_FP8),
        kv_dtype=DS_MLA,
        drafting=latent(1, _DS_MLA + _INDEX_FP8),
        seen_in=_DSA,
    ),
    _facts(
        "zai-org/GLM-5.2 zai-org/GLM-5.2-FP8 zai-org/GLM-5.3 zai-org/GLM-5.3-FP8 "
        "nvidia/GLM-5.2-NVFP4 nvidia/GLM-5.3-NVFP4",
        latent(78, _DS_MLA),
        latent(21, _INDEX_FP8),
        kv_dtype=DS_MLA,
        drafting=latent(1, _DS_MLA + _INDEX_FP8),
        seen_in=_DSA,
    ),
    _facts(
        "deepseek-ai/DeepSeek-V4-Flash nvidia/DeepSeek-V4-Flash-NVFP4 "
        "sgl-project/DeepSeek-V4-Flash-FP8",
        Part(43, _V4_DS_MLA, window=128),
        *_compressed(21, 20, _V4_DS_MLA, _INDEX_FP8),
        kv_dtype=DS_MLA,
        drafting=Part(1, _V4_DS_MLA, window=128),
        seen_in=_DSV4,
    ),
    _facts(
        "deepseek-ai/DeepSeek-V4-Pro nvidia/DeepSeek-V4-Pro-NVFP4 sgl-project/DeepSeek-V4-Pro-FP8",
        Part(61, _V4_DS_MLA, window=128),
        *_compressed(30, 31, _V4_DS_MLA, _INDEX_FP8),
        kv_dtype=DS_MLA,
        drafting=Part(1, _V4_DS_MLA, window=128),
        seen_in=_DSV4,
    ),
    _facts(
        "moonshotai/Kimi-K2-Instruct moonshotai/Kimi-K2.5",
        latent(61, _MLA * _BF16),
        seen_in=_KIMI_K2,
    ),
    _facts(
        "nvidia/Kimi-K2.5-NVFP4 nvidia/Kimi-K2.6-NVFP4 nvidia/Kimi-K2.7-Code-NVFP4",
        latent(61, _MLA * _FP8),
        seen_in=(_KIMI_K2, _QUANTIZED),
    ),
    _facts(
        "moonshotai/Kimi-K3",
        latent(24, _MLA * _BF16),
        # One key head a value head: a convolution over three, and 128 x 128 in float32.
        gated_delta(69, 96, 96),
        seen_in=_STATES,
    ),
    _facts(
        "google/gemma-4-26B-A4B",
        attention(5, 2, 512),
        attention(25, 8, 256, window=1024),
        seen_in=_GEMMA4,
    ),
    _facts(
        "nvidia/Gemma-4-26B-A4B-NVFP4",
        attention(5, 2, 512, element_bytes=_FP8),
        attention(25, 8, 256, window=1024, element_bytes=_FP8),
        seen_in=(_GEMMA4, _QUANTIZED),
    ),
    _facts(
        "nvidia/Gemma-4-31B-IT-NVFP4",
        attention(10, 4, 512, element_bytes=_FP8),
        attention(50, 16, 256, window=1024, element_bytes=_FP8),
        seen_in=(_GEMMA4, _QUANTIZED),
    ),
    _facts(
        "openai/gpt-oss-120b",
        attention(18, 8, 64),
        attention(18, 8, 64, window=128),
        seen_in=_GPT_OSS,
    ),
    _facts(
        "openai/gpt-oss-20b",
        attention(12, 8, 64),
        attention(12, 8, 64, window=128),
        seen_in=_GPT_OSS,
    ),
    _facts(
        "meta-llama/Llama-4-Scout-17B-16E-Instruct meta-llama/Llama-4-Maverick-17B-128E-Instruct",
        attention(12, 8, 128),
        attention(36, 8, 128, window=8192),
        seen_in=_vllm("model_executor/models/llama4.py"),
    ),
    _facts("MiniMaxAI/MiniMax-M2.5 MiniMaxAI/MiniMax-M2.7", attention(62, 8, 128), seen_in=_M2),
    _facts(
        "nvidia/MiniMax-M2.5-NVFP4 nvidia/MiniMax-M2.7-NVFP4",
        attention(62, 8, 128, element_bytes=_FP8),
        seen_in=(_M2, _QUANTIZED),
    ),
    _facts(
        "MiniMaxAI/MiniMax-M3 nvidia/MiniMax-M3-NVFP4",
        attention(60, 4, 128),
        latent(57, 128 * _BF16),
        ranks=(4,),
        seen_in=_M3,
    ),
    _facts(
        "stepfun-ai/Step-3.7-Flash stepfun-ai/Step-3.7-Flash-FP8",
        attention(12, 8, 128),
        attention(33, 8, 128, window=512),
        seen_in=_vllm("model_executor/models/step3p5.py"),
    ),
    _facts(
        "nvidia/Llama-3_3-Nemotron-Super-49B-v1",
        attention(49, 8, 128),
        seen_in=_vllm("model_executor/models/nemotron_nas.py"),
    ),
    _facts(
        "nvidia/Nemotron-H-56B-Base-8K",
        attention(10, 8, 128),
        mamba2(54, 256, 64, 256, 8),
        ranks=(8, 16),
        seen_in=_STATES,
    ),
    _facts(
        "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16",
        attention(6, 2, 128),
        mamba2(23, 64, 64, 128, 8),
        ranks=(4, 16),
        seen_in=_STATES,
    ),
    _facts(
        "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-NVFP4 "
        "nvidia/NVIDIA-Nemotron-3.5-Lightning-30B-A3B-NVFP4",
        attention(6, 2, 128, element_bytes=_FP8),
        mamba2(23, 64, 64, 128, 8),
        seen_in=(_STATES, _QUANTIZED),
    ),
    _facts(
        "nvidia/NVIDIA-Nemotron-3-Super-120B-A12B-FP8 "
        "nvidia/NVIDIA-Nemotron-3-Super-120B-A12B-NVFP4",
        attention(8, 2, 128, element_bytes=_FP8),
        mamba2(40, 128, 64, 128, 8),
        ranks=(8, 16),
        kv_dtype="fp8",
        drafting=attention(1, 2, 128, element_bytes=_FP8),
        seen_in=_STATES,
    ),
    _facts(
        "nvidia/NVIDIA-Nemotron-3-Ultra-550B-A55B-BF16",
        attention(12, 2, 128),
        mamba2(48, 256, 64, 128, 8),
        ranks=(8, 16),
        drafting=attention(1, 2, 128),
        seen_in=_STATES,
    ),
    _facts(
        "nvidia/NVIDIA-Nemotron-3-Ultra-550B-A55B-FP8 "
        "nvidia/NVIDIA-Nemotron-3-Ultra-550B-A55B-NVFP4",
        attention(12, 2, 128, element_bytes=_FP8),
        mamba2(48, 256, 64, 128, 8),
        kv_dtype="fp8",
        seen_in=_STATES,
    ),
)
"""A row for each model that the package carries; one that is missing here fails the test."""

REFUSED = {"nvidia/Qwen3.6-35B-A3B-NVFP4": "kv_cache_quant_algo"}
"""Models that are refused with `--kv-dtype auto`, and the field that the message names."""
