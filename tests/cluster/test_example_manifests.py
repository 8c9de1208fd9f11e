"""The examples as the API server sees them: valid, and restricted in all but the host path."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from testbed.binaries import find
from testbed.control_plane import ControlPlane
from testbed.engine_pods import EXAMPLES, HOST_PATH_MANIFESTS, NAMESPACE

pytestmark = pytest.mark.cluster

_ENGINES = [path for path in HOST_PATH_MANIFESTS if path.name != "karpenter.yaml"]
_LEVEL = "pod-security.kubernetes.io/"


@pytest.fixture(scope="module")
def engines(control_plane: ControlPlane, crds: list[str]) -> ControlPlane:
    """With the examples' namespace, which also warns of what `restricted` would refuse."""
    control_plane.kubectl("apply", "-f", str(EXAMPLES / "namespace.yaml"))
    control_plane.kubectl("label", "namespace", NAMESPACE, f"{_LEVEL}warn=restricted")
    control_plane.kubectl("-n", NAMESPACE, "create", "serviceaccount", "default")
    return control_plane


def test_the_pool_is_accepted_as_it_stands(engines: ControlPlane) -> None:
    engines.kubectl("apply", "--dry-run=server", "-f", str(EXAMPLES / "pool.yaml"))


@pytest.mark.parametrize("path", _ENGINES, ids=lambda path: path.stem)
def test_a_host_path_is_all_that_is_not_restricted(engines: ControlPlane, path: Path) -> None:
    done = _apply(engines, path)
    assert done.returncode == 0, done.stderr
    if path.name == "engine-scripts.yaml":
        return
    assert "restricted volume types" in done.stderr
    assert "hostPath" in done.stderr
    words = ("allowPrivilegeEscalation", "capabilities", "runAsNonRoot", "seccompProfile")
    assert not [word for word in words if word in done.stderr], done.stderr


def test_a_namespace_that_enforces_restricted_refuses_them(engines: ControlPlane) -> None:
    engines.kubectl("label", "namespace", NAMESPACE, "--overwrite", f"{_LEVEL}enforce=restricted")
    try:
        done = _apply(engines, EXAMPLES / "engine-exec.yaml")
    finally:
        engines.kubectl(
            "label", "namespace", NAMESPACE, "--overwrite", f"{_LEVEL}enforce=privileged"
        )
    assert done.returncode != 0
    assert "violates PodSecurity" in done.stderr


def _apply(cluster: ControlPlane, path: Path) -> subprocess.CompletedProcess[str]:
    """Kubectl's answer, warnings included."""
    command = [str(find("kubectl")), "--kubeconfig", str(cluster.kubeconfig)]
    command += ["apply", "--dry-run=server", "-f", str(path)]
    return subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=60,
        env={"HOME": str(cluster.folder)},
    )  # fmt: skip
