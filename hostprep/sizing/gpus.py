"""GPUs by name, and what of their memory is left for caches."""

from __future__ import annotations

import re
from dataclasses import dataclass
from difflib import get_close_matches
from math import ceil

from hostprep.errors import BadInputError
from hostprep.sizing.weights import RankWeights
from hostprep.units import format_bytes, parse_quantity

GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class Gpu:
    """A kind of GPU."""

    name: str
    """As `--gpu` takes it."""
    product: str
    memory_bytes: int
    """Its whole memory as an engine sees it."""
    capability: int = 0
    """CUDA's compute capability, ten times; 0 where there is none, or it is not known."""


def _gpu(name: str, product: str, hundredths_gib: int, capability: int = 0) -> Gpu:
    return Gpu(name, product, hundredths_gib * GIB // 100, capability)


GPUS = (
    # The total that CUDA's or HIP's cudaMemGetInfo gives, which engines multiply by their
    # utilization: less than the data sheet's and nvidia-smi's, by what the driver and its firmware
    # keep. Read from PyTorch's messages ("GPU 0 has a total capacity of 139.80 GiB") in public
    # logs of 2024 to 2026; where drivers differ, the least that was found.
    _gpu("t4", "NVIDIA T4", 1456, 75),
    _gpu("l4", "NVIDIA L4", 2203, 89),
    _gpu("a10g", "NVIDIA A10G", 2203, 86),
    _gpu("a40", "NVIDIA A40", 4434, 86),
    _gpu("l40s", "NVIDIA L40S", 4439, 89),
    _gpu("a100-40", "NVIDIA A100 40GB", 3925, 80),
    _gpu("a100-80", "NVIDIA A100 80GB", 7914, 80),
    _gpu("h100", "NVIDIA H100 80GB", 7910, 90),
    _gpu("h100-nvl", "NVIDIA H100 NVL", 9302, 90),
    _gpu("rtx-pro-6000", "NVIDIA RTX PRO 6000 Blackwell", 9497, 120),
    _gpu("gh200-96", "NVIDIA GH200 96GB", 9450, 90),
    _gpu("h200", "NVIDIA H200", 13972, 90),
    _gpu("b200", "NVIDIA B200", 17835, 100),
    _gpu("gb200", "NVIDIA GB200", 18431, 100),
    _gpu("b300", "NVIDIA B300", 26769, 103),
    _gpu("gb300", "NVIDIA GB300", 27650, 103),
    _gpu("mi300x", "AMD Instinct MI300X", 19169),
    _gpu("mi325x", "AMD Instinct MI325X", 25569),
    _gpu("mi350x", "AMD Instinct MI350X", 28798),
    _gpu("mi355x", "AMD Instinct MI355X", 28798),
)

_BY_NAME = {gpu.name: gpu for gpu in GPUS}
_AMBIGUOUS = {
    "a100": "a100-40 or a100-80",
    "gh200": "gh200-96, or its memory, such as 140Gi",
}
_WITH_COUNT = re.compile(r"(?P<name>.{1,64}?)(?:x(?P<count>[0-9]{1,6}))?", re.ASCII)
_MOST_GPUS = 1 << 14


@dataclass(frozen=True, slots=True)
class Gpus:
    """The GPUs of a node, or of all nodes that run one engine."""

    gpu: Gpu
    count: int | None = None
    """None: as many as the ranks need."""

    def __str__(self) -> str:
        return self.gpu.product if self.count is None else f"{self.count} x {self.gpu.product}"


def gpus_named(text: str) -> Gpus:
    """Return what `h200x8`, `mi300x` or `96Gix4` names: a known GPU, or memory; and how many.

    Raises BadInputError with the names that come close.
    """
    match = _WITH_COUNT.fullmatch(text.strip().lower())
    if match is None:
        raise _unknown(text, text)
    count = None if match["count"] is None else int(match["count"])
    if count is not None and not 1 <= count <= _MOST_GPUS:
        raise BadInputError(f"--gpu: is {count} GPUs", remedy=f"give 1 to {_MOST_GPUS}")
    name = match["name"]
    if name in _AMBIGUOUS:
        raise BadInputError(
            f"--gpu: {name} was made with more than one size of memory",
            remedy=f"give {_AMBIGUOUS[name]}",
        )
    known = _BY_NAME.get(name)
    if known is None:
        known = _of_memory(text.strip()[: len(name)], text)
    return Gpus(known, count)


def _of_memory(name: str, text: str) -> Gpu:
    try:
        size_bytes = parse_quantity(name)
    except BadInputError:
        raise _unknown(name.lower(), text) from None
    if not GIB <= size_bytes <= 1 << 50:
        raise BadInputError(f"--gpu: a GPU with {name}", remedy="give its memory such as 96Gi")
    return Gpu(name, f"GPU with {format_bytes(size_bytes)}", size_bytes)


def _unknown(name: str, text: str) -> BadInputError:
    near = get_close_matches(name, _BY_NAME, n=3, cutoff=0.6)
    hint = f"did you mean {' or '.join(near)}" if near else f"known are {', '.join(_BY_NAME)}"
    shown = text if len(text) <= 40 else text[:37] + "..."
    return BadInputError(
        f"--gpu: there is no GPU {shown!r} here",
        remedy=f"{hint}; of another one give the memory and the number, such as 96Gix4",
    )


def gpu_of_product(product: str) -> Gpu | None:
    """Return the GPU that a driver names so, such as `NVIDIA H100 80GB HBM3`; None if unknown."""
    words = product.lower().replace("_", " ")
    found = [gpu for gpu in GPUS if words.startswith(gpu.product.lower())]
    return max(found, key=lambda gpu: len(gpu.product), default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuBudget:
    """What one GPU's memory goes to.

    Raises BadInputError, naming the options, where nothing is left for caches.
    """

    gpus: Gpus
    utilization: float
    """Share that the engine may use, 0 to 1; of what, the engine says."""
    weights: RankWeights
    reserve_bytes: int
    """For activations, CUDA graphs, communication and the CUDA context: an estimate."""
    engine: str | None = None

    def __post_init__(self) -> None:
        if self.caches_bytes <= 0:
            raise BadInputError(
                f"--gpu: {format_bytes(self.weights.rank_bytes)} of weights a GPU leave nothing "
                f"for caches: {self.reckoning}",
                remedy="give more --tp, or GPUs with more memory",
            )

    @property
    def caches_bytes(self) -> int:
        """Bytes that are left for caches on each GPU.

        vLLM: ceil(total x gpu_memory_utilization) - weights - what a step was seen to take
        (v1/worker/utils.py request_memory, gpu_worker.py determine_available_memory, 0.32).
        SGLang: mem_fraction_static of what is free before weights are loaded, less the weights;
        activations come from the rest (model_runner_kv_cache_mixin, 0.5).
        TensorRT-LLM: free_gpu_memory_fraction of what is free after a trial step.
        """
        total, weights = self.gpus.gpu.memory_bytes, self.weights.rank_bytes
        if self.engine == "sglang":
            return int((total - self.reserve_bytes) * self.utilization) - weights
        if self.engine == "trtllm":
            return int((total - weights - self.reserve_bytes) * self.utilization)
        return ceil(total * self.utilization) - weights - self.reserve_bytes

    @property
    def reckoning(self) -> str:
        """The terms in one line."""
        total, share = format_bytes(self.gpus.gpu.memory_bytes), f"{100 * self.utilization:g} %"
        weights, reserve = format_bytes(self.weights.rank_bytes), format_bytes(self.reserve_bytes)
        if self.engine == "sglang":
            return f"{share} of ({total} - {reserve} reserve) - {weights} weights"
        if self.engine == "trtllm":
            return f"{share} of ({total} - {weights} weights - {reserve} reserve)"
        return f"{share} of {total} - {weights} weights - {reserve} reserve"


def default_reserve_bytes(gpu: Gpu, ranks: int, engine: str | None = None) -> int:
    """Return what is kept for all that is neither weights nor caches where no option says.

    4 GiB for one rank, 8 GiB for each of several, a tenth of a small GPU at most: rounded guesses,
    for an engine measures it at its start. vLLM on H100: 3.1 GiB for Llama 3 8B alone, 4.8 GiB for
    each of two ranks (pull request 10511); 8.0 GiB for each of four with Qwen3-235B-A22B in FP8
    (issue 21348: 0.9 x 79.1 GiB less the weights and the 8.11 GiB that it logged for caches).
    SGLang takes activations and graphs from what its mem_fraction_static leaves: there it is the
    CUDA context alone, 1 GiB.
    """
    most = 4 if ranks == 1 else 8
    tenth = gpu.memory_bytes // GIB // 10
    return GIB * (1 if engine == "sglang" else max(1, min(most, tenth)))
