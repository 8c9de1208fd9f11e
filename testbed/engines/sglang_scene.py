"""SGLang's own host pools over a lease: the program that `hostprep exec` becomes.

Run as SGLang's interpreter runs a script, with nothing of this repository on its path: the plugin
is found in the zipapp, by SGLang's own loader. Prints what it saw as one JSON document.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

LAYERS, HEADS, WIDTH, PAGE, DEVICE_TOKENS = 4, 4, 64, 16, 256
TOKEN_BYTES = 2 * LAYERS * HEADS * WIDTH * 2
_ATTACH_S = 2.0
"""About as long as a rank takes to have its first pool filled."""
constructors_s: list[float] = []
"""How long each took, without what the scene itself makes."""


def have_a_context() -> None:
    """Have the stand-in driver's context current, as torch does when CUDA is first used."""
    driver: Any = importlib.import_module("cuda.bindings.driver")
    assert int(driver.cuInit(0)[0]) == 0
    code, context = driver.cuDevicePrimaryCtxRetain(0)
    assert int(code) == 0
    assert int(driver.cuCtxSetCurrent(context)[0]) == 0


def host_pool(mib: int, layout: str = "layer_first", *, pinned: bool = True) -> Any:
    """Make SGLang's host pool of that size; its device's half is a few random tensors."""
    from sglang.srt.mem_cache.device_pool_info import KVBufferLayout, KVBuffers, MHABufferInfo
    from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost

    def buffers() -> tuple[torch.Tensor, ...]:
        shape = DEVICE_TOKENS, HEADS, WIDTH
        return tuple(torch.randn(shape).to(torch.bfloat16) for _ in range(LAYERS))

    def addresses(tensors: tuple[torch.Tensor, ...]) -> torch.Tensor:
        return torch.tensor([each.data_ptr() for each in tensors], dtype=torch.uint64)

    k, v = buffers(), buffers()
    info = MHABufferInfo(
        buffers=KVBuffers(
            layout=KVBufferLayout.NHD,
            k=k,
            v=v,
            k_data_ptrs=addresses(k),
            v_data_ptrs=addresses(v),
        ),
        page_size=PAGE,
        head_num=HEADS,
        head_dim=WIDTH,
        v_head_dim=WIDTH,
        dtype=torch.bfloat16,
        device=torch.device("cpu"),
    )
    before_s = time.perf_counter()
    pool = MHATokenToKVPoolHost(
        info,
        0.0,
        0,
        PAGE,
        layout,
        pin_memory=pinned,
        device="cpu",
        device_capacity_tokens=DEVICE_TOKENS,
        start_layer=0,
        end_layer=LAYERS - 1,
        host_token_capacity=(mib << 20) // TOKEN_BYTES // PAGE * PAGE,
    )
    constructors_s.append(time.perf_counter() - before_s)
    return pool


def place(tensor: torch.Tensor) -> dict[str, Any]:
    """Return which file a tensor lies in, wholly, and where."""
    begin = tensor.data_ptr()
    end = begin + tensor.numel() * tensor.element_size()
    for line in Path("/proc/self/maps").read_text().splitlines():
        columns = line.split()
        low, high = (int(number, 16) for number in columns[0].split("-"))
        if low <= begin and end <= high and len(columns) > 5:
            offset = begin - low + int(columns[2], 16)
            return {"path": columns[5], "begin": offset, "end": offset + end - begin}
    return {"path": "", "begin": 0, "end": 0}


def refusal(make: Callable[[], object]) -> str:
    """Return how it is refused."""
    try:
        make()
    except Exception as error:
        return f"{type(error).__name__} {getattr(error, 'reason', '')}: {error}"
    return ""


def calls() -> list[str]:
    """Return the driver's calls so far that register or unregister."""
    lines = Path(os.environ["STANDIN_LOG"]).read_text().splitlines()
    return [line for line in lines if "register(" in line]


def main() -> None:
    """Play it: two pools, one too large, the first one's end, and one in its place."""
    from sglang.srt.plugins import load_plugins

    seen: dict[str, Any] = {"ours": [path for path in sys.path if "hostprep" in path]}
    load_plugins()
    have_a_context()
    from sglang.srt.mem_cache.pool_host import base, common

    # As on a node whose memory is prepared: SGLang's own preflight finds nothing left.
    base.HICACHE_HOST_MEMORY_RESERVE_BYTES = 1 << 50
    seen["own_budget"] = base.host_memory_budget_bytes.__wrapped__(1)

    first = host_pool(20)
    seen["first"] = place(first.kv_buffer)
    first.kv_buffer.view(torch.uint8).view(-1)[:6] = torch.tensor(list(b"SGLang"))
    seen["registered"] = calls()
    second = host_pool(12, "page_first")
    seen["second"] = place(second.kv_buffer)
    second.kv_buffer.fill_(1)
    seen["ranges"] = getattr(first.kv_buffer, common._CUDA_HOST_REGISTERED_RANGES_ATTR)
    path = Path(seen["first"]["path"])
    seen["bytes"] = path.read_bytes()[seen["first"]["begin"] :][:6].decode()
    seen["budget"] = base.host_memory_budget_bytes(auto_size=True)
    seen["too_large"] = refusal(lambda: host_pool(64))
    seen["beside"] = refusal(_join_again)
    seen["loaded"] = bytes(second.get_data_page(0).view(torch.uint8).view(-1)[:4]).hex()

    # SGLang unregisters on CUDA only; it has no other way to know that this is not the CPU.
    base._is_cuda = True
    before = len(calls())
    second.destroy()
    first.destroy()
    seen["taken_back"] = calls()[before:]
    seen["mapped_meanwhile"] = seen["first"]["path"] in Path("/proc/self/maps").read_text()
    del first, second
    gc.collect()
    third = host_pool(40)
    seen["third"] = place(third.kv_buffer)
    seen["empty"] = place(torch.empty(0))["path"]
    seen["place"] = place_as_sglang_says()
    print(json.dumps(seen), flush=True)


def ended_while_they_attach(root: str) -> None:
    """Print what engines leave that end anywhere between the claim and a filled pool.

    They are forked, with a lease of their own each: SGLang's imports are most of a start.
    """
    from sglang.srt.plugins import load_plugins

    import hostprep

    load_plugins()
    ends = (signal.SIGKILL, signal.SIGTERM, signal.SIGKILL, signal.SIGKILL, signal.SIGKILL)
    seen = []
    for index, number in enumerate(ends):
        child = os.fork()
        if child == 0:
            _attach_and_fill(root)
        time.sleep(_ATTACH_S * (index + random.random()) / len(ends))
        os.kill(child, number)
        ended = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        with hostprep.attach("kv", root=root, wait_timeout_s=60) as memory:
            whole = torch.frombuffer(memory.buffer, dtype=torch.uint8)
            blocks = os.stat(memory.path).st_blocks
            seen.append([ended, memory.size_bytes, blocks * 512, bool(whole.any())])
            whole.fill_(7)
            del whole
    print(json.dumps(seen), flush=True)


def _attach_and_fill(root: str) -> None:
    """Claim as `hostprep exec` does, have SGLang make a pool there, and wait for the end."""
    import hostprep
    from hostprep.client.environment import LeaseEnvironment

    memory = hostprep.attach("kv", root=root)
    lease = LeaseEnvironment.of([memory._lease])
    os.environ.update(lease.to_variables())
    have_a_context()
    host_pool(20).kv_buffer.fill_(3)
    signal.pause()


def place_as_sglang_says() -> list[Any]:
    """Return a rank's place, before SGLang has published any, and as its launcher states it."""
    from sglang.srt.runtime_context import get_parallel

    from hostprep.engines.sglang.plugin import local_rank_of

    parallel = get_parallel()
    before = local_rank_of(parallel)
    said = {"launch_world_size": 16, "launch_world_rank": 11, "nnodes": 2, "dp_size": 1}
    with parallel.override(**said, dp_rank=None):
        after = local_rank_of(parallel)
    return [before.index, before.count, after.index, after.count]


def chunks(mib: int) -> None:
    """Print how large pools are registered, layer by layer and page by page, and taken back."""
    global LAYERS, TOKEN_BYTES  # noqa: PLW0603 - the model has them as constants
    from sglang.srt.plugins import load_plugins

    LAYERS = 7  # so that neither pages nor layers are a power of two of bytes
    TOKEN_BYTES = 2 * LAYERS * HEADS * WIDTH * 2
    load_plugins()
    have_a_context()
    from sglang.srt.mem_cache.pool_host import base

    base._is_cuda = True  # else it does not unregister
    seen = {}
    for layout in ("page_first", "layer_first"):
        before = len(calls())
        pool = host_pool(mib, layout)
        made = len(calls())
        start, size_bytes = pool.kv_buffer.data_ptr(), pool.kv_buffer.nbytes
        pool.destroy()
        seen[layout] = {
            "start": start,
            "size": size_bytes,
            "registered": calls()[before:made],
            "taken_back": calls()[made:],
        }
        del pool
        gc.collect()
    print(json.dumps(seen), flush=True)


def times(mib: int) -> None:
    """Print how long a pool of that size takes to be made, twice: cold, or within a lease.

    Joining the lease, which a process does once, has a number of its own: our imports included.
    """
    from sglang.srt.plugins import load_plugins

    def timed() -> float:
        gc.collect()
        host_pool(mib, pinned=False)
        return constructors_s[-1]

    host_pool(1, pinned=False)  # imports
    seconds: dict[str, Any] = {}
    if "HOSTPREP_LEASE" in os.environ:
        load_plugins()
        plugin: Any = importlib.import_module("hostprep.engines.sglang.plugin")
        before_s = time.perf_counter()
        plugin.host_memory()
        seconds["joining"] = time.perf_counter() - before_s
    print(json.dumps(seconds | {"pools": [timed(), timed()]}), flush=True)


def _join_again() -> None:
    from hostprep.engines.sglang import plugin

    plugin._join()


if __name__ == "__main__":
    if "SCENE_MIB" in os.environ:
        times(int(os.environ["SCENE_MIB"]))
    elif "SCENE_CHUNKS" in os.environ:
        chunks(int(os.environ["SCENE_CHUNKS"]))
    elif "SCENE_CRASHES" in os.environ:
        ended_while_they_attach(os.environ["SCENE_CRASHES"])
    else:
        main()
        os.kill(os.getpid(), signal.SIGKILL)  # the region is left as it is
