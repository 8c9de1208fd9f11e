"""LMCache's own L1 over leased regions: the program that `hostprep exec --engine lmcache` becomes.

Run as LMCache's interpreter runs a script, with nothing of this repository on its path: the plugin
is found in the zipapp, by LMCache itself. Real: its device plugins, its allocator for files, its
copies and their native code. Without a GPU LMCache asks the class for CPUs to pin memory: it is
given the one for CUDA. Prints what it saw as one JSON document.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch

OBJECT_BYTES = 20 << 20


def have_a_context() -> None:
    """Have the stand-in driver's context current, as torch does when CUDA is first used."""
    driver: Any = importlib.import_module("cuda.bindings.driver")
    assert int(driver.cuInit(0)[0]) == 0
    code, context = driver.cuDevicePrimaryCtxRetain(0)
    assert int(code) == 0
    assert int(driver.cuCtxSetCurrent(context)[0]) == 0


def pin_as_for_cuda() -> str:
    """Have memory pinned by the class that LMCache has for CUDA; return its name."""
    from lmcache.v1.platform import current_device_spec
    from lmcache.v1.platform.devices.cuda import CudaDeviceSpec

    backend = CudaDeviceSpec().pin_memory_backend
    own = type(backend.__name__, (backend,), {"is_pin_supported": True})  # no libcudart here
    type(current_device_spec).pin_memory_backend = property(lambda _: own)
    return f"{backend.__module__}.{backend.__name__}"


def calls() -> list[list[str]]:
    """Return the driver's calls so far: which, and its numbers."""
    lines = Path(os.environ["STANDIN_LOG"]).read_text().splitlines()
    found = [line.split(" ", 2)[2] for line in lines if "register(" in line]
    return [call.replace(")=", "(").replace(",", "(").split("(") for call in found]


def copied_both_ways(allocator: Any) -> list[bool]:
    """Fill the arena with objects by LMCache's own copies, and read them back the same way."""
    from lmcache import cuda_ops
    from lmcache.v1.gpu_connector import gpu_ops

    gpu_ops.device_ops = cuda_ops
    objects = []
    while True:
        made = allocator.allocate([torch.Size([OBJECT_BYTES])], [torch.uint8])
        if made is None:
            break
        objects.append(made)
    same = []
    for number, each in enumerate(objects):
        on_device = torch.full((OBJECT_BYTES,), number + 1, dtype=torch.uint8)
        gpu_ops.lmcache_memcpy_async_d2h(on_device, each)
        back = torch.zeros(OBJECT_BYTES, dtype=torch.uint8)
        gpu_ops.lmcache_memcpy_async_h2d(each, back)
        same.append(torch.equal(on_device, back))
        copy_directly(on_device, each, to_device=False)
        copy_directly(back.zero_(), each, to_device=True)
        same.append(torch.equal(on_device, back))
    allocator.batched_free(objects)
    return same


def copy_directly(block: Any, memory_obj: Any, *, to_device: bool) -> None:
    """Copy an object that is one block of one layer, as run_direct_transfer does."""
    from lmcache import lmcache_native
    from lmcache.v1.memory_allocators.lazy_memory_allocator import LazyMemoryAllocator
    from lmcache.v1.platform.devices.cuda import CudaDeviceSpec

    ops = CudaDeviceSpec().get_ops()
    shape = lmcache_native.PageBufferShapeDesc()
    shape.kv_size = shape.nl = shape.nb = shape.nh = shape.element_size = 1
    shape.hs, shape.bs, shape.block_stride_elems = 1024, OBJECT_BYTES // 1024, 0
    layout = lmcache_native.EngineKVFormat.NL_X_NB_BS_HS
    directions = lmcache_native.TransferDirection
    ops.execute_direct_copy_transfer(
        directions.H2D if to_device else directions.D2H,
        torch.device("cuda:0"),
        LazyMemoryAllocator.PIN_CHUNK_SIZE,
        [ops.DirectCopyGroupSpec([block.data_ptr()], shape, layout, shape.bs, 0, [0])],
        [
            ops.DirectCopyObject(
                memory_obj.data_ptr, memory_obj.meta.address, memory_obj.get_size(), 0, [0]
            )
        ],
    )


def main(words: list[str]) -> None:
    """Play it: an arena, copies, a second arena that comes and goes, and the end."""
    seen: dict[str, Any] = {"backend": pin_as_for_cuda()}
    have_a_context()
    from lmcache.v1.memory_allocators.devdax_memory_allocator import DevDaxMemoryAllocator

    path = words[words.index("--l1-devdax-path") + 1]
    size_bytes = int(float(words[words.index("--l1-size-gb") + 1]) * (1 << 30))
    print(json.dumps("begins"), flush=True)
    allocator = DevDaxMemoryAllocator(size_bytes, path)
    seen["registered"] = calls()
    seen["start"] = allocator.devdax_buffer.data_ptr()
    seen["size"] = size_bytes
    seen["same"] = copied_both_ways(allocator)

    second = os.environ["HOSTPREP_PATHS"].split(":")[1]
    before = len(calls())
    allocator.add_device(second, os.stat(second).st_size)
    seen["added"] = calls()[before:]
    before = len(calls())
    seen["removed"] = allocator.remove_device(second).state.value
    seen["taken_back"] = calls()[before:]

    os.environ["STANDIN_FAIL"] = "register:any:2"
    allocator.add_device(second, os.stat(second).st_size)
    del os.environ["STANDIN_FAIL"]
    seen["pageable"] = allocator.remove_device(second).state.value

    before = len(calls())
    ordinary = Path("ordinary")
    ordinary.write_bytes(bytes(1 << 20))
    allocator.add_device(str(ordinary), 1 << 20)
    driver = sys.modules["cuda.bindings.driver"]
    sys.modules["cuda.bindings.driver"] = None  # type: ignore[assignment]
    allocator.add_device(second, os.stat(second).st_size)
    sys.modules["cuda.bindings.driver"] = driver
    seen["not_by_us"] = calls()[before:]
    allocator.remove_device(second)
    allocator.remove_device(str(ordinary))

    before = len(calls())
    allocator.close()
    seen["closed"] = calls()[before:]
    print(json.dumps(seen), flush=True)
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main(sys.argv[1:])
