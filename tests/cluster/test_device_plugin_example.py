"""The device plugin's example, in a namespace that the API server lets enforce `restricted`."""

from __future__ import annotations

import json

import pytest

from testbed.control_plane import ControlPlane
from testbed.engine_pods import EXAMPLES, documents

pytestmark = pytest.mark.cluster


def test_pods_of_the_example_are_admitted_where_restricted_is_enforced(
    control_plane: ControlPlane, crds: list[str]
) -> None:
    namespace, _, deployment = documents("engine-device-plugin.yaml")
    name = namespace["metadata"]["name"]
    kubectl = control_plane.kubectl
    kubectl("apply", "-f", "-", stdin=json.dumps(namespace))
    try:
        kubectl("-n", name, "create", "serviceaccount", "default")
        kubectl("apply", "--dry-run=server", "-f", str(EXAMPLES / "engine-device-plugin.yaml"))
        pod = deployment["spec"]["template"]
        pod |= {"apiVersion": "v1", "kind": "Pod"}
        pod["metadata"] |= {"name": "engine", "namespace": name}
        # A Deployment is only warned of what its pods lack: those are what is refused.
        kubectl("apply", "--dry-run=server", "-f", "-", stdin=json.dumps(pod))
    finally:
        kubectl("delete", "namespace", name, "--wait=false")
