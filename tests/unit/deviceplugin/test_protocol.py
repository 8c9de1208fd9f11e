"""The messages are kubelet's: numbers, types and names, and made from the text beside them."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from hostprep.deviceplugin import v1beta1_pb2 as api
from tests.support.processes import python

pytestmark = pytest.mark.unit

# k8s.io/kubelet@v0.36.3, pkg/apis/deviceplugin/v1beta1/api.proto
KUBELETS = {
    "DevicePluginOptions": {"pre_start_required": 1, "get_preferred_allocation_available": 2},
    "RegisterRequest": {"version": 1, "endpoint": 2, "resource_name": 3, "options": 4},
    "ListAndWatchResponse": {"devices": 1},
    "TopologyInfo": {"nodes": 1},
    "NUMANode": {"ID": 1},
    "Device": {"ID": 1, "health": 2, "topology": 3},
    "PreStartContainerRequest": {"devices_ids": 1},
    "PreStartContainerResponse": {},
    "PreferredAllocationRequest": {"container_requests": 1},
    "ContainerPreferredAllocationRequest": {
        "available_deviceIDs": 1,
        "must_include_deviceIDs": 2,
        "allocation_size": 3,
    },
    "PreferredAllocationResponse": {"container_responses": 1},
    "ContainerPreferredAllocationResponse": {"deviceIDs": 1},
    "AllocateRequest": {"container_requests": 1},
    "ContainerAllocateRequest": {"devices_ids": 1},
    "AllocateResponse": {"container_responses": 1},
    "ContainerAllocateResponse": {"envs": 1, "mounts": 2},
    "Mount": {"container_path": 1, "host_path": 2, "read_only": 3},
    "Empty": {},
}


def test_numbers_are_kubelets() -> None:
    messages = api.DESCRIPTOR.message_types_by_name
    assert {
        name: {field.name: field.number for field in message.fields}
        for name, message in messages.items()
    } == KUBELETS


def test_a_registration_is_the_bytes_that_kubelet_reads() -> None:
    """Written out by hand: field 1 to 4, each of wire type 2."""
    request = api.RegisterRequest(
        version="v1beta1",
        endpoint="a.sock",
        resource_name="hostprep.dev/kv",
        options=api.DevicePluginOptions(get_preferred_allocation_available=True),
    )
    assert request.SerializeToString() == (
        b"\x0a\x07v1beta1" + b"\x12\x06a.sock" + b"\x1a\x0fhostprep.dev/kv" + b"\x22\x02\x10\x01"
    )


@pytest.mark.parametrize("ending", [".py", ".pyi"])
def test_the_generated_code_is_the_texts(tmp_path: Path, ending: str) -> None:
    source = Path(api.__file__).parents[2]
    proto = "hostprep/deviceplugin/v1beta1.proto"
    made = f"--{'python' if ending == '.py' else 'pyi'}_out={tmp_path}"
    done = python("-m", "grpc_tools.protoc", f"-I{source}", made, f"{source}/{proto}")
    assert done.returncode == 0, done.stderr
    name = f"hostprep/deviceplugin/v1beta1_pb2{ending}"
    assert (source / name).read_text() == (tmp_path / name).read_text(), (
        f"make it anew as {proto} says"
    )


def test_the_engine_half_and_the_command_line_need_no_grpc() -> None:
    done = python("-c", "import sys, hostprep.cli.main, hostprep.agent.loop; print(*sys.modules)")
    assert done.returncode == 0, done.stderr
    assert "grpc" not in done.stdout.split()
    assert "google.protobuf" not in done.stdout.split()
    assert sys.modules["hostprep.deviceplugin.v1beta1_pb2"] is not None
