"""Host memory made by the driver (cuMemCreate, HOST_NUMA) and mapped by a second process.

The other way to a pool that outlives engines: pages are the driver's, and whoever holds a
descriptor keeps them. Research: memory, section 2.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from typing import Any

from benchmarks.register.cuda import Cuda, CudaError

_BATCH = 200
"""Descriptors in one message; the kernel's limit is 253 (SCM_MAX_FD)."""


class Handles:
    """Handles of one process, and where they are mapped."""

    def __init__(self, cuda: Cuda, piece_bytes: int) -> None:
        self._cuda = cuda
        self._piece_bytes = piece_bytes
        self._handles: list[Any] = []
        self._fds: list[int] = []
        self._at = 0
        self._mapped_bytes = 0

    @property
    def address(self) -> int:
        """Where they are mapped in this process; 0 where they are not."""
        return self._at

    def create(self, size_bytes: int, node: int) -> dict[str, object]:
        """Create and export so much in pieces; returns the seconds of either."""
        cuda, kinds = self._cuda, self._cuda.api.CUmemAllocationHandleType
        kind = kinds.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
        asked = cuda.api.CUmemAllocationProp()
        asked.type = cuda.api.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        asked.location.type = cuda.api.CUmemLocationType.CU_MEM_LOCATION_TYPE_HOST_NUMA
        asked.location.id = node
        asked.requestedHandleTypes = kind
        begin_s = time.monotonic()
        calls = []
        for _ in range(size_bytes // self._piece_bytes):
            call_s = time.monotonic()
            self._handles.append(cuda.call("cuMemCreate", self._piece_bytes, asked, 0))
            calls.append(time.monotonic() - call_s)
        created_s = time.monotonic()
        for handle in self._handles:
            self._fds.append(int(cuda.call("cuMemExportToShareableHandle", handle, kind, 0)))
        return {
            "begin_s": begin_s,
            "end_s": created_s,
            "create_s": created_s - begin_s,
            "export_s": time.monotonic() - created_s,
            "longest_call_s": max(calls, default=0.0),
        }

    def serve(self, path: str) -> None:
        """Send all descriptors to the one process that connects; returns at once."""
        server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        server.bind(path)
        server.listen(1)

        def send() -> None:
            with server, server.accept()[0] as peer:
                for first in range(0, len(self._fds), _BATCH):
                    socket.send_fds(peer, [b"+"], self._fds[first : first + _BATCH])
                    peer.recv(1)  # one message at a time: a stream may join them

        threading.Thread(target=send, daemon=True).start()

    def take(self, path: str, size_bytes: int, node: int) -> dict[str, object]:
        """Import what another process sends, and map it for the GPU and for the CPU."""
        begin_s = time.monotonic()
        count = size_bytes // self._piece_bytes
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as peer:
            peer.connect(path)
            while len(self._fds) < count:
                _, fds, _, _ = socket.recv_fds(peer, 1, _BATCH)
                if not fds:
                    raise CudaError(f"only {len(self._fds)} of {count} descriptors came")
                self._fds.extend(fds)
                peer.send(b"-")
        received_s = time.monotonic()
        kinds = self._cuda.api.CUmemAllocationHandleType
        kind = kinds.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
        for fd in self._fds:
            self._handles.append(self._cuda.call("cuMemImportFromShareableHandle", fd, kind))
        imported_s = time.monotonic()
        self._map(size_bytes)
        mapped_s = time.monotonic()
        api = self._cuda.api.CUmemLocationType
        self._allow(api.CU_MEM_LOCATION_TYPE_DEVICE, int(self._cuda.device))
        gpu_s = time.monotonic()
        self._allow(api.CU_MEM_LOCATION_TYPE_HOST_NUMA, node)
        end_s = time.monotonic()
        return {
            "begin_s": begin_s,
            "end_s": end_s,
            "took_s": end_s - begin_s,
            "receive_s": received_s - begin_s,
            "import_s": imported_s - received_s,
            "map_s": mapped_s - imported_s,
            "gpu_access_s": gpu_s - mapped_s,
            "cpu_access_s": end_s - gpu_s,
        }

    def close(self) -> None:
        """Unmap, release, close: in reverse."""
        if self._at:
            self._cuda.call("cuMemUnmap", self._at, self._mapped_bytes)
            self._cuda.call("cuMemAddressFree", self._at, self._mapped_bytes)
            self._at = 0
        while self._handles:
            self._cuda.call("cuMemRelease", self._handles.pop())
        while self._fds:
            os.close(self._fds.pop())

    def _map(self, size_bytes: int) -> None:
        self._at = int(self._cuda.call("cuMemAddressReserve", size_bytes, 0, 0, 0))
        self._mapped_bytes = size_bytes
        for index, handle in enumerate(self._handles):
            where = self._at + index * self._piece_bytes
            self._cuda.call("cuMemMap", where, self._piece_bytes, 0, handle, 0)

    def _allow(self, kind: Any, number: int) -> None:
        flags = self._cuda.api.CUmemAccess_flags
        wish = self._cuda.api.CUmemAccessDesc()
        wish.location.type = kind
        wish.location.id = number
        wish.flags = flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        self._cuda.call("cuMemSetAccess", self._at, self._mapped_bytes, [wish], 1)
