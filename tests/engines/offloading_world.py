"""What the plugin's scenes are made of: a lease, a platform, configurations, refusals.

The root of the pool `kv` is the program's first argument.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

from vllm.v1.kv_offload.config import (
    OffloadingCacheConfig,
    OffloadingConfig,
    OffloadingGroupConfig,
    OffloadingModelConfig,
    OffloadingParallelConfig,
)
from vllm.v1.kv_offload.cpu import spec as vllm_spec

import hostprep
from hostprep.client.environment import LeaseEnvironment
from hostprep.cuda.board import RankBoard
from hostprep.engines import vllm as plugins
from hostprep.errors import HostprepError
from tests.engines.offloading_copies import PAGES

ROOT = sys.argv[1]
OURS: Any = importlib.import_module("hostprep.engines.vllm.offloading")
CHUNK = sum(PAGES)
HANG_S = 60.0
SAID: list[tuple[str, str]] = []
"""What we logged in this scene: level and words."""


class Listener(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        SAID.append((record.levelname, record.getMessage()))


class Platform:
    """What the plugin and vLLM's spec ask of the platform."""

    device_name = "an accelerator"

    def __init__(self, kind: str) -> None:
        self.is_cuda = self.is_cuda_alike = lambda: kind == "cuda"
        self.is_cpu = lambda: kind == "cpu"
        self.is_rocm = self.is_xpu = lambda: False


@contextlib.contextmanager
def platform(kind: str) -> Iterator[None]:
    before = OURS.current_platform, vllm_spec.current_platform
    OURS.current_platform = vllm_spec.current_platform = Platform(kind)
    try:
        yield
    finally:
        OURS.current_platform, vllm_spec.current_platform = before


@contextlib.contextmanager
def leased() -> Iterator[Any]:
    with hostprep.attach("kv", root=ROOT) as memory:
        lease = LeaseEnvironment.of([memory._lease])
        os.environ.update(lease.to_variables())
        try:
            yield memory
        finally:
            for name in lease.to_variables():
                del os.environ[name]


def config_of(rank: int = 0, world: int = 2, *, mla: bool = False, **extra: Any) -> Any:
    return OffloadingConfig(
        groups=(OffloadingGroupConfig(32, ("layer",), 0),),
        worker_kv_bytes_per_block=CHUNK,
        enable_kv_cache_events=False,
        extra_config=extra,
        engine_id="engine",
        model=OffloadingModelConfig("tiny", "bfloat16"),
        cache=OffloadingCacheConfig(tokens_per_hash=32, blocks_per_chunk=1),
        parallel=OffloadingParallelConfig(
            rank=rank,
            world_size=world,
            tp_size=world,
            pp_size=1,
            pcp_size=1,
            dcp_size=1,
            data_parallel_index=0,
            data_parallel_size=1,
            data_parallel_rank_local=None,
            is_parallelism_agnostic=False,
        ),
        replicated_layout=mla,
    )


def spec_of(*arguments: Any, **named: Any) -> Any:
    return plugins.HostprepOffloadingSpec(config_of(*arguments, **named))


def wait_for(condition: Callable[[], bool], why: str) -> None:
    deadline_s = time.monotonic() + HANG_S
    while not condition():
        assert time.monotonic() < deadline_s, why
        time.sleep(0.01)


def refusal(call: Callable[[], object], *words: str) -> None:
    try:
        call()
    except HostprepError as error:
        missing = [word for word in words if word not in str(error)]
        if missing:
            raise AssertionError(f"{missing} not in: {error}") from error
        return
    raise AssertionError("it was not refused")


def board_state(memory: Any) -> list[str]:
    view = RankBoard.look(f"{ROOT}/kv/state/{memory.region.name}/board")
    return [rank.slot.state for rank in view.ranks]
