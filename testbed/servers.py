"""The command lines of a control plane on one machine: what is asked for, and why."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

# A simulated node has no kubelet to renew its lease: it must not be declared dead for that.
_NODE_GRACE = "24h"
ISSUER = "https://kubernetes.default.svc"


def etcd_flags(folder: Path) -> list[str]:
    """Etcd on unix sockets in a private folder, where it must run: no port for others to reach."""
    return [
        f"--data-dir={folder}/etcd",
        "--name=testbed",
        f"--listen-client-urls=unix://{folder}/etcd.sock",
        # A name in its working folder: of a path it would keep nothing, and bind an abstract
        # socket that everybody can reach.
        "--listen-peer-urls=unix://peer.sock:0",
        # It insists on host and port in what it advertises; nobody uses these.
        "--advertise-client-urls=http://localhost:2379",
        "--initial-advertise-peer-urls=http://localhost:2380",
        "--initial-cluster=testbed=http://localhost:2380",
        "--unsafe-no-fsync",  # the data is thrown away
        "--quota-backend-bytes=4294967296",
        "--log-level=warn",
    ]


def api_server_flags(folder: Path, *, address: str, port: int) -> list[str]:
    """The flags of an API server with the authorizers and admission of a production cluster."""
    pki = folder / "pki"
    return [
        f"--etcd-servers=unix://{folder}/etcd.sock",
        f"--bind-address={address}",
        f"--secure-port={port}",
        "--permit-port-sharing",  # the testbed keeps the port reserved while the server is down
        f"--tls-cert-file={pki}/server.crt",
        f"--tls-private-key-file={pki}/server.key",
        f"--client-ca-file={pki}/ca.crt",
        f"--token-auth-file={pki}/tokens.csv",
        f"--service-account-key-file={pki}/sa.pub",
        f"--service-account-signing-key-file={pki}/sa.key",
        f"--service-account-issuer={ISSUER}",
        "--service-cluster-ip-range=10.96.0.0/16",
        "--authorization-mode=Node,RBAC",
        "--enable-admission-plugins=NodeRestriction",
        "--allow-privileged=true",
        f"--kubelet-client-certificate={pki}/admin.crt",
        f"--kubelet-client-key={pki}/admin.key",
        f"--kubelet-certificate-authority={pki}/ca.crt",
        "--kubelet-preferred-address-types=InternalIP",
        f"--egress-selector-config-file={folder}/egress.json",
        # It would publish a loopback address, which no pod could use: `kubernetes_endpoints`.
        "--endpoint-reconciler-type=none",
        "--profiling=false",
    ]


def egress_configuration(socket: Path) -> str:
    """Have the API server reach kubelets by the tunnel that listens on a unix socket."""
    transport = {"uds": {"udsName": str(socket)}}
    connection = {"proxyProtocol": "HTTPConnect", "transport": transport}
    return json.dumps(
        {
            "apiVersion": "apiserver.k8s.io/v1beta1",
            "kind": "EgressSelectorConfiguration",
            "egressSelections": [{"name": "cluster", "connection": connection}],
        }
    )


def kubernetes_endpoints(address: str, port: int) -> dict[str, Any]:
    """What is behind the Service `kubernetes`: the API server as the pods of a guest reach it.

    The Service has no selector, so the endpoint slice controller leaves it alone, and the mirroring
    one deletes only slices of its own.
    """
    return {
        "metadata": {"name": "kubernetes", "labels": {"kubernetes.io/service-name": "kubernetes"}},
        "addressType": "IPv4",
        "endpoints": [{"addresses": [address], "conditions": {"ready": True}}],
        "ports": [{"name": "https", "port": port, "protocol": "TCP"}],
    }


def controller_manager_flags(folder: Path) -> list[str]:
    """All default controllers, signing for kubelets included; it listens nowhere."""
    pki = folder / "pki"
    return [
        f"--kubeconfig={folder}/kubeconfigs/system-kube-controller-manager.kubeconfig",
        f"--service-account-private-key-file={pki}/sa.key",
        f"--root-ca-file={pki}/ca.crt",
        f"--cluster-signing-cert-file={pki}/ca.crt",
        f"--cluster-signing-key-file={pki}/ca.key",
        "--use-service-account-credentials",
        f"--node-monitor-grace-period={_NODE_GRACE}",
        "--leader-elect=false",
        "--secure-port=0",
    ]


def scheduler_flags(folder: Path) -> list[str]:
    """The default profile; it listens nowhere."""
    return [
        f"--kubeconfig={folder}/kubeconfigs/system-kube-scheduler.kubeconfig",
        "--leader-elect=false",
        "--secure-port=0",
    ]
