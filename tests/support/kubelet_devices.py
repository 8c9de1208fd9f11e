"""The device half of a kubelet, beside a test: registry, streams and calls, over the true protocol.

As pkg/kubelet/cm/devicemanager does it: the folder is emptied at the start, Register dials back
before it answers, a stream that ends makes the devices unhealthy.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Self

import grpc

from hostprep.deviceplugin import v1beta1_pb2 as api


class _Endpoint:
    """A plugin that registered."""

    def __init__(self, request: api.RegisterRequest, folder: Path) -> None:
        self.request = request
        self.channel = grpc.insecure_channel(f"unix:{folder}/{request.endpoint}")
        self.devices: dict[str, api.Device] = {}
        self.updates = 0
        self.connected = True
        grpc.channel_ready_future(self.channel).result(timeout=10)
        listing = self.channel.unary_stream(
            "/v1beta1.DevicePlugin/ListAndWatch",
            request_serializer=api.Empty.SerializeToString,
            response_deserializer=api.ListAndWatchResponse.FromString,
        )
        self._stream = listing(api.Empty())
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        with contextlib.suppress(grpc.RpcError):
            for response in self._stream:
                self.devices = {device.ID: device for device in response.devices}
                self.updates += 1
        self.connected = False

    def call(self, name: str, request: Any, answer: Any) -> Any:
        method = self.channel.unary_unary(
            f"/v1beta1.DevicePlugin/{name}",
            request_serializer=type(request).SerializeToString,
            response_deserializer=answer.FromString,
        )
        return method(request, timeout=10)

    def close(self) -> None:
        self._stream.cancel()
        self.channel.close()


class KubeletDevices:
    """Listens on `device-plugins/kubelet.sock` below a folder."""

    def __init__(self, root_dir: Path, *, refuse: str = "") -> None:
        """`refuse` is what every registration is answered with."""
        self.folder = root_dir / "device-plugins"
        self.refuse = refuse
        self.registrations = 0
        self._endpoints: dict[str, _Endpoint] = {}
        self._server: grpc.Server | None = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> None:
        """Start as kubelet does: with an empty folder."""
        self.folder.mkdir(parents=True, exist_ok=True)
        for left in self.folder.iterdir():
            left.unlink()
        server = grpc.server(ThreadPoolExecutor(max_workers=4))
        handler = grpc.unary_unary_rpc_method_handler(
            self._register, api.RegisterRequest.FromString, api.Empty.SerializeToString
        )
        methods = {"Register": handler}
        server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler("v1beta1.Registration", methods),)
        )
        server.add_insecure_port(f"unix:{self.folder}/kubelet.sock")
        server.start()
        self._server = server

    def stop(self) -> None:
        """End; plugins see their streams close, and the socket go."""
        for endpoint in self._endpoints.values():
            endpoint.close()
        self._endpoints.clear()
        if self._server is not None:
            self._server.stop(grace=None).wait()
            self._server = None
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.folder / "kubelet.sock")

    def restart(self) -> None:
        """End and start again, as an upgrade of kubelet does."""
        self.stop()
        self.start()

    def drop(self, resource: str) -> None:
        """Let go of a plugin without a word."""
        self._endpoints.pop(resource).close()

    def _register(self, request: api.RegisterRequest, context: grpc.ServicerContext) -> api.Empty:
        self.registrations += 1
        if self.refuse:
            context.abort(grpc.StatusCode.UNKNOWN, self.refuse)
        assert request.version == "v1beta1"
        assert "/" not in request.endpoint
        self._endpoints[request.resource_name] = _Endpoint(request, self.folder)
        return api.Empty()

    # --- what is known of a resource

    def _endpoint(self, resource: str) -> _Endpoint:
        return self._endpoints[resource]

    def is_connected(self, resource: str) -> bool:
        return resource in self._endpoints and self._endpoints[resource].connected

    def options(self, resource: str) -> api.DevicePluginOptions:
        return self._endpoint(resource).request.options

    def health(self, resource: str) -> dict[str, str]:
        """Return each device's health; unhealthy all, where the stream has ended."""
        if resource not in self._endpoints:
            return {}
        endpoint = self._endpoint(resource)
        return {
            name: device.health if endpoint.connected else "Unhealthy"
            for name, device in endpoint.devices.items()
        }

    def numa_nodes(self, resource: str) -> dict[str, list[int]]:
        devices = self._endpoint(resource).devices
        return {name: [n.ID for n in device.topology.nodes] for name, device in devices.items()}

    def updates(self, resource: str) -> int:
        return self._endpoint(resource).updates

    # --- what it asks for

    def ask_options(self, resource: str) -> api.DevicePluginOptions:
        answer = self._endpoint(resource).call(
            "GetDevicePluginOptions", api.Empty(), api.DevicePluginOptions
        )
        assert isinstance(answer, api.DevicePluginOptions)
        return answer

    def allocate(self, resource: str, *devices: str) -> api.ContainerAllocateResponse:
        """Return what one container gets. Raises grpc.RpcError with the plugin's reason."""
        container = api.ContainerAllocateRequest(devices_ids=devices)
        request = api.AllocateRequest(container_requests=[container])
        answer = self._endpoint(resource).call("Allocate", request, api.AllocateResponse)
        (response,) = answer.container_responses
        assert isinstance(response, api.ContainerAllocateResponse)
        return response

    def prefer(
        self, resource: str, available: Sequence[str], must: Sequence[str] = (), *, count: int
    ) -> list[str]:
        container = api.ContainerPreferredAllocationRequest(
            available_deviceIDs=available, must_include_deviceIDs=must, allocation_size=count
        )
        request = api.PreferredAllocationRequest(container_requests=[container])
        answer = self._endpoint(resource).call(
            "GetPreferredAllocation", request, api.PreferredAllocationResponse
        )
        (response,) = answer.container_responses
        return list(response.deviceIDs)
