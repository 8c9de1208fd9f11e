"""The testbed itself: it starts, answers, survives kills, and leaves nothing behind."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from testbed import binaries
from testbed.api import Api, ApiError
from testbed.control_plane import ControlPlane
from testbed.nodes import reboot_node
from testbed.processes import MARK, wait_for
from testbed.runs import carries_mark
from testbed.versions import kubernetes_version

pytestmark = pytest.mark.cluster
JsonObject = dict[str, Any]
_STARTER = """
import sys, time
from testbed.control_plane import ControlPlane
cluster = ControlPlane()
cluster.start()
# A program that starts another one, which no parent-death signal reaches.
cluster.spawn("shell", ["sh", "-c", "sleep 600 & wait"])
print(cluster.folder, flush=True)
time.sleep(600)
"""


def _processes_of(name: str) -> list[int]:
    found = []
    for entry in filter(str.isdecimal, os.listdir("/proc")):
        try:
            environ = Path(f"/proc/{entry}/environ").read_bytes()
        except OSError:
            continue
        if carries_mark(environ, name):
            found.append(int(entry))
    return found


def test_it_is_the_kubernetes_that_was_asked_for(api: Api) -> None:
    wanted = kubernetes_version(os.environ.get("KUBERNETES"))
    if binaries.given("kube-apiserver", os.environ) is None:
        assert api.get("/version")["gitVersion"] == f"v{wanted}"


def test_a_cluster_is_ready_within_seconds(control_plane: ControlPlane) -> None:
    start = time.monotonic()
    with ControlPlane() as another:
        seconds = time.monotonic() - start
        assert another.url != control_plane.url
        assert another.api.get("/api/v1/namespaces/default")["kind"] == "Namespace"
    print(f"ready after {seconds:.1f} s")
    assert seconds < 30
    assert not another.folder.exists()
    assert _processes_of(another.folder.name) == []


def test_nobody_else_on_the_machine_reaches_etcd(control_plane: ControlPlane) -> None:
    descriptors = Path(f"/proc/{control_plane.etcd.pid}/fd").iterdir()
    mine = {os.readlink(path) for path in descriptors}
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        rows = [line.split() for line in Path(table).read_text().splitlines()[1:]]
        assert not [row for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in mine]
    assert control_plane.folder.stat().st_mode & 0o077 == 0
    rows = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()[1:]]
    listening = [row[7:] for row in rows if row[3] == "00010000" and f"socket:[{row[6]}]" in mine]
    assert sorted(listening) == [[f"{control_plane.folder}/etcd.sock"], ["peer.sock:0"]]


def test_kubectl_and_helm_work(control_plane: ControlPlane, kubectl: Callable[..., str]) -> None:
    assert "default" in kubectl("get", "namespaces")
    assert control_plane.helm("list", "--all-namespaces").startswith("NAME")
    with pytest.raises(subprocess.CalledProcessError, match="NotFound"):
        kubectl("get", "node", "nobody")


def test_a_token_carries_the_name_of_its_node(
    api: Api,
    make_node: Callable[..., JsonObject],
    control_plane: ControlPlane,
    kubectl: Callable[..., str],
) -> None:
    node = make_node("token-node")
    kubeconfig = control_plane.token_kubeconfig("default", "default", node="token-node")
    review = json.loads(kubectl("auth", "whoami", "-o", "json", kubeconfig=kubeconfig))
    user = review["status"]["userInfo"]
    assert user["username"] == "system:serviceaccount:default:default"
    assert user["extra"]["authentication.kubernetes.io/node-name"] == ["token-node"]
    assert user["extra"]["authentication.kubernetes.io/node-uid"] == [node["metadata"]["uid"]]


def test_a_pods_token_carries_the_name_of_the_node_it_is_bound_to(
    api: Api,
    namespace: str,
    make_node: Callable[..., JsonObject],
    control_plane: ControlPlane,
    kubectl: Callable[..., str],
) -> None:
    make_node("pod-node")
    pods = f"/api/v1/namespaces/{namespace}/pods"
    spec = {"nodeName": "pod-node", "containers": [{"name": "a", "image": "none"}]}
    api.create(pods, {"metadata": {"name": "agent"}, "spec": spec})
    kubeconfig = control_plane.token_kubeconfig(namespace, "default", pod="agent")
    review = json.loads(kubectl("auth", "whoami", "-o", "json", kubeconfig=kubeconfig))
    extra = review["status"]["userInfo"]["extra"]
    assert extra["authentication.kubernetes.io/pod-name"] == ["agent"]
    assert extra["authentication.kubernetes.io/node-name"] == ["pod-node"]
    assert api.delete(f"{pods}/agent")


def test_a_token_for_a_node_that_is_not_there_is_refused(control_plane: ControlPlane) -> None:
    with pytest.raises(ApiError, match="not found") as refused:
        control_plane.token_kubeconfig("default", "default", node="nobody")
    assert refused.value.status == 404


def test_a_node_has_the_taints_it_was_made_with(make_node: Callable[..., JsonObject]) -> None:
    taint = {"key": "hostprep.dev/test", "effect": "NoSchedule"}
    assert make_node("tainted", taints=[taint])["spec"]["taints"] == [taint]
    assert "taints" not in make_node("plain")["spec"]
    unready = make_node("unready", ready=False)["spec"]["taints"]
    assert [t["key"] for t in unready] == ["node.kubernetes.io/not-ready"]


def test_a_reboot_changes_the_boot_id_and_nothing_else(
    api: Api, make_node: Callable[..., JsonObject]
) -> None:
    before = make_node("rebooted", boot_id="one")["status"]
    after = reboot_node(api, "rebooted", "two")["status"]
    assert after.pop("nodeInfo") == {**before.pop("nodeInfo"), "bootID": "two"}
    assert after == before


def test_the_charts_resources_are_served(api: Api, crds: list[str]) -> None:
    for name in crds:
        plural, group = name.split(".", 1)
        served = api.get(f"/apis/{group}")["preferredVersion"]["groupVersion"]
        assert api.get(f"/apis/{served}/{plural}")["items"] == []


def test_a_killed_api_server_comes_back_where_it_was_with_its_data(
    private_control_plane: ControlPlane,
) -> None:
    cluster = private_control_plane
    url = cluster.url
    path = "/api/v1/namespaces/default/configmaps"
    made = cluster.api.create(path, {"metadata": {"name": "kept"}})
    cluster.kill_api_server()
    with pytest.raises(ConnectionError):
        cluster.api.get(path)
    # Nobody gets the port meanwhile.
    with socket.socket() as other, pytest.raises(OSError, match="in use"):
        other.bind(("127.0.0.1", int(url.rpartition(":")[2])))
    cluster.start_api_server()
    assert cluster.url == url
    assert cluster.api.get(f"{path}/kept") == made


def test_a_server_that_cannot_start_shows_its_last_words() -> None:
    from hostprep.errors import FailedError

    cluster = ControlPlane(flags=["--no-such-flag"])
    with pytest.raises(FailedError, match="unknown flag: --no-such-flag") as failed:
        cluster.start()
    assert "logs-of-failed-start" in str(failed.value)
    assert not cluster.folder.exists()


def test_after_a_kill_of_the_starter_the_next_start_leaves_nothing(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", _STARTER], stdout=subprocess.PIPE, text=True
    ) as starter:
        assert starter.stdout is not None
        folder = Path(starter.stdout.readline().strip())
        try:
            # Etcd, API server, shell and sleep.
            wait_for(lambda: len(_processes_of(folder.name)) >= 4)
        finally:
            starter.kill()
    # What it started directly dies by itself; the shell's child is for the next start.
    wait_for(lambda: len(_processes_of(folder.name)) <= 1, why="servers outlived their starter")
    assert folder.exists()
    with ControlPlane() as following:
        assert _processes_of(folder.name) == []
        assert not folder.exists()
        assert following.folder.exists()


def test_a_program_started_from_a_thread_that_ended_runs_on(control_plane: ControlPlane) -> None:
    from threading import Thread

    started = []
    thread = Thread(target=lambda: started.append(control_plane.spawn("nap", ["sleep", "60"])))
    thread.start()
    thread.join()
    time.sleep(0.2)
    assert started[0].alive
    assert MARK in Path(f"/proc/{started[0].pid}/environ").read_text()
    assert started[0].stop() == -signal.SIGTERM


def test_with_controllers_what_a_deleted_node_owns_is_collected(
    full_control_plane: ControlPlane,
) -> None:
    api = full_control_plane.api
    node = api.create("/api/v1/nodes", {"metadata": {"name": "owner"}})
    owner = {"apiVersion": "v1", "kind": "Node", "name": "owner", "uid": node["metadata"]["uid"]}
    path = "/api/v1/persistentvolumes"
    volume = {
        "metadata": {"name": "owned", "ownerReferences": [owner]},
        "spec": {
            "capacity": {"storage": "1Gi"},
            "accessModes": ["ReadWriteOnce"],
            "hostPath": {"path": "/none"},
        },
    }
    api.create(path, volume)
    api.patch(f"{path}/owned", {"metadata": {"finalizers": None}})
    assert api.delete("/api/v1/nodes/owner")
    wait_for(lambda: not api.exists(f"{path}/owned"), 30, why="not collected")


def test_make_cluster_tells_a_person_what_to_do_and_ends_without_a_trace(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "testbed", "up", "--bare"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as person:
        assert person.stdout is not None
        assert person.stderr is not None
        lines: list[str] = []
        while not any("Ctrl-C" in line for line in lines):
            lines.append(person.stdout.readline())
            assert lines[-1], person.stderr.read()
        text = "".join(lines)
        kubeconfig = text.split("export KUBECONFIG=")[1].splitlines()[0]
        tools = text.split("export PATH=")[1].split(":")[0]
        shown = subprocess.run(
            [f"{tools}/kubectl", "--kubeconfig", kubeconfig, "get", "--raw", "/readyz"],
            capture_output=True,
            text=True,
            check=True,
        )
        assert shown.stdout == "ok"
        person.send_signal(signal.SIGINT)
        assert person.wait(timeout=30) == 0
    folder = Path(kubeconfig).parents[1]
    assert not folder.exists()
    assert _processes_of(folder.name) == []
