"""`helm test`, uninstalling while leased and when free, and the next release under another name."""

from __future__ import annotations

import json
from typing import Any

import pytest

from hostprep.node.boot.install import UNIT
from hostprep_operator.pools_backup import BACKUP_NAME
from testbed.chart import NAMESPACE, RELEASE, install_chart, wait_for_chart
from testbed.control_plane import ClientError, ControlPlane
from testbed.engine_pods import EnginePods, documents
from testbed.node import NODE, VirtualNode
from testbed.node_scene import KV, apply, wait_open
from testbed.processes import wait_for

pytestmark = pytest.mark.node
JsonObject = dict[str, Any]
_WANTS = "/etc/systemd/system/multi-user.target.wants"
_API = "/apis/hostprep.dev/v1alpha1"
_HMNS, _POOLS = f"{_API}/hostmemorynodes", f"{_API}/hostmemorypools"
_CRDS = ("hostmemorypools.hostprep.dev", "hostmemorynodes.hostprep.dev")


def test_helm_test_asks_the_operator_by_its_name(cluster: ControlPlane, kv: JsonObject) -> None:
    said = cluster.helm("test", RELEASE, "--namespace", NAMESPACE, "--logs")
    assert "/readyz 200" in said, said
    assert "skipped: test.attach.pool names none of kv" in said, said


@pytest.mark.timeout(900)
def test_helm_test_attaches_as_an_engine_does(cluster: ControlPlane, kv: JsonObject) -> None:
    gid = kv["spec"]["access"]["gid"]
    values = ("--reset-then-reuse-values", f"--set=test.attach.pool=kv,test.attach.gid={gid}")
    cluster.helm("upgrade", RELEASE, "charts/hostprep", "--namespace", NAMESPACE, *values)
    # Four starts of Python, one after the other, on an emulated machine.
    command = ("test", RELEASE, "--namespace", NAMESPACE, "--logs", "--timeout=7m")
    try:
        said = cluster.helm(*command, timeout_s=450)
    except ClientError as error:
        pod = ("-n", NAMESPACE, "logs", "hostprep-test-attach")
        raise AssertionError(cluster.kubectl(*pod)) from error
    assert "pool kv is ready" in said, said
    assert "attached in" in said, said


@pytest.mark.timeout(1200)
def test_uninstalling_leaves_the_node_as_it_was(
    cluster: ControlPlane, node: VirtualNode, kv: JsonObject
) -> None:
    engines = EnginePods(cluster.kubectl)
    engines.prepare()
    with engines.running(documents("engine.yaml")):
        pods = engines.some("engine", 2)
        for pod in pods:
            engines.wait_line(pod, "attached")
        wait_for(lambda: _leased(cluster) == 2, 60, every_s=1, why="no lease is reported")
        before = _written_by_people(cluster)
        with pytest.raises(ClientError):
            _uninstall(cluster)
        said = cluster.kubectl("-n", NAMESPACE, "logs", "job/hostprep-cleanup", "--tail=20")
        assert f"leased: engines use the memory of 1 node: {NODE}" in said, said
        assert "nothing was changed" in said, said
        assert _written_by_people(cluster) == before
        assert RELEASE in cluster.helm("list", "--short", "--namespace", NAMESPACE), "still there"
        for pod in pods:
            assert engines.reports(pod), "an engine was disturbed"
    wait_for(lambda: _leased(cluster) == 0, 120, every_s=1, why="leases outlive their engines")
    _uninstall(cluster)
    _node_is_as_it_was(cluster, node)
    backup = cluster.api.get(f"/api/v1/namespaces/{NAMESPACE}/configmaps/{BACKUP_NAME}")
    assert json.loads(backup["data"]["kv.json"])["spec"].items() >= KV["spec"].items()


@pytest.mark.long
def test_the_next_release_may_have_another_name(cluster: ControlPlane, node: VirtualNode) -> None:
    """The definitions were kept: they change hands, as docs/install.md says."""
    owner = "meta.helm.sh/release-name=second"
    cluster.kubectl("annotate", "crd", *_CRDS, "--overwrite", owner)
    install_chart(cluster, release="second")
    wait_for_chart(cluster)
    apply(cluster, KV)
    wait_open(cluster, node)
    _uninstall(cluster, "second")
    _node_is_as_it_was(cluster, node)


def _leased(cluster: ControlPlane) -> int:
    """How many regions the agent says are leased."""
    pools = cluster.api.get(f"{_HMNS}/{NODE}")["status"].get("pools", ())
    return sum(pool["regionsLeased"] for pool in pools)


def _written_by_people(cluster: ControlPlane) -> list[JsonObject]:
    """What the pools and the node's entries say, and the objects' identity."""
    objects = [cluster.api.get(_POOLS)["items"], cluster.api.get(_HMNS)["items"]]
    return [
        {"uid": item["metadata"]["uid"], "spec": item["spec"]}
        for items in objects
        for item in items
    ]


def _uninstall(cluster: ControlPlane, release: str = RELEASE) -> None:
    cluster.helm("uninstall", release, "--namespace", NAMESPACE, "--timeout=110s")


def _node_is_as_it_was(cluster: ControlPlane, node: VirtualNode) -> None:
    found = cluster.api.get(f"/api/v1/nodes/{NODE}")
    text = json.dumps([found["metadata"].get("annotations"), found["metadata"]["labels"]])
    assert "ready.hostprep.dev" not in text, text
    assert "hostprep.dev/marks" not in text, text
    types = [c["type"] for c in found["status"]["conditions"]]
    assert not [name for name in types if name.startswith("hostprep.dev/")], types
    assert "taints" not in found["spec"], found["spec"]["taints"]
    wait_for(lambda: not _pods(cluster), 90, every_s=0.5, why="pods are left")
    # Those of the boot script as well, where the node was rebooted before.
    assert int(node.run("cat /proc/sys/vm/nr_hugepages")) == 0
    # The folder is kubelet's (DirectoryOrCreate). Its own file system stays, since pods that wait
    # for memory may have it mounted; all in it went with the last pool.
    assert node.run("ls -A /run/hostprep") == ""
    node.run("umount /run/hostprep")
    assert "hostprep" not in node.run("cat /proc/mounts").replace("/run/hostprep-", "")
    assert node.run("ls -A /run/hostprep 2>/dev/null || true") == ""
    ours = "/etc/hostprep", f"/etc/systemd/system/{UNIT}", f"{_WANTS}/{UNIT}"
    for path in ours:
        assert node.run(f"ls -d {path} 2>/dev/null || true") == "", path
    assert node.run("ls -d /sys/fs/cgroup/hostprep 2>/dev/null || true") == ""


def _pods(cluster: ControlPlane) -> list[JsonObject]:
    items: list[JsonObject] = cluster.api.get(f"/api/v1/namespaces/{NAMESPACE}/pods")["items"]
    return [pod for pod in items if pod["status"]["phase"] in {"Running", "Pending"}]
