"""What the virtual node is told: kubelet's and kube-proxy's settings, names, keys."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from hostprep.api.names import CLUSTER_AUTOSCALER_TAINT
from testbed.control_plane import ControlPlane
from testbed.credentials import HOST_FROM_GUEST

__all__ = ["NODE", "NodeSettings", "config_files"]

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
