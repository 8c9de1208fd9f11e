"""A Kubernetes control plane of one's own: real etcd and API server, there in three seconds.

    with ControlPlane() as cluster:
        cluster.api.get("/api/v1/nodes")
        cluster.kubectl("get", "nodes")

It leaves nothing behind: its processes die with the process that started them, and its folder is
removed at the end, or by the next start when the end was a SIGKILL.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import ssl
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from hostprep.errors import FailedError
from testbed.api import Api
from testbed.binaries import find
from testbed.cache import cache_folder
from testbed.credentials import HOST_FROM_GUEST, Credentials, write_private
from testbed.processes import Child
from testbed.runs import Runs
from testbed.servers import (
    api_server_flags,
    controller_manager_flags,
    egress_configuration,
    etcd_flags,
    kubernetes_endpoints,
    scheduler_flags,
)
from testbed.tunnel import Tunnel

_READY_SECONDS = 60.0
_STOP_SECONDS = 5.0
_CLIENT_SECONDS = 120.0
_SERVERS = ("etcd", "kube-apiserver")
_DEFAULT_SLICES = "/apis/discovery.k8s.io/v1/namespaces/default/endpointslices"
_DEFAULT_ACCOUNT = "/api/v1/namespaces/default/serviceaccounts"


def runs() -> Runs:
    """The register of this user's testbeds on this machine."""
    return Runs(cache_folder() / "running")


class ControlPlane:
    """Etcd and an API server; controller manager and scheduler where asked for.

    Without the controller manager nothing happens behind a test's back: no garbage collection, no
    end of namespaces, no ServiceAccount `default` but the one in namespace `default`.
    """

    def __init__(
        self,
        *,
        kubernetes: str | None = None,
        controllers: bool = False,
        scheduler: bool = False,
        address: str = "127.0.0.1",
        flags: Sequence[str] = (),
    ) -> None:
        """`kubernetes`: a pinned version, by default `$KUBERNETES`, else DEFAULT_KUBERNETES;
        `flags`: more flags for the API server.

        Raises NotReadyError when a program is not built yet.
        """
        names = ["etcd", "kube-apiserver"]
        names += ["kube-controller-manager"] * controllers + ["kube-scheduler"] * scheduler
        self._programs = {name: str(find(name, kubernetes=kubernetes)) for name in names}
        self._address = address
        self._flags = list(flags)
        self._children: list[Child] = []
        self._tunnel: Tunnel | None = None
        self._count = 0

    def __enter__(self) -> ControlPlane:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> None:
        """Start everything and wait until it answers; raises FailedError with the logs' tail."""
        self._run = runs().begin()
        self.folder: Path = self._run.folder
        """Everything of this cluster: data, keys, logs; removed by `stop`."""
        try:
            self._reserve_port()
            self.credentials = Credentials(self.folder, self.url, self._address)
            self.kubeconfig: Path = self.credentials.admin_kubeconfig
            """Path of the administrator's kubeconfig."""
            self.api = Api(self.url, self.credentials.admin_context())
            """The administrator's client."""
            self._open_tunnel()
            self.etcd = self._start("etcd", etcd_flags(self.folder))
            self.start_api_server()
            self._start_others()
            self.api.create(_DEFAULT_SLICES, kubernetes_endpoints(HOST_FROM_GUEST, self._port))
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """Stop what runs, clients first and within five seconds; remove every trace."""
        clients = [child for child in self._children if child.name not in _SERVERS]
        for child in reversed(clients):
            child.signal(signal.SIGTERM)
        for child in reversed(clients):
            child.wait(_STOP_SECONDS)
        for child in self._children:
            child.kill()  # an API server would take its time, and its data is thrown away
        self._children.clear()
        if self._tunnel is not None:
            self._tunnel.close()
            self._tunnel = None
        self._port_guard.close()
        self._run.release()

    def spawn(
        self,
        name: str,
        command: Sequence[str],
        *,
        environ: Mapping[str, str] | None = None,
        cwd: Path | None = None,
    ) -> Child:
        """Start any program that must not outlive this cluster; `environ` replaces ours."""
        self._count += 1
        log = self.folder / "logs" / f"{name}-{self._count}.log"
        log.parent.mkdir(exist_ok=True)
        child = Child(name, command, run=self._run.name, log=log, environ=environ, cwd=cwd)
        self._children.append(child)
        return child

    def start_api_server(self) -> None:
        """Start the API server, on the port and the data it had before; wait until ready."""
        flags = api_server_flags(self.folder, address=self._address, port=self._port)
        self.api_server = self._start("kube-apiserver", [*flags, *self._flags])
        self._wait(self.api_server, self._is_ready)

    def kill_api_server(self) -> None:
        """SIGKILL, as in an outage: connections break at once, the data stays."""
        self.api_server.kill()
        self._children.remove(self.api_server)

    def restart_api_server(self) -> None:
        """Kill it and start it again: same address, same data, seconds in between."""
        self.kill_api_server()
        self.start_api_server()

    def token_kubeconfig(
        self,
        namespace: str,
        service_account: str,
        *,
        node: str | None = None,
        pod: str | None = None,
        server: str | None = None,
    ) -> Path:
        """A kubeconfig with a new token of a ServiceAccount that exists.

        `node` puts that node's name into the token, `pod` the pod's and its node's, as kubelet
        does; `server` names a proxy in front of the API server. Raises ApiError.
        """
        return self.credentials.for_service_account(
            self.api, namespace, service_account, node=node, pod=pod, server=server
        )

    def kubectl(
        self,
        *arguments: str,
        kubeconfig: Path | None = None,
        stdin: str | None = None,
        timeout_s: float = _CLIENT_SECONDS,
    ) -> str:
        """Run kubectl, as administrator unless told; return what it printed.

        Raises subprocess.CalledProcessError, whose stderr says why, when it fails.
        """
        return self._client("kubectl", arguments, kubeconfig, stdin, timeout_s)

    def helm(
        self,
        *arguments: str,
        kubeconfig: Path | None = None,
        timeout_s: float = _CLIENT_SECONDS,
        program: str = "helm",
    ) -> str:
        """Run helm, or the oldest one that the chart supports, `helm-3`; otherwise as `kubectl`."""
        return self._client(program, arguments, kubeconfig, None, timeout_s)

    def _client(
        self,
        name: str,
        arguments: Sequence[str],
        kubeconfig: Path | None,
        stdin: str | None,
        timeout_s: float,
    ) -> str:
        environ = {
            "PATH": os.environ.get("PATH", ""),
            "HOME": str(self.folder),  # kubectl's discovery cache, helm's settings
            "KUBECONFIG": str(kubeconfig or self.kubeconfig),
        }
        done = subprocess.run(
            [str(find(name)), *arguments],
            input=stdin,
            stdin=subprocess.DEVNULL if stdin is None else None,
            capture_output=True,
            text=True,
            check=False,
            timeout=timeout_s,
            env=environ,
        )
        if done.returncode != 0:
            raise ClientError(done.returncode, [name, *arguments], done.stdout, done.stderr)
        return done.stdout

    def _start(self, name: str, flags: Sequence[str]) -> Child:
        return self.spawn(name, [self._programs[name], *flags], cwd=self.folder)

    def _start_others(self) -> None:
        if "kube-controller-manager" in self._programs:
            self.credentials.for_user("system:kube-controller-manager")
            child = self._start("kube-controller-manager", controller_manager_flags(self.folder))
            self._wait(child, lambda: self.api.exists(f"{_DEFAULT_ACCOUNT}/default"))
        else:
            self.api.create(_DEFAULT_ACCOUNT, {"metadata": {"name": "default"}})
        if "kube-scheduler" in self._programs:
            self.credentials.for_user("system:kube-scheduler")
            self._start("kube-scheduler", scheduler_flags(self.folder))

    def _reserve_port(self) -> None:
        # Bound and never listening: it keeps the port ours while the server is down, and
        # SO_REUSEPORT on both sides lets the server listen on it (socket(7)).
        self._port_guard = socket.socket()
        self._port_guard.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        self._port_guard.bind((self._address, 0))
        self._port: int = self._port_guard.getsockname()[1]
        self.url = f"https://{self._address}:{self._port}"
        self.guest_url = f"https://{HOST_FROM_GUEST}:{self._port}"
        """The API server, as a virtual machine reaches it."""

    def _open_tunnel(self) -> None:
        path = self.folder / "tunnel.sock"
        self._tunnel = Tunnel(path)
        write_private(self.folder / "egress.json", egress_configuration(path))

    def _is_ready(self) -> bool:
        return self.api.request("GET", "/readyz", timeout_s=5).status == 200

    def _wait(self, child: Child, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + _READY_SECONDS
        while not _holds(condition):
            if not self.etcd.alive:
                raise self._start_failure(self.etcd, "ended")
            if not child.alive:
                raise self._start_failure(child, "ended")
            if time.monotonic() > deadline:
                raise self._start_failure(child, f"was not ready after {_READY_SECONDS:.0f} s")
            time.sleep(0.05)

    def _start_failure(self, child: Child, what: str) -> FailedError:
        kept = cache_folder() / "logs-of-failed-start"
        shutil.rmtree(kept, ignore_errors=True)
        shutil.copytree(self.folder / "logs", kept)
        return FailedError(
            f"the testbed's {child.name} {what}; its last lines:\n{child.tail()}",
            remedy=f"all logs are in {kept}",
        )


class ClientError(subprocess.CalledProcessError):
    """kubectl or helm failed; says why, unlike its base."""

    def __str__(self) -> str:
        return f"{super().__str__()}\n{self.stderr}"


def _holds(condition: Callable[[], bool]) -> bool:
    try:
        return condition()
    except (OSError, ssl.SSLError):
        return False
