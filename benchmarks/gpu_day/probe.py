"""One probe, in a process that may break: `python3 -m benchmarks.gpu_day.probe NAME`.

Prints its answer as JSON. What the driver refuses is an answer, by the name of its code.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import partial
from typing import Any

from benchmarks.register.capturing import capture_while
from benchmarks.register.copying import copy_rates
from benchmarks.register.cuda import Cuda, CudaError
from benchmarks.register.mappings import file_mapping
from benchmarks.register.memory import NotHereError, resident
from hostprep.backing import GIB, KIB, MIB, Backing
from hostprep.cuda.driver import load_driver
from hostprep.errors import HostprepError
from hostprep.linux.memory import address_of

Answer = dict[str, Any]
_SIZE_BYTES = 64 * MIB
_HALF_BYTES = _SIZE_BYTES // 2
_READ_ONLY = 8
_UNKNOWN_FLAG = 1 << 30

# Reads a word at one address and writes it to another: whether a kernel reaches host memory.
_READ_WORD = b"""
.version 6.3
.target sm_70
.address_size 64
.visible .entry read_word(.param .u64 from, .param .u64 to)
{
    .reg .b64 %address<3>;
    .reg .b32 %word;
    ld.param.u64 %address1, [from];
    ld.param.u64 %address2, [to];
    ld.global.u32 %word, [%address1];
    st.global.u32 [%address2], %word;
    ret;
}
\0"""


def _refusal(call: Callable[[], object]) -> str:
    """Return `ok`, or what the driver said."""
    try:
        call()
    except CudaError as error:
        return str(error)
    return "ok"


def _open() -> Cuda:
    cuda = Cuda()
    cuda.open()
    return cuda


@contextlib.contextmanager
def _base_memory(size_bytes: int = _SIZE_BYTES) -> Iterator[int]:
    """Give the address of resident base pages."""
    with resident(Backing.BASE, size_bytes) as path:
        mapping = file_mapping(path, 0, size_bytes)
        try:
            yield mapping.address
        finally:
            mapping.close()


@contextlib.contextmanager
def _two_halves(cuda: Cuda) -> Iterator[int]:
    """Give memory of which either half is a registration of its own."""
    with _base_memory() as address:
        for half in (address, address + _HALF_BYTES):
            cuda.register(half, _HALF_BYTES)
        yield address
        for half in (address, address + _HALF_BYTES):
            with contextlib.suppress(CudaError):
                cuda.unregister(half)


def straddling_copy() -> Answer:
    """Copy across the border of two registrations, and of registered and other memory."""
    cuda = _open()
    stream, on_gpu = cuda.stream(), cuda.call("cuMemAlloc", _SIZE_BYTES)
    found: Answer = {}
    with _two_halves(cuda) as address:
        border = address + _HALF_BYTES
        for name, begin in (("inside_one", address), ("across_two", border - MIB)):
            to_gpu = partial(cuda.call, "cuMemcpyHtoDAsync", on_gpu, begin, 2 * MIB, stream)
            back = partial(cuda.call, "cuMemcpyDtoHAsync", begin, on_gpu, 2 * MIB, stream)
            end = partial(cuda.call, "cuStreamSynchronize", stream)
            found[name] = _refusal(to_gpu)
            found[f"{name}_at_the_end"] = _refusal(end)
            found[f"{name}_back"] = _refusal(back)
            found[f"{name}_back_at_the_end"] = _refusal(end)
        cuda.unregister(border)
        found["into_unregistered"] = _refusal(
            lambda: cuda.call("cuMemcpyHtoDAsync", on_gpu, border - MIB, 2 * MIB, stream)
        )
        found["afterwards"] = _refusal(
            lambda: cuda.call("cuMemcpyHtoDAsync", on_gpu, address, MIB, stream)
        )
        found["synchronized"] = _refusal(lambda: cuda.call("cuStreamSynchronize", stream))
    return found


def merged_copies() -> Answer:
    """Copy blocks by cuMemcpyBatchAsync: one by one, and neighbours merged across the border."""
    cuda = _open()
    stream, on_gpu = cuda.stream(), int(cuda.call("cuMemAlloc", _SIZE_BYTES))
    attributes, pointer = cuda.api.CUmemcpyAttributes(), cuda.api.CUdeviceptr
    order = cuda.api.CUmemcpySrcAccessOrder.CU_MEMCPY_SRC_ACCESS_ORDER_STREAM
    attributes.srcAccessOrder = order

    def batch(offsets: list[int], size_bytes: int, address: int) -> None:
        to = [pointer(on_gpu + offset) for offset in offsets]
        from_ = [pointer(address + offset) for offset in offsets]
        sizes, count = [size_bytes] * len(offsets), len(offsets)
        cuda.call("cuMemcpyBatchAsync", to, from_, sizes, count, [attributes], [0], 1, stream)
        cuda.call("cuStreamSynchronize", stream)

    with _two_halves(cuda) as address:
        border = _HALF_BYTES
        return {
            "one_by_one": _refusal(lambda: batch([border - MIB, border], MIB, address)),
            "merged": _refusal(lambda: batch([border - MIB], 2 * MIB, address)),
            "afterwards": _refusal(lambda: batch([0], MIB, address)),
        }


def same_pointer() -> Answer:
    """Compare the device's address with the host's, and have a kernel read by the host's."""
    cuda = _open()
    with _base_memory() as address:
        cuda.register(address, _SIZE_BYTES)
        pointer = int(cuda.call("cuMemHostGetDevicePointer", address, 0))
        found: Answer = {
            "same": pointer == address,
            "attribute_91": cuda.attribute(
                "CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM"
            ),
            "flags": _value(lambda: int(cuda.call("cuMemHostGetFlags", address))),
            "memory_type": _value(lambda: int(_pointer_type(cuda, address))),
        }
        found["kernel_read"] = _refusal(lambda: _read_word(cuda, address))
        with contextlib.suppress(CudaError):
            cuda.unregister(address)
    return found


def _value(call: Callable[[], Any]) -> Any:
    try:
        return call()
    except CudaError as error:
        return str(error)


def _pointer_type(cuda: Cuda, address: int) -> Any:
    kind = cuda.api.CUpointer_attribute.CU_POINTER_ATTRIBUTE_MEMORY_TYPE
    return cuda.call("cuPointerGetAttribute", kind, address)


def _read_word(cuda: Cuda, address: int) -> None:
    import ctypes

    module = cuda.call("cuModuleLoadData", _READ_WORD)
    kernel = cuda.call("cuModuleGetFunction", module, b"read_word")
    stream, to = cuda.stream(), cuda.call("cuMemAlloc", 4)
    arguments = ((address, int(to)), (ctypes.c_void_p, ctypes.c_void_p))
    cuda.call("cuLaunchKernel", kernel, 1, 1, 1, 1, 1, 1, 0, stream, arguments, 0)
    cuda.call("cuStreamSynchronize", stream)


def is_pinned() -> Answer:
    """Ask torch whether registered memory is pinned."""
    try:
        import torch as module  # type: ignore[import-not-found,unused-ignore]
    except ImportError as error:
        raise NotHereError("torch is not installed") from error
    torch: Any = module
    if not torch.cuda.is_available():
        raise NotHereError("this torch sees no CUDA device")
    torch.cuda.init()
    torch.zeros(1, device="cuda")
    cuda = Cuda()
    cuda.open()
    with mmap.mmap(-1, _SIZE_BYTES) as memory:
        tensor = torch.frombuffer(memory, dtype=torch.uint8)
        found: Answer = {"before": bool(tensor.is_pinned())}
        cuda.register(address_of(memory), _HALF_BYTES)
        cuda.register(address_of(memory) + _HALF_BYTES, _HALF_BYTES)
        found["registered"] = bool(tensor.is_pinned())
        found["second_half"] = bool(tensor[_HALF_BYTES:].is_pinned())
        on_gpu = torch.empty(_HALF_BYTES, dtype=torch.uint8, device="cuda")
        torch.cuda.synchronize()
        begin_s = time.perf_counter()
        on_gpu.copy_(tensor[:_HALF_BYTES], non_blocking=True)
        found["issued_s"] = time.perf_counter() - begin_s
        torch.cuda.synchronize()
        found["copied_s"] = time.perf_counter() - begin_s
        cuda.unregister(address_of(memory) + _HALF_BYTES)
        cuda.unregister(address_of(memory))
        del tensor
    return found


def overlapping_copies() -> Answer:
    """Time how long a copy takes to be issued and to be done: short and long if it overlaps."""
    cuda = _open()
    stream, on_gpu = cuda.stream(), cuda.call("cuMemAlloc", _SIZE_BYTES)
    found: Answer = {}

    def copy(name: str, address: int) -> None:
        for _ in range(2):  # the first one does not count
            begin_s = time.perf_counter()
            cuda.call("cuMemcpyHtoDAsync", on_gpu, address, _SIZE_BYTES, stream)
            found[f"{name}_issued_s"] = time.perf_counter() - begin_s
            cuda.call("cuStreamSynchronize", stream)
            found[f"{name}_copied_s"] = time.perf_counter() - begin_s

    with _base_memory() as address:
        copy("unregistered", address)
        cuda.register(address, _SIZE_BYTES)
        copy("registered", address)
        cuda.unregister(address)
    pointer = cuda.call("cuMemHostAlloc", _SIZE_BYTES, 0)
    copy("cuda_host_alloc", int(pointer))
    return found


def part_of_a_1gib_page() -> Answer:
    """Register 64 MiB of a page of 1 GiB, and a part that begins on a border of 4 KiB only."""
    cuda = _open()
    return _parts_of_a_page(cuda, Backing.HUGETLB_1GI, GIB, 64 * MIB)


def part_of_a_2mib_page() -> Answer:
    """Register parts of pages of 2 MiB."""
    cuda = _open()
    return _parts_of_a_page(cuda, Backing.HUGETLB_2MI, 4 * MIB, MIB)


def _parts_of_a_page(cuda: Cuda, backing: Backing, size_bytes: int, part_bytes: int) -> Answer:
    with resident(backing, size_bytes) as path:
        mapping = file_mapping(path, 0, size_bytes)
        odd = mapping.address + part_bytes + 4 * KIB
        found: Answer = {
            "part": _refusal(lambda: cuda.register(mapping.address, part_bytes)),
            "at_4_kib": _refusal(lambda: cuda.register(odd, part_bytes)),
            "rest": _refusal(
                lambda: cuda.register(odd + part_bytes, size_bytes - 2 * part_bytes - 4 * KIB)
            ),
            "overlapping": _refusal(lambda: cuda.register(odd + 4 * KIB, part_bytes)),
        }
        if found["part"] == "ok":
            found["copies"] = _value(
                lambda: copy_rates(cuda, "", mapping.address, part_bytes, rounds=3)
            )
        for address in (odd + part_bytes, odd, mapping.address):
            with contextlib.suppress(CudaError):
                cuda.unregister(address)
        mapping.close()
    return found


def read_only() -> Answer:
    """Register memory that this process may only read, with the flag for it and without."""
    cuda = _open()
    attribute = "CU_DEVICE_ATTRIBUTE_READ_ONLY_HOST_REGISTER_SUPPORTED"
    with resident(Backing.BASE, _SIZE_BYTES) as path, open(path, "rb") as file:
        memory = mmap.mmap(file.fileno(), _SIZE_BYTES, mmap.MAP_SHARED, mmap.PROT_READ)
        address = address_of(memory)
        found: Answer = {"attribute_113": cuda.attribute(attribute)}
        for name, flags in (("without_flag", 0), ("with_flag", _READ_ONLY)):
            register = partial(cuda.call, "cuMemHostRegister", address, _SIZE_BYTES, flags)
            found[name] = _refusal(register)
            with contextlib.suppress(CudaError):
                cuda.unregister(address)
        memory.close()
    return found


def cold_memory() -> Answer:
    """Register memory of which no page is there yet: the driver makes it."""
    cuda = _open()
    with mmap.mmap(-1, _SIZE_BYTES) as memory:
        address = address_of(memory)
        begin_s = time.perf_counter()
        found: Answer = {"registered": _refusal(lambda: cuda.register(address, _SIZE_BYTES))}
        found["took_s"] = time.perf_counter() - begin_s
        with contextlib.suppress(CudaError):
            cuda.unregister(address)
    return found


def refusals() -> Answer:
    """Ask for what must be refused: by which codes."""
    cuda = _open()
    with mmap.mmap(-1, _SIZE_BYTES) as memory:
        address = address_of(memory)
        found: Answer = {
            "unregistered": _refusal(lambda: cuda.unregister(address)),
            "no_bytes": _refusal(lambda: cuda.register(address, 0)),
            "odd_address": _refusal(lambda: cuda.register(address + 1, MIB)),
        }
        with contextlib.suppress(CudaError):
            cuda.unregister(address + 1)
        found["unknown_flag"] = _refusal(
            lambda: cuda.call("cuMemHostRegister", address, MIB, _UNKNOWN_FLAG)
        )
    found["unmapped"] = _refusal(lambda: cuda.register(address, MIB))
    found["afterwards"] = _refusal(lambda: cuda.call("cuMemGetInfo"))
    return found


def traits_for_hostprep() -> Answer:
    """Ask Hostprep's own driver module what it makes of this device."""
    cuda = _open()
    driver = load_driver()
    traits = driver.attributes(driver.device_of(int(cuda.context)))
    return {
        **asdict(traits),
        "version": driver.version(),
        "flags": traits.registration_flags(read_only=False),
    }


def _capture(mode: str, *, relaxed: bool) -> Answer:
    cuda = _open()
    with resident(Backing.BASE, 4 * _SIZE_BYTES) as path:
        mapping = file_mapping(path, 0, 4 * _SIZE_BYTES)
        try:
            return capture_while(cuda, mapping, relaxed=relaxed, mode=mode)
        finally:
            mapping.close()


def capture_global_relaxed() -> Answer:
    """Register while another thread captures globally, as Hostprep does: in relaxed mode."""
    return _capture("GLOBAL", relaxed=True)


def capture_global_as_it_is() -> Answer:
    """Do the same without the relaxed mode: the control."""
    return _capture("GLOBAL", relaxed=False)


def capture_thread_local() -> Answer:
    """Register while another thread captures for itself."""
    return _capture("THREAD_LOCAL", relaxed=False)


PROBES: dict[str, Callable[[], Answer]] = {
    probe.__name__: probe
    for probe in (
        straddling_copy,
        merged_copies,
        same_pointer,
        is_pinned,
        overlapping_copies,
        part_of_a_1gib_page,
        part_of_a_2mib_page,
        read_only,
        cold_memory,
        refusals,
        traits_for_hostprep,
        capture_global_relaxed,
        capture_global_as_it_is,
        capture_thread_local,
    )
}


def main(name: str) -> None:
    """Print the answer, or why there is none."""
    try:
        answer = PROBES[name]()
    except NotHereError as error:
        answer = {"not_here": str(error)}
    except (CudaError, HostprepError, OSError) as error:
        answer = {"error": str(error)}
    print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
