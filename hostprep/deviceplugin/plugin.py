"""One pool's device plugin: a gRPC server on a socket of its own, and its registration.

Kubelet calls the plugin on the socket that Register names (k8s.io/kubelet, deviceplugin/v1beta1).
It dials that while it handles Register, so the server must be up before.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import AsyncIterator, Iterable, Sequence
from typing import Any

import grpc
import grpc.aio

from hostprep.client.handoff import Region
from hostprep.deviceplugin import v1beta1_pb2 as api
from hostprep.deviceplugin.devices import (
    Device,
    preferred,
    resource_name,
    socket_identity,
    socket_name,
)
from hostprep.deviceplugin.views import make_view, view_name
from hostprep.errors import HostprepError, NotReadyError
from hostprep.paths import TURNSTILE, PoolPaths
from hostprep.zipapp import STABLE_NAME

_VERSION = "v1beta1"
_PATIENCE_S = 2.0
_PAUSE_S = 0.05
_REGISTER_TIMEOUT_S = 15.0
"""Kubelet dials back for up to 10 s before it answers (plugin/v1beta1/client.go, dial)."""

Context = grpc.aio.ServicerContext[Any, Any]


class PoolPlugin:
    """Serves one pool's regions to kubelet. Use from one event loop."""

    def __init__(self, folder: str, paths: PoolPaths) -> None:
        """`folder` is kubelet's for device plugins. Raises BadInputError."""
        self._folder = folder
        self._paths = paths
        self._name = socket_name(folder, paths.pool)
        self._devices: dict[str, Device] = {}
        self._changed = asyncio.Event()
        self._server: grpc.aio.Server | None = None
        self._socket: tuple[int, ...] | None = None
        self.watchers = 0
        """Streams of ListAndWatch that kubelet holds open."""

    def show(self, devices: Iterable[Device]) -> None:
        """Send kubelet these devices, if they are not what it has."""
        wanted = {device.name: device for device in devices}
        if wanted != self._devices:
            self._devices = wanted
            self._changed.set()
            self._changed = asyncio.Event()

    @property
    def is_serving(self) -> bool:
        """Whether the socket exists, and is still the one that `serve` made."""
        return self._socket is not None and self._socket == socket_identity(self._path)

    @property
    def _path(self) -> str:
        return f"{self._folder}/{self._name}"

    async def serve(self) -> None:
        """Listen, again if need be. Raises OSError where that cannot be."""
        await self.stop()
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._path)
        server = grpc.aio.server()
        server.add_generic_rpc_handlers((self._handlers(),))
        try:
            server.add_insecure_port(f"unix:{self._path}")
        except RuntimeError as error:  # grpc's only error for a socket that cannot be made
            raise OSError(None, f"cannot listen on {self._path}: {error}") from error
        await server.start()
        os.chmod(self._path, 0o600)
        self._server, self._socket = server, socket_identity(self._path)

    async def stop(self) -> None:
        """Stop listening; kubelet then lets the devices go. Running containers keep theirs."""
        server, self._server = self._server, None
        if server is None:
            return
        ours = self.is_serving
        self._socket = None
        self._changed.set()
        await server.stop(grace=None)
        if ours:
            with contextlib.suppress(OSError):  # `serve` removes what stays
                os.unlink(self._path)

    async def register(self, kubelet_socket: str) -> None:
        """Register the socket with kubelet. Raises grpc.RpcError; its details have the reason."""
        async with grpc.aio.insecure_channel(f"unix:{kubelet_socket}") as channel:
            call = channel.unary_unary(
                f"/{_VERSION}.Registration/Register",
                request_serializer=api.RegisterRequest.SerializeToString,
                response_deserializer=api.Empty.FromString,
            )
            request = api.RegisterRequest(
                version=_VERSION,
                endpoint=self._name,
                resource_name=resource_name(self._paths.pool),
                options=_OPTIONS,
            )
            await call(request, timeout=_REGISTER_TIMEOUT_S)

    # --- called by kubelet

    def _handlers(self) -> grpc.GenericRpcHandler:
        def unary(method: Any, request: Any, response: Any) -> Any:
            return grpc.unary_unary_rpc_method_handler(
                method, request.FromString, response.SerializeToString
            )

        methods = {
            "GetDevicePluginOptions": unary(self._options, api.Empty, api.DevicePluginOptions),
            "ListAndWatch": grpc.unary_stream_rpc_method_handler(
                self._list_and_watch,
                api.Empty.FromString,
                api.ListAndWatchResponse.SerializeToString,
            ),
            "GetPreferredAllocation": unary(
                self._prefer, api.PreferredAllocationRequest, api.PreferredAllocationResponse
            ),
            "Allocate": unary(self._allocate, api.AllocateRequest, api.AllocateResponse),
        }
        return grpc.method_handlers_generic_handler(f"{_VERSION}.DevicePlugin", methods)

    async def _options(self, _request: api.Empty, _context: Context) -> api.DevicePluginOptions:
        return _OPTIONS

    async def _list_and_watch(
        self, _request: api.Empty, _context: Context
    ) -> AsyncIterator[api.ListAndWatchResponse]:
        self.watchers += 1
        try:
            while self._server is not None:
                changed = self._changed
                yield api.ListAndWatchResponse(
                    devices=[_message(device) for device in self._devices.values()]
                )
                await changed.wait()
        finally:
            self.watchers -= 1

    async def _prefer(
        self, request: api.PreferredAllocationRequest, _context: Context
    ) -> api.PreferredAllocationResponse:
        return api.PreferredAllocationResponse(
            container_responses=[
                api.ContainerPreferredAllocationResponse(
                    deviceIDs=preferred(
                        self._devices,
                        one.available_deviceIDs,
                        must_include=one.must_include_deviceIDs,
                        count=one.allocation_size,
                    )
                )
                for one in request.container_requests
            ]
        )

    async def _allocate(
        self, request: api.AllocateRequest, context: Context
    ) -> api.AllocateResponse:
        """Answer for each container. An error fails the pod's admission with that message."""
        answer = api.AllocateResponse()
        for one in request.container_requests:
            try:
                regions = await self._view(sorted(set(one.devices_ids)))
            except HostprepError as error:
                await context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(error))
            turns = os.path.isdir(f"{self._paths.root}/{TURNSTILE}")  # noqa: ASYNC240 - in memory
            answer.container_responses.append(allocation_of(self._paths, regions, turns=turns))
        return answer

    async def _view(self, names: Sequence[str]) -> tuple[Region, ...]:
        """Make the view of these regions, with patience while the handoff is published again.

        Where one region is rebuilt the handoff is gone for a moment, for the others too; kubelet
        fails a pod for good at the first error. Its other pods wait meanwhile, so not for long.
        """
        deadline_s = time.monotonic() + _PATIENCE_S
        while True:
            try:
                return make_view(self._paths, names)
            except NotReadyError:
                if time.monotonic() > deadline_s or not self._devices.keys() >= set(names):
                    raise
            await asyncio.sleep(_PAUSE_S)


_OPTIONS = api.DevicePluginOptions(get_preferred_allocation_available=True)


def _message(device: Device) -> api.Device:
    nodes = [] if device.numa_node is None else [api.NUMANode(ID=device.numa_node)]
    topology = api.TopologyInfo(nodes=nodes) if nodes else None
    return api.Device(ID=device.name, health=device.health, topology=topology)


def allocation_of(
    paths: PoolPaths, regions: Sequence[Region], *, turns: bool = False
) -> api.ContainerAllocateResponse:
    """Return what a container gets for these regions.

    Everything of the pool that the container sees is these mounts. They must suffice for claiming
    as docs/handoff.md has it, on the very files that the agent and other claimers lock:

        <root>/<pool>               the view: handoff with these regions alone, claim.lock (a link)
        <root>/<pool>/tickets       the pool's: the agent sees which claims wait
        <root>/<pool>/links         the view's
        <root>/<pool>/state/REGION  the pool's: marks and sidecar are replaced by renaming
        <root>/<pool>/mem/REGION    the file itself
        <root>/hostprep.pyz         exec, wait and attach; not a version of it, whose file may be
                                    gone when kubelet restarts the container and mounts it again
        <root>/turnstile            the node's, if any: engines of all pools take turns registering

    `turns`: the root has a turnstile; a mount of what does not exist would fail the pod. Paths are
    the same inside as outside. The view is read-only, whatever user the container runs as: the
    folders for writing are mounts of their own. Shallow paths come first.
    """
    view = f"{paths.devices}/{view_name([region.name for region in regions])}"
    binary, turnstile = f"{paths.root}/{STABLE_NAME}", f"{paths.root}/{TURNSTILE}"
    return api.ContainerAllocateResponse(
        mounts=[
            _mount(paths.folder, view, read_only=True),
            _mount(binary, read_only=True),
            *([_mount(turnstile)] if turns else []),
            _mount(paths.links, f"{view}/links"),
            _mount(paths.tickets),
            *(_mount(paths.state_of(region.name)) for region in regions),
            *(_mount(paths.region_of(region.path)) for region in regions),
        ],
        envs={
            "HOSTPREP_ROOT": paths.root,
            "HOSTPREP_POOL": paths.pool,
            "HOSTPREP_REGION": ":".join(region.name for region in regions),
        },
    )


def _mount(path: str, host_path: str = "", *, read_only: bool = False) -> api.Mount:
    return api.Mount(container_path=path, host_path=host_path or path, read_only=read_only)
