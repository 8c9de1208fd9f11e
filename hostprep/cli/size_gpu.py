"""What GPUs have for caches: `--gpu`, `--weights` and what is on this node."""

from __future__ import annotations

import json
import subprocess

from hostprep.cli.size_model import ModelFiles, find_tensors
from hostprep.errors import BadInputError
from hostprep.node.observe.gpus import CudaFacts, query_cuda
from hostprep.sizing.gpus import Gpu, Gpus, gpu_of_product, gpus_named
from hostprep.sizing.groups import Limits
from hostprep.sizing.model import Model
from hostprep.sizing.parameters import reckon
from hostprep.sizing.weights import Division, RankWeights, check_total, divide, divide_total
from hostprep.units import format_bytes

NODE = "node"
_QUERY = (
    "nvidia-smi",
    "--query-gpu=name,memory.total,memory.reserved",
    "--format=csv,noheader,nounits",
)
_QUERY_TIMEOUT_S = 30
_MIB = 1 << 20


def find_gpus(text: str) -> Gpus:
    """Return the GPUs that --gpu names; `node` asks this node's driver.

    Raises BadInputError where there is none, or they differ.
    """
    if text.strip().lower() != NODE:
        return gpus_named(text)
    cuda = query_cuda()
    found = [(device.name, device.total_bytes) for device in cuda.devices] or _by_nvidia_smi(cuda)
    least = min(size_bytes for _, size_bytes in found)
    names = {name for name, _ in found}
    if len(names) > 1:
        raise BadInputError(
            f"--gpu: this node's GPUs differ: {', '.join(sorted(names))}",
            remedy="name those that the engine gets, such as h200x4",
        )
    name = names.pop()
    known = gpu_of_product(name)
    return Gpus(Gpu(NODE, name, least, known.capability if known else 0), len(found))


def _by_nvidia_smi(cuda: CudaFacts) -> list[tuple[str, int]]:
    """Return each GPU's name and the memory that programs get of it."""
    try:
        told = subprocess.run(
            _QUERY, capture_output=True, text=True, timeout=_QUERY_TIMEOUT_S, check=True
        ).stdout
    except (OSError, subprocess.SubprocessError):
        told = ""
    found = []
    for line in told.splitlines():
        name, *numbers = (part.strip() for part in line.split(","))
        if len(numbers) == 2 and all(number.isdigit() for number in numbers):
            total, reserved = map(int, numbers)
            found.append((name, (total - reserved) * _MIB))
    if not found:
        why = cuda.problem or "CUDA shows no device"
        raise BadInputError(
            f"--gpu: this node shows no NVIDIA GPU: {why}",
            remedy="name the GPUs that the engine will run on, such as h200x8",
        )
    return found


def check_ranks(gpus: Gpus, limits: Limits) -> None:
    """Raise BadInputError where there are fewer GPUs than ranks."""
    ranks = limits.tensor_parallel * limits.pipeline_parallel
    if gpus.count is not None and ranks > gpus.count:
        raise BadInputError(
            f"--gpu: {gpus.count} GPUs are fewer than the {ranks} of --tp "
            f"{limits.tensor_parallel} x --pp {limits.pipeline_parallel}",
            remedy=f"give --tp {gpus.count} at most, or more GPUs",
        )


def check_memory(gpus: Gpus, caches_bytes: int | None) -> None:
    """Raise BadInputError where caches are to have more than a whole GPU."""
    whole = gpus.gpu.memory_bytes
    if caches_bytes is not None and caches_bytes > whole:
        raise BadInputError(
            f"--gpu-memory: {format_bytes(caches_bytes)} are more than the "
            f"{format_bytes(whole)} of {gpus.gpu.product}",
            remedy="give what is left for caches on each GPU, or leave it out: it is computed then",
        )


def find_weights(
    files: ModelFiles, model: Model, limits: Limits, *, given: int | None
) -> RankWeights:
    """Return the weights of the fullest rank: as given, from the files, or reckoned.

    Raises BadInputError, asking for --weights, where none of that is possible.
    """
    by = Division(
        layers=len(model.layers),
        kv_heads=max((part.heads for store in model.stores for part in store.parts), default=1),
        tensor_parallel=limits.tensor_parallel,
        pipeline_parallel=limits.pipeline_parallel,
        drafts=limits.speculative_tokens > 0,
    )
    total, source = given, "--weights"
    if given is None and files.folder is not None:
        found, total, source = find_tensors(files.folder)
        if found is not None:
            return divide(found, by, source=source)
    try:
        if by.drafts and model.draft_layers:
            raise BadInputError(
                f"{files.source}: the size of the weights of the layers that draft is not known",
                reason="UnknownWeights",
                remedy="give the model's folder with its safetensors files, or --weights "
                "with their bytes",
            )
        modelopt = None if files.quantization is None else json.loads(files.quantization)
        tensors = reckon(json.loads(files.config), source=files.source, modelopt=modelopt)
        reckoned = divide(tensors, by, source="config.json")
    except BadInputError:
        if total is None:
            raise
        return divide_total(total, by, source=source)
    if total is None:
        return reckoned
    if given is None:
        check_total(total, reckoned, source=f"{files.folder}/{source}")
    return divide_total(total, by, source=source, alike=reckoned)


def weights_line(weights: RankWeights) -> str:
    """Say what a rank's weights are, and how sure that is."""
    size = format_bytes(weights.rank_bytes)
    if weights.total_bytes == weights.rank_bytes:
        return f"weights {size} ({weights.source})"
    text = f"weights {size} of {format_bytes(weights.total_bytes)} ({weights.source})"
    if weights.least_bytes == weights.rank_bytes == weights.most_bytes:
        return f"{text}, as if all of it were divided evenly: some is kept by every rank"
    least, most = format_bytes(weights.least_bytes), format_bytes(weights.most_bytes)
    if least == most:
        return text
    return f"{text}, an estimate: {least} if divided evenly, at most {most}"
