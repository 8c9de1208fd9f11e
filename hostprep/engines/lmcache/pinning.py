"""What LMCache loads by its entry-point group `lmcache.device_plugins`: regions pinned by us.

LMCache's server pins a file of its L1 by one call to CUDA. In a region that is done chunk by chunk
instead, in turns with the node's other engines: for CUDA, the class by which LMCache pins memory is
replaced by ours (names: 0.5.6). Its copies split at each 64 MiB from the file's start, since its
own pinning is by pieces of that size where it grows: so chunks end there, and nowhere else.

Without `HOSTPREP_LMCACHE=1` in the environment, which `hostprep exec --engine lmcache` sets,
nothing is replaced. Imports LMCache, and is imported by no other module of ours.
"""

from __future__ import annotations

import ctypes
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from lmcache.logging import init_logger
from lmcache.v1.platform.base.device_spec import DeviceSpec
from lmcache.v1.platform.devices.cuda import CudaDeviceSpec
from lmcache.v1.platform.devices.cuda.pin_memory import CudaPinMemoryBackend

from hostprep.client.handoff import Region, read_handoff
from hostprep.cuda.registration import Registration, register
from hostprep.engines.host_memory import ProgressLog
from hostprep.engines.lmcache.settings import PINNING
from hostprep.errors import BadInputError, FailedError, HostprepError, NotReadyError
from hostprep.paths import PoolPaths

if TYPE_CHECKING:
    from hostprep.client.attach import Attachment

_log = init_logger("lmcache.hostprep")


class HostprepDevice(DeviceSpec):  # type: ignore[misc]
    """No device: LMCache makes one of each plugin's as it starts, and so calls us."""

    def __init__(self) -> None:
        if os.environ.get(PINNING, "0") not in ("", "0"):
            CudaDeviceSpec.pin_memory_backend = property(lambda _: RegionPinning)

    @property
    def device_type(self) -> str:
        """A name that no machine's device has."""
        return "hostprep"

    def is_available(self) -> bool:
        """Keep LMCache from choosing it."""
        return False


class RegionPinning(CudaPinMemoryBackend):  # type: ignore[misc]
    """Pins regions chunk by chunk, and other memory as LMCache does."""

    def __init__(self) -> None:
        super().__init__()
        self._registrations: dict[int, Registration] = {}

    def pin_memory(self, ptr: int, size: int, flags: int = 0) -> bool:
        """Pin memory; LMCache copies from pageable memory where that is False."""
        try:
            region = region_at(ptr, size)
            if region is None:
                return bool(super().pin_memory(ptr, size, flags))
            self._registrations[ptr] = _register(region, ptr)
        except HostprepError as error:
            _forget_frames(error)
            if isinstance(error, (BadInputError, NotReadyError)):
                _log.warning("%s. LMCache registers this memory itself, by one call", error)
                return bool(super().pin_memory(ptr, size, flags))
            _log.warning("%s. LMCache copies from there at the speed of pageable memory", error)
            return False
        return True

    def unpin_memory(self, ptr: int) -> bool:
        """Take it back, while it is mapped."""
        registration = self._registrations.pop(ptr, None)
        if registration is None:
            return bool(super().unpin_memory(ptr))
        try:
            registration.close()
        except HostprepError as error:
            _log.warning("Part of L1 stays registered until the process ends: %s", error)
            return False
        return True


def _forget_frames(error: BaseException | None) -> None:
    """Forget where an error was raised: frames keep their callers' variables.

    Those are LMCache's views of the memory, and it could never be unmapped.
    """
    while error is not None:
        error.__traceback__ = None
        error = error.__cause__ or error.__context__


@dataclass(frozen=True)
class MappedRegion:
    """A region that LMCache has mapped: what a registration needs of an attachment."""

    region: Region
    path: str
    address: int
    """Of the region's first byte."""
    buffer: memoryview
    lease_id: str


def region_at(address: int, size_bytes: int) -> MappedRegion | None:
    """Return the region that this memory lies in; None where it is other memory.

    Raises NotReadyError where the pool's handoff cannot be read, BadInputError for a part of a
    region that is no whole pages.
    """
    path, start, end = _file_at(address)
    folder, mem, name = (["", "", *path.rsplit("/", 2)])[-3:]
    paths = PoolPaths(*os.path.split(folder))
    if mem != "mem" or not os.path.exists(paths.handoff):
        return None
    region = read_handoff(paths).region(name)
    if region is None:
        return None
    whole_bytes = -(-size_bytes // region.page_bytes) * region.page_bytes
    if address + whole_bytes > end:
        raise BadInputError(
            f"{size_bytes} bytes of region {name} are no whole pages of {region.page_bytes} bytes",
            reason="BadSlice",
            remedy="give the server all of the region: leave --l1-size-gb out",
        )
    memory = (ctypes.c_uint8 * whole_bytes).from_address(address)
    lease_id = os.environ.get("HOSTPREP_LEASE", "")
    return MappedRegion(region, path, start, memoryview(memory).cast("B"), lease_id)


def _file_at(address: int) -> tuple[str, int, int]:
    """Return the file that is mapped there, where its first byte is, and the mapping's end."""
    with open("/proc/self/maps", encoding="utf-8", errors="surrogateescape") as lines:
        for line in lines:
            span, _, offset, _, _, *path = line.rstrip("\n").split(maxsplit=5)
            low, high = (int(number, 16) for number in span.split("-"))
            if low <= address < high:
                return (path[0] if path else ""), low - int(offset, 16), high
    return "", 0, 0


def _register(mapped: MappedRegion, address: int) -> Registration:
    """Register that memory before returning. Raises HostprepError."""
    row_bytes = _split_copies()
    _have_context()
    return register(
        cast("Attachment", mapped),
        mode="sync",
        offset_bytes=address - mapped.address,
        size_bytes=mapped.buffer.nbytes,
        row_bytes=row_bytes,
        on_progress=ProgressLog(_log, f"L1 in region {mapped.region.name}"),
    )


def _split_copies() -> int:
    """Have all of LMCache's copies split at registrations' ends; return how far these are apart.

    Its native transfers do so for any memory. Others ask whether it is the lazy allocator's,
    which from now on the one for files counts as.
    """
    from lmcache.v1.memory_allocators.devdax_memory_allocator import DevDaxMemoryAllocator
    from lmcache.v1.memory_allocators.lazy_memory_allocator import LazyMemoryAllocator

    chunk_bytes: Any = getattr(LazyMemoryAllocator, "PIN_CHUNK_SIZE", None)
    if not isinstance(chunk_bytes, int) or not hasattr(LazyMemoryAllocator, "register"):
        raise BadInputError(
            "this LMCache does not say where it splits its copies",
            reason="EngineUnknown",
            remedy="use a release that `hostprep engines` lists",
        )
    LazyMemoryAllocator.register(DevDaxMemoryAllocator)
    return chunk_bytes


def _have_context() -> None:
    """Have a CUDA context current in this thread, as cudaHostRegister makes one."""
    from lmcache.v1.platform import torch_dev

    try:
        if torch_dev.is_available():
            torch_dev.synchronize()
    except RuntimeError as error:
        raise FailedError(f"CUDA cannot be used: {error}", reason="NoContext") from error
