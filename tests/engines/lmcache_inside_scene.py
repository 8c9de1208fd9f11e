"""LMCache inside of vLLM's worker, over a lease: the program that `hostprep exec` becomes.

Run as vLLM's interpreter runs a script, with nothing of this repository on its path. Real: vLLM's
configuration, connector factory and connector, LMCache's manager, engine and CPU backend. LMCache
has no GPU connector for CPUs: in its place stands its own mock, here with bytes of each block.
Prints what it saw as one JSON document.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

TOKENS = 600
CHUNK = 256
CHUNK_BYTES = CHUNK * 4096
ODD_BYTES = 600_000
LAYERS = ("l0", "l1", "l2", "l3")


def config_of(words: list[str]) -> Any:
    """Return a VllmConfig of the command line that exec completed."""
    from vllm.config import KVTransferConfig
    from vllm.engine.arg_utils import EngineArgs

    given = json.loads(words[words.index("--kv-transfer-config") + 1])
    config = EngineArgs(
        model=words[0],
        skip_tokenizer_init=True,
        load_format="dummy",
        max_model_len=1024,
        enforce_eager=True,
        kv_transfer_config=KVTransferConfig(**given),
    ).create_engine_config()
    config.cache_config.kv_cache_layout = "LBNHC"  # the engine core's part
    return config


def copies() -> Any:
    """Return LMCache's mock of a GPU: what it stores follows from the tokens' place."""
    from lmcache.v1.gpu_connector.mock_gpu_connector import MockGPUConnector

    class Copies(MockGPUConnector):  # type: ignore[misc]
        def __init__(self, kv_shape: tuple[int, ...]) -> None:
            super().__init__(kv_shape)
            self.loaded: list[tuple[int, int, bool]] = []

        def batched_from_gpu(self, memory_objs: Any, starts: Any, ends: Any, **kwargs: Any) -> None:
            for each, start, end in zip(memory_objs, starts, ends, strict=True):
                each.tensor.copy_(value(start, end, each.tensor.shape))

        def batched_to_gpu(self, memory_objs: Any, starts: Any, ends: Any, **kwargs: Any) -> None:
            for each, start, end in zip(memory_objs, starts, ends, strict=True):
                same = torch.equal(each.tensor, value(start, end, each.tensor.shape))
                self.loaded.append((int(start), int(end), same))

    return Copies


def value(start: int, end: int, shape: Any) -> torch.Tensor:
    """Return what a chunk holds: no zeros, and no other chunk's."""
    made = torch.Generator().manual_seed(start * 1000 + end)
    return (torch.rand(shape, generator=made) + 1).to(torch.bfloat16)


def connector_of(config: Any) -> Any:
    """Have vLLM's factory make it, in a process group of one."""
    import lmcache.v1.gpu_connector as gpu
    from vllm.config import set_current_vllm_config
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
    from vllm.distributed.parallel_state import (
        init_distributed_environment,
        initialize_model_parallel,
    )

    mock = copies()
    gpu.CreateGPUConnector = lambda config, metadata, engine, layout_hints=None: mock(
        metadata.kv_shape
    )
    with set_current_vllm_config(config):
        if not torch.distributed.is_initialized():
            init_distributed_environment(1, 0, "tcp://127.0.0.1:29771", 0, "gloo")
            initialize_model_parallel()
        return KVConnectorFactory.create_connector(
            config, KVConnectorRole.WORKER, SimpleNamespace(kv_cache_groups=[])
        )


def calls() -> list[str]:
    """Return the driver's calls so far that register or unregister."""
    lines = Path(os.environ["STANDIN_LOG"]).read_text().splitlines()
    return [line for line in lines if "register(" in line]


def watch(seen: dict[str, Any]) -> None:
    """Note the driver's calls where LMCache is given a buffer, before it sees it."""
    from lmcache.v1 import memory_management

    given = memory_management._allocate_cpu_memory

    def allocate(*sizes: Any, **how: Any) -> Any:
        buffer = given(*sizes, **how)
        seen["as_given"] = calls()
        return buffer

    memory_management._allocate_cpu_memory = allocate


def place(address: int, size_bytes: int) -> dict[str, Any]:
    """Return which file some memory lies in, wholly, and where."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        columns = line.split()
        low, high = (int(number, 16) for number in columns[0].split("-"))
        if low <= address and address + size_bytes <= high and len(columns) > 5:
            return {"path": columns[5], "begin": address - low + int(columns[2], 16)}
    return {"path": "", "begin": 0}


def refusal(config: Any) -> str:
    """Return how a second connector is refused."""
    try:
        connector_of(config)
    except Exception as error:
        return f"{type(error).__name__} {getattr(error, 'reason', '')}: {error}"
    return ""


def have_another_buffer() -> None:
    """Have LMCache allocate once more, where nothing is left; without CUDA it may fail to."""
    from lmcache.v1 import memory_management

    with contextlib.suppress(Exception):
        memory_management._allocate_cpu_memory(4096)


def have_a_context() -> None:
    """Have the stand-in driver's context current, as torch does when CUDA is first used."""
    import importlib

    driver: Any = importlib.import_module("cuda.bindings.driver")
    assert int(driver.cuInit(0)[0]) == 0
    code, context = driver.cuDevicePrimaryCtxRetain(0)
    assert int(code) == 0
    assert int(driver.cuCtxSetCurrent(context)[0]) == 0


def objects_of(allocator: Any, size_bytes: int) -> list[tuple[int, int]]:
    """Fill what is free with objects of that size, free them again; return where they began."""
    shapes, dtypes = [torch.Size([size_bytes])], [torch.uint8]
    made = []
    while (more := allocator.batched_allocate(shapes, dtypes, 3)) is not None:
        made += more
    while (one := allocator.allocate(shapes, dtypes)) is not None:
        made.append(one)
    places = [each.data_ptr - allocator.buffer.data_ptr() for each in made]
    allocator.batched_free(made)
    assert allocator.memcheck()
    return sorted((place, place + size_bytes) for place in places)


def main(words: list[str]) -> None:
    """Play it: a connector, a prompt stored and loaded, and the end."""
    config = config_of(words)
    seen: dict[str, Any] = {"connector": config.kv_transfer_config.kv_connector}
    have_a_context()
    os.environ["LMCACHE_MAX_LOCAL_CPU_SIZE"] = "1"
    seen["too_large"] = refusal(config)
    del os.environ["LMCACHE_MAX_LOCAL_CPU_SIZE"]

    connector = connector_of(config)
    seen["before"] = calls()
    watch(seen)
    connector.register_kv_caches(dict.fromkeys(LAYERS, torch.zeros(1)))
    seen["registered"] = calls()
    engine = connector._lmcache_engine.lmcache_engine
    seen["healthy"] = engine.is_healthy()
    allocator = engine.storage_manager.local_cpu_backend.memory_allocator
    buffer = allocator.buffer
    seen["size"] = buffer.numel()
    seen["start"] = buffer.data_ptr()
    seen |= place(buffer.data_ptr(), buffer.numel())
    seen["odd"] = objects_of(allocator, ODD_BYTES)
    seen["odd_again"] = objects_of(allocator, ODD_BYTES)
    seen["whole"] = objects_of(allocator, CHUNK_BYTES)
    seen["huge"] = objects_of(allocator, 100 << 20)
    seen["beside"] = refusal(config)
    have_another_buffer()

    tokens = list(range(TOKENS))
    engine.store(tokens=tokens, req_id="1")
    mask = engine.retrieve(tokens, req_id="2")
    seen["loaded"] = engine.gpu_connector.loaded
    seen["tokens"] = int(mask.sum())
    data = Path(seen["path"]).read_bytes()
    first = value(0, CHUNK, engine.metadata.get_shapes(CHUNK)[0])
    seen["offset"] = data.find(bytes(first.view(torch.uint8).view(-1)[:4096].tolist()))
    seen["non_zero"] = sum(any(data[at : at + 4096]) for at in range(0, len(data), 4096)) * 4096
    seen["own_shm"] = [path.name for path in Path("/dev/shm").glob("*lmcache*")]

    connector.shutdown()
    seen["taken_back"] = calls()[len(seen["registered"]) :]
    print(json.dumps(seen), flush=True)
    os.kill(os.getpid(), signal.SIGKILL)  # LMCache's threads and its mapping are still there


if __name__ == "__main__":
    main(sys.argv[2:])
