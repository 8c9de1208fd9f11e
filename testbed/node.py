"""A real node in a virtual machine: kubelet, containerd, cgroup v2, systemd, two NUMA nodes.

with ControlPlane(controllers=True, scheduler=True) as cluster, VirtualNode(cluster) as node:
    node.wait_ready()
    node.run("cat /sys/fs/cgroup/cgroup.controllers")
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hostprep.api.names import CLUSTER_AUTOSCALER_TAINT
from hostprep.errors import FailedError
from testbed import binaries
from testbed.cache import Say, builder_lock, cache_folder
from testbed.container_images import build_store
from testbed.control_plane import ControlPlane
from testbed.credentials import HOST_FROM_GUEST, write_private
from testbed.node_image import NodeImage, build_node_image
from testbed.processes import free_port
from testbed.qemu import Qemu, ensure_qemu
from testbed.versions import NODE_PROGRAMS
from testbed.virtual_machine import Guest, Hardware

NODE = "node-a"
_ADDRESS = "10.0.2.15"
_DNS = "169.254.20.10"
_PODS = "10.244.0.0/16"


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeSettings:
    """How the node joins."""

    tainted: bool = True
    """Whether it registers with the start-up taint."""
    labels: Mapping[str, str] = field(default_factory=dict)
    kubelet: Mapping[str, Any] = field(default_factory=dict)
    """More of KubeletConfiguration."""


def config_files(
    cluster: ControlPlane, settings: NodeSettings, kubelet_port: int
) -> dict[str, str | bytes]:
    """The files of /etc/kubernetes on the node, by name."""
    server = f"https://{HOST_FROM_GUEST}:{cluster.url.rpartition(':')[2]}"
    names = [_ADDRESS, NODE, "localhost", "127.0.0.1"]
    keys = cluster.credentials.server_keys("kubelet", addresses=names)
    users = {
        "kubelet": (f"system:node:{NODE}", ["system:nodes"]),
        "kube-proxy": ("system:kube-proxy", []),
        "coredns": ("system:coredns", ["system:masters"]),
    }
    files: dict[str, str | bytes] = {
        f"{name}.kubeconfig": cluster.credentials.user_text(user, groups=groups, server=server)
        for name, (user, groups) in users.items()
    }
    labels = ",".join(f"{key}={value}" for key, value in settings.labels.items())
    return files | {
        "ca.crt": cluster.credentials.ca,
        "kubelet.crt": keys.public,
        "kubelet.key": keys.private,
        "kubelet.yaml": json.dumps(_kubelet(settings, kubelet_port), indent=1),
        "kubelet.env": f"KUBELET_FLAGS=--node-labels={labels}\n",
        "kube-proxy.yaml": json.dumps(_kube_proxy(), indent=1),
        "Corefile": _corefile(),
    }


def _kubelet(settings: NodeSettings, port: int) -> dict[str, Any]:
    config: dict[str, Any] = {
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        "cgroupDriver": "systemd",
        "containerRuntimeEndpoint": "unix:///run/containerd/containerd.sock",
        "port": port,
        "authentication": {
            "x509": {"clientCAFile": "/etc/kubernetes/ca.crt"},
            "webhook": {"enabled": True},
            "anonymous": {"enabled": False},
        },
        "authorization": {"mode": "Webhook"},
        "tlsCertFile": "/etc/kubernetes/kubelet.crt",
        "tlsPrivateKeyFile": "/etc/kubernetes/kubelet.key",
        "clusterDNS": [_DNS],
        "clusterDomain": "cluster.local",
        "evictionHard": {
            "memory.available": "100Mi",
            "nodefs.available": "1%",
            "imagefs.available": "1%",
        },
        "imageGCHighThresholdPercent": 100,
    }
    if settings.tainted:
        config["registerWithTaints"] = [{"key": CLUSTER_AUTOSCALER_TAINT, "effect": "NoSchedule"}]
    return config | dict(settings.kubelet)


def _kube_proxy() -> dict[str, Any]:
    return {
        "apiVersion": "kubeproxy.config.k8s.io/v1alpha1",
        "kind": "KubeProxyConfiguration",
        "mode": "nftables",
        "clusterCIDR": _PODS,
        "clientConnection": {"kubeconfig": "/etc/kubernetes/kube-proxy.kubeconfig"},
        "conntrack": {"maxPerCore": 0},
    }


def _corefile() -> str:
    return f""".:53 {{
    bind {_DNS}
    errors
    kubernetes cluster.local {{
        kubeconfig /etc/kubernetes/coredns.kubeconfig
    }}
    cache 5
}}
"""


_READY_SECONDS = 240.0


class VirtualNode:
    """The node `node-a` of a cluster whose control plane runs on this machine."""

    def __init__(
        self,
        cluster: ControlPlane,
        *,
        qemu: Qemu,
        image: NodeImage,
        store: Path,
        settings: NodeSettings | None = None,
        hardware: Hardware | None = None,
    ) -> None:
        """`store`: the disk with the container images."""
        self.cluster = cluster
        """Whose node it is."""
        self._settings = settings or NodeSettings()
        folder = cluster.folder / "node"
        folder.mkdir()
        kubelet_port = free_port()
        config = _config_disk(cluster, folder, self._settings, kubelet_port)
        self.guest = Guest(
            qemu=qemu,
            kernel=image.kernel,
            disks=[image.root, store, config],
            folder=folder,
            hardware=hardware or Hardware(),
            forwards={kubelet_port: kubelet_port},
        )

    def __enter__(self) -> VirtualNode:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> None:
        """Boot it; kubelet starts meanwhile. Raises FailedError."""
        self.guest.start(self.cluster.spawn)

    def stop(self) -> None:
        """Switch it off."""
        self.guest.stop()

    def run(self, command: str, *, timeout_s: float = 120.0) -> str:
        """Run a shell command in it as root, return what it printed. Raises CommandError."""
        return self.guest.run(command, timeout_s=timeout_s)

    def reboot(self) -> None:
        """Reboot it in order; returns when it answers, long before kubelet is ready."""
        self.guest.reboot()

    def power_cut(self) -> None:
        """Cut its power and switch it on again."""
        self.guest.power_cut()

    def read(self) -> dict[str, Any]:
        """The Node object; empty while there is none."""
        if not self.cluster.api.exists(f"/api/v1/nodes/{NODE}"):
            return {}
        found: dict[str, Any] = self.cluster.api.get(f"/api/v1/nodes/{NODE}")
        return found

    def is_ready(self) -> bool:
        """Whether kubelet says Ready for the present boot."""
        return bool(self._ready().get("status") == "True")

    def wait_ready(self, *, timeout_s: float = _READY_SECONDS) -> None:
        """Wait for `is_ready`. Raises FailedError with kubelet's and containerd's last lines."""
        self.wait(self.is_ready, "the node to be Ready", timeout_s=timeout_s)

    def restart_kubelet(self) -> None:
        """Restart kubelet and wait until it has reported all it knows, and is Ready.

        When it registers again, kubelet writes its huge pages at once and the memory beside them
        with its first status (pkg/kubelet/kubelet_node_status.go): between the two they disagree.
        """
        stopped_at = self.run("systemctl stop kubelet; date --utc +%Y-%m-%dT%H:%M:%SZ").strip()
        self.run("systemctl start kubelet")

        def has_reported() -> bool:
            ready = self._ready()
            return ready.get("status") == "True" and ready["lastHeartbeatTime"] > stopped_at

        self.wait(has_reported, "kubelet to report after its restart", timeout_s=_READY_SECONDS)

    def _ready(self) -> dict[str, Any]:
        """Kubelet's condition Ready of the present boot; empty before its first status."""
        status = self.read().get("status", {})
        if status.get("nodeInfo", {}).get("bootID") != self.guest.boot_id:
            return {}
        conditions = status.get("conditions", ())
        return next((found for found in conditions if found["type"] == "Ready"), {})

    def wait(self, holds: Callable[[], object], what: str, *, timeout_s: float) -> None:
        """Wait until something holds. Raises FailedError with what the node's journal says."""
        deadline_s = time.monotonic() + timeout_s
        while not holds():
            if time.monotonic() > deadline_s:
                raise FailedError(f"waited {timeout_s:.0f} s for {what}:\n{self.journal()}")
            time.sleep(0.5)

    def journal(self, units: Iterable[str] = ("testbed-setup", "containerd", "kubelet")) -> str:
        """The last lines of the node's units."""
        texts = []
        for unit in units:
            with contextlib.suppress(FailedError):
                state = f"systemctl is-active {unit}; journalctl -u {unit} -n 25 --no-pager -o cat"
                texts.append(f"--- {unit}\n{self.guest.execute(state)[1]}")
        return "\n".join(texts)


def _config_disk(
    cluster: ControlPlane, folder: Path, settings: NodeSettings, kubelet_port: int
) -> Path:
    """A disk with what this node needs to join this cluster; read by testbed-setup.service."""
    source = folder / "config" / "kubernetes"
    source.mkdir(parents=True)
    for name, content in config_files(cluster, settings, kubelet_port).items():
        write_private(source / name, content)
    disk = folder / "config.ext4"
    command = ["mke2fs", "-q", "-t", "ext4", "-L", "config", "-O", "^has_journal"]
    command += ["-d", str(folder / "config"), str(disk), "4M"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise FailedError(f"mke2fs failed: {done.stderr.strip()}", remedy="install e2fsprogs")
    return disk


@dataclass(frozen=True, slots=True)
class NodeParts:
    """QEMU, the node's disk, and the disk with the container images."""

    qemu: Qemu
    image: NodeImage
    store: Path

    def node(self, cluster: ControlPlane, **options: Any) -> VirtualNode:
        """A node of this cluster, not yet started; `options` are VirtualNode's."""
        return VirtualNode(cluster, qemu=self.qemu, image=self.image, store=self.store, **options)


def build_node_parts(say: Say) -> NodeParts:
    """Build what is missing or out of date; seconds when nothing is.

    Raises FailedError with the remedy: it needs root, and Debian's packages.
    """
    programs = binaries.build(NODE_PROGRAMS, say=say)
    cache = cache_folder()
    with builder_lock(cache, say):
        qemu = ensure_qemu(cache, say)
        image = build_node_image(programs, cache=cache, say=say)
    given = os.environ.get("TEST_ASSET_STORE")
    return NodeParts(qemu, image, Path(given) if given else build_store(say))
