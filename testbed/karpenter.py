"""The real Karpenter with its provider of fake nodes (kwok), as a process beside a cluster.

A pending pod makes it create a Node object within seconds. Nothing runs on such a node: whoever
uses it plays the kubelet, and the agents.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

from hostprep.errors import FailedError
from testbed.binaries import find
from testbed.cache import Say, builder_lock, cache_folder, install
from testbed.control_plane import ControlPlane
from testbed.go_programs import find_go
from testbed.processes import Child
from testbed.versions import KARPENTER_VERSION

NODE_CLASS = {"group": "karpenter.kwok.sh", "kind": "KWOKNodeClass", "name": "default"}
"""What a NodePool's `nodeClassRef` must be here; `install_crds` makes the object."""

_MODULE = Path(__file__).parent / "modules" / f"karpenter-{KARPENTER_VERSION}"
_CRD_FOLDERS = ("pkg/apis/crds", "kwok/apis/crds")
_GATES = ("StaticCapacity", "SpotToSpotConsolidation", "NodeRepair", "CapacityBuffer")


def crd_files(say: Say = print) -> list[Path]:
    """Karpenter's custom resources and its fake provider's, out of the pinned Go module.

    Kept in the cache. Raises FailedError when the module cannot be had.
    """
    name = f"karpenter-{KARPENTER_VERSION}-crds"
    cache = cache_folder()
    if not (cache / name).exists():
        with builder_lock(cache, say):
            if not (cache / name).exists():
                with install(cache, name) as folder:
                    _copy_crds(folder, say)
    return sorted((cache / name).glob("*.yaml"))


def _copy_crds(folder: Path, say: Say) -> None:
    go = find_go(cache=cache_folder(), say=say)
    # In the module's folder, so that go.sum vouches for what is fetched.
    done = subprocess.run(
        [str(go), "mod", "download", "-json", "sigs.k8s.io/karpenter"],
        cwd=_MODULE,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    if done.returncode != 0:
        raise FailedError(
            f"Karpenter's custom resources were not fetched: {done.stdout}{done.stderr}",
            remedy="the Go module proxy cannot be reached: check the network, or set GOPROXY",
        )
    for part in _CRD_FOLDERS:
        for path in (Path(json.loads(done.stdout)["Dir"]) / part).glob("*.yaml"):
            shutil.copy(path, folder)


def install_crds(cluster: ControlPlane) -> None:
    """Apply the custom resources, wait until they are served, and create the node class."""
    files = [option for path in crd_files() for option in ("-f", str(path))]
    cluster.kubectl("apply", "--server-side", *files)
    cluster.kubectl("wait", "--for=condition=Established", "--timeout=30s", *files)
    group, kind = NODE_CLASS["group"], NODE_CLASS["kind"]
    body = {
        "apiVersion": f"{group}/v1alpha1",
        "kind": kind,
        "metadata": {"name": NODE_CLASS["name"]},
    }
    cluster.api.create(f"/apis/{group}/v1alpha1/kwoknodeclasses", body)


def start(cluster: ControlPlane, *, log_level: str = "info") -> Child:
    """Start Karpenter with the administrator's rights; it ends with the cluster.

    `cluster` needs controllers and scheduler, and `install_crds`. Feature gates are as Karpenter
    has them by default. Raises NotReadyError when it is not built.
    """
    environ = {
        "KUBECONFIG": str(cluster.kubeconfig),
        "SYSTEM_NAMESPACE": "karpenter",
        "KARPENTER_SERVICE": "karpenter",
        "KUBERNETES_MIN_VERSION": "1.19.0-0",
        "DISABLE_LEADER_ELECTION": "true",
        # Any free port: nobody asks.
        "METRICS_PORT": "0",
        "HEALTH_PROBE_PORT": "0",
        "LOG_LEVEL": log_level,
        "MEMORY_LIMIT": str(1 << 30),
        "CPU_REQUESTS": "1000",
        "FEATURE_GATES": ",".join(f"{gate}=false" for gate in (*_GATES, "NodeOverlay")),
        # How long it collects pending pods before it makes nodes for all of them; 1 s and 10 s
        # by default.
        "BATCH_IDLE_DURATION": "500ms",
        "BATCH_MAX_DURATION": "2s",
    }
    program = str(find("karpenter"))
    cluster.api.create("/api/v1/namespaces", {"metadata": {"name": "karpenter"}})
    return cluster.spawn("karpenter", [program], environ=environ)
