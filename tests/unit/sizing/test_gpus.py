"""GPUs by name, and what of their memory is left for caches."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hostprep.errors import BadInputError
from hostprep.sizing.gpus import (
    GIB,
    GPUS,
    GpuBudget,
    default_reserve_bytes,
    gpu_of_product,
    gpus_named,
)
from hostprep.sizing.weights import RankWeights

pytestmark = pytest.mark.unit


def weights(size_bytes: int) -> RankWeights:
    return RankWeights(
        total_bytes=size_bytes,
        rank_bytes=size_bytes,
        least_bytes=size_bytes,
        most_bytes=size_bytes,
        source="--weights",
    )


def budget(gpu: str, engine: str | None, *, weights_gib: int = 20, share: float = 0.9) -> int:
    found = GpuBudget(
        gpus=gpus_named(gpu),
        utilization=share,
        weights=weights(weights_gib * GIB),
        reserve_bytes=4 * GIB,
        engine=engine,
    )
    return found.caches_bytes


@pytest.mark.parametrize(
    ("text", "name", "count"),
    [
        ("h200x8", "h200", 8),
        ("H200", "h200", None),
        ("mi300x", "mi300x", None),
        ("mi300xx8", "mi300x", 8),
        (" a100-80x2 ", "a100-80", 2),
        ("rtx-pro-6000x4", "rtx-pro-6000", 4),
    ],
)
def test_a_name_says_the_gpu_and_how_many(text: str, name: str, count: int | None) -> None:
    found = gpus_named(text)
    assert (found.gpu.name, found.count) == (name, count)


def test_memory_stands_for_a_gpu_that_is_not_known() -> None:
    found = gpus_named("96Gix4")
    assert (found.gpu.memory_bytes, found.count) == (96 * GIB, 4)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("h20O", "did you mean h200; of another one give"),
        ("a100x8", "give a100-40 or a100-80"),
        ("h200x0", "is 0 GPUs"),
        ("h200x99999", "is 99999 GPUs"),
        ("1Mi", "a GPU with 1Mi"),
        ("", "there is no GPU ''"),
        ("x8", "there is no GPU"),
        ("tpu", "known are t4"),
    ],
)
def test_what_is_no_gpu_is_refused_with_those_that_are(text: str, words: str) -> None:
    with pytest.raises(BadInputError) as caught:
        gpus_named(text)
    assert words in str(caught.value)
    assert str(caught.value).startswith("--gpu: ")


@given(st.text(max_size=80))
def test_any_text_is_gpus_or_bad_input(text: str) -> None:
    try:
        found = gpus_named(text)
    except BadInputError:
        return
    assert found.gpu.memory_bytes >= GIB


def test_names_are_told_apart_and_memory_is_below_the_data_sheets() -> None:
    assert len({gpu.name for gpu in GPUS}) == len(GPUS)
    sold_gb = {"h100": 80, "h200": 141, "b200": 192, "b300": 288, "a100-80": 80, "mi300x": 206.2}
    for gpu in GPUS:
        assert gpus_named(f"{gpu.name}x8").gpu == gpu
        if gpu.name in sold_gb:
            assert 0.9 * sold_gb[gpu.name] * GIB < gpu.memory_bytes < sold_gb[gpu.name] * GIB


@pytest.mark.parametrize(
    ("product", "name"),
    [
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H100 NVL", "h100-nvl"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA GB200", "gb200"),
        ("NVIDIA GeForce RTX 4090", None),
    ],
)
def test_a_drivers_name_finds_the_gpu(product: str, name: str | None) -> None:
    found = gpu_of_product(product)
    assert (found and found.name) == name


def test_each_engine_takes_its_share_of_something_else() -> None:
    total = 100 * GIB
    assert budget("100Gi", None) == budget("100Gi", "vllm") == 90 * GIB - 24 * GIB
    assert budget("100Gi", "sglang") == int((total - 4 * GIB) * 0.9) - 20 * GIB
    assert budget("100Gi", "trtllm") == int((total - 24 * GIB) * 0.9)


@pytest.mark.parametrize("engine", [None, "sglang", "trtllm"])
def test_weights_that_leave_nothing_are_refused(engine: str | None) -> None:
    with pytest.raises(BadInputError, match="leave nothing for caches") as caught:
        budget("100Gi", engine, weights_gib=99)
    assert "more --tp" in str(caught.value.remedy)


def test_what_vllm_logged_is_what_is_left() -> None:
    # vLLM 0.6, Llama 3 8B on an H100 of 79.22 GiB: 71.29 GiB for the engine, 14.96 of weights,
    # 1.79 and 1.26 beside them, 53.29 left (vllm-project/vllm, pull request 10511).
    found = GpuBudget(
        gpus=gpus_named(str(int(79.22 * GIB))),
        utilization=0.9,
        weights=weights(int(14.96 * GIB)),
        reserve_bytes=int((1.79 + 1.26) * GIB),
    )
    assert found.caches_bytes / GIB == pytest.approx(53.29, abs=0.01)


@pytest.mark.parametrize(
    ("gpu", "ranks", "engine", "gib"),
    [
        ("h200", 1, None, 4),
        ("h200", 8, "vllm", 8),
        ("h100", 8, "trtllm", 7),
        ("l4", 8, "vllm", 2),
        ("8Gi", 1, None, 1),
        ("h200", 8, "sglang", 1),
    ],
)
def test_the_reserve_is_a_guess_that_fits_the_gpu(
    gpu: str, ranks: int, engine: str | None, gib: int
) -> None:
    assert default_reserve_bytes(gpus_named(gpu).gpu, ranks, engine) == gib * GIB
