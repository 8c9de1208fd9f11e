"""The chart on a real API server: every profile is accepted, installed, upgraded and removed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from testbed.chart import IMAGE
from testbed.control_plane import ClientError, ControlPlane
from testbed.nodes import create_node, node_object
from testbed.operator_process import OperatorProcess
from testbed.processes import free_port, wait_for
from tests.cluster.charts import (
    CHART,
    MONITORING,
    NAMESPACE,
    PLATFORMS,
    PROFILES,
    RELEASE,
    cluster_with_the_chart,
    foreign_crds,
    give_cleanup_its_rights,
    load_crds,
    render,
    render_text,
)

pytestmark = pytest.mark.cluster

_CRDS = ("hostmemorypools.hostprep.dev", "hostmemorynodes.hostprep.dev")
_HMNS = "/apis/hostprep.dev/v1alpha1/hostmemorynodes"
_POOLS = "/apis/hostprep.dev/v1alpha1/hostmemorypools"
_APPS = f"/apis/apps/v1/namespaces/{NAMESPACE}"


@pytest.fixture(scope="module")
def cluster() -> Iterator[ControlPlane]:
    with cluster_with_the_chart() as cluster:
        load_crds(cluster, foreign_crds())
        # A dry run creates nothing, and the API server looks a pod's account up.
        cluster.kubectl("-n", NAMESPACE, "create", "serviceaccount", "hostprep-test")
        yield cluster


@pytest.mark.parametrize("profile", PROFILES)
def test_the_api_server_takes_every_object_of_a_profile(
    profile: str, cluster: ControlPlane
) -> None:
    every = "operator.replicas=2,apf.enabled=true,openshift.enabled=true"
    text = render_text(*PROFILES[profile], *MONITORING, "--set", every)
    said = cluster.kubectl(
        *("apply", "--server-side", "--force-conflicts", "--dry-run=server", "-f", "-"),
        stdin=text,
    )
    assert "podmonitor.monitoring.coreos.com/hostprep-agent" in said
    assert "securitycontextconstraints" in said
    assert "prioritylevelconfiguration" in said
    assert ("nodereadinessrule" in said) == (profile == "nodeReadinessController")
    assert said.count("dry run") == text.count("\nkind: ")


@pytest.mark.parametrize("values", PLATFORMS, ids=lambda values: Path(values[-1]).stem)
def test_the_api_server_takes_what_each_platform_gets(
    values: tuple[str, ...], cluster: ControlPlane
) -> None:
    text = render_text(*values)
    said = cluster.kubectl(
        *("apply", "--server-side", "--force-conflicts", "--dry-run=server", "-f", "-"),
        stdin=text,
    )
    assert said.count("dry run") == text.count("\nkind: ")


def test_the_strictest_pod_security_standard_has_nothing_against_the_operator(
    cluster: ControlPlane,
) -> None:
    """The API server itself judges: warnings name each pod template that breaks the standard."""
    labels = {"pod-security.kubernetes.io/warn": "restricted"}
    path = f"/api/v1/namespaces/{NAMESPACE}"
    cluster.api.patch(path, {"metadata": {"labels": labels}})
    for name, breaks in (
        ("deployments/hostprep-operator", False),
        ("daemonsets/hostprep-agent", True),
    ):
        body = {"spec": {"template": {"metadata": {"annotations": {"x": "y"}}}}}
        reply = wait_for(
            lambda name=name, body=body: cluster.api.request(  # type: ignore[misc]
                "PATCH",
                f"{_APPS}/{name}",
                body,
                content_type="application/merge-patch+json",
                query={"dryRun": "All"},
            ),
        )
        warned = any("PodSecurity" in value for value in reply.headers.values())
        assert warned == breaks, (name, reply.headers)


def test_workloads_are_there_after_the_installation(cluster: ControlPlane) -> None:
    agent = cluster.api.get(f"{_APPS}/daemonsets/hostprep-agent")
    assert agent["spec"]["template"]["spec"]["hostPID"] is True
    assert cluster.api.exists(f"{_APPS}/deployments/hostprep-operator")


def test_monitoring_is_found_by_helm_itself_on_an_upgrade(cluster: ControlPlane) -> None:
    cluster.helm("upgrade", RELEASE, str(CHART), "--no-hooks", "--namespace", NAMESPACE)
    found = cluster.kubectl("get", "podmonitors,prometheusrules", "-n", NAMESPACE, "-o", "name")
    assert len(found.split()) == 3, found


def test_an_upgrade_with_other_labels_leaves_the_pods_alone(cluster: ControlPlane) -> None:
    before = cluster.api.get(f"{_APPS}/daemonsets/hostprep-agent")["metadata"]["generation"]
    cluster.helm("upgrade", RELEASE, str(CHART), "--no-hooks", "--namespace", NAMESPACE)
    after = cluster.api.get(f"{_APPS}/daemonsets/hostprep-agent")["metadata"]["generation"]
    assert after == before


def test_the_clean_up_finishes_with_its_own_rights_alone(
    cluster: ControlPlane, tmp_path: Path
) -> None:
    """No operator runs: it tells the node to release, and takes marks and objects away."""
    give_cleanup_its_rights(cluster)
    node = create_node(cluster.api, node_object("held", labels={"ready.hostprep.dev/kv": "true"}))
    marks = json.dumps({"v": 1, "labels": ["ready.hostprep.dev/kv"]})
    cluster.api.patch(
        "/api/v1/nodes/held", {"metadata": {"annotations": {"hostprep.dev/marks": marks}}}
    )
    owner = {"apiVersion": "v1", "kind": "Node", "name": "held", "uid": node["metadata"]["uid"]}
    entry = {"name": "kv", "uid": "u", "generation": 1, "state": "Present"}
    held = {
        "apiVersion": "hostprep.dev/v1alpha1",
        "kind": "HostMemoryNode",
        "metadata": {"name": "held", "ownerReferences": [owner]},
        "spec": {"pools": [{**entry, "policy": {"size": "1Gi"}}]},
    }
    cluster.api.create(_HMNS, held)
    cluster.api.create(_POOLS, _pool("kv"))
    kubeconfig = cluster.token_kubeconfig(NAMESPACE, "hostprep-cleanup")
    environ = {"PATH": os.environ["PATH"], "KUBECONFIG": str(kubeconfig), "HOME": str(tmp_path)}
    command = [sys.executable, "-m", "hostprep_operator", "cleanup", "--yes", "--timeout=30"]
    cleanup = cluster.spawn("cleanup", command, environ=environ)

    def is_over() -> bool:
        _observe(cluster)
        return not cleanup.alive

    wait_for(is_over, 40.0, why="the clean-up does not end")
    assert not cluster.api.exists(f"{_POOLS}/kv"), cleanup.log.read_text()
    assert not cluster.api.exists(f"{_HMNS}/held"), cleanup.log.read_text()
    after = cluster.api.get("/api/v1/nodes/held")["metadata"]
    assert "ready.hostprep.dev/kv" not in after["labels"], cleanup.log.read_text()
    assert "hostprep.dev/marks" not in after.get("annotations", {})
    roles = "clusterroles/hostprep-cleanup", "clusterrolebindings/hostprep-cleanup"
    for role in roles:
        cluster.api.delete(f"/apis/rbac.authorization.k8s.io/v1/{role}")


def _observe(cluster: ControlPlane) -> None:
    """Answer as the node's agent would: what was to be released is released."""
    found = cluster.api.request("GET", f"{_HMNS}/held")
    if found.status == 200 and found.body["spec"]["pools"][0]["state"] == "Absent":
        generation = found.body["metadata"]["generation"]
        body = {"status": {"observedGeneration": generation, "pools": []}}
        cluster.api.request(
            "PATCH", f"{_HMNS}/held/status", body, content_type="application/merge-patch+json"
        )


def _pool(name: str) -> dict[str, Any]:
    return {
        "apiVersion": "hostprep.dev/v1alpha1",
        "kind": "HostMemoryPool",
        "metadata": {"name": name},
        "spec": {"allNodes": True, "size": "1Gi"},
    }


def test_the_attaching_test_says_what_it_lacks(cluster: ControlPlane, tmp_path: Path) -> None:
    """The program of `helm test`, with a real operator; on a real node it attaches: tests/node."""
    for pool in cluster.api.get(_POOLS)["items"]:
        cluster.api.delete(f"{_POOLS}/{pool['metadata']['name']}")
    operator = OperatorProcess(cluster, "--agent-liveness=off")
    operator.wait_ready()

    def said(pool: str) -> tuple[int, str]:
        (document,) = (
            d
            for d in render("--set", f"test.attach.pool={pool},test.attach.timeoutSeconds=1")
            if d["metadata"]["name"] == "hostprep-test-attach"
        )
        (container,) = document["spec"]["containers"]
        script, _, *arguments = container["args"]
        url = f"http://127.0.0.1:{operator.port}/metrics"
        done = subprocess.run(
            [sys.executable, "-c", script, url, *arguments],
            env={"PATH": str(Path(sys.executable).parent), "HOSTPREP_ROOT": str(tmp_path)},
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )
        return done.returncode, done.stdout + done.stderr

    code, text = said("")
    assert (code, text.startswith("skipped: there is no pool.")) == (0, True), text
    cluster.api.create(_POOLS, _pool("kv"))
    wait_for(lambda: "kv (ready on 0 nodes)" in said("")[1])
    assert said("")[0] == 0
    code, text = said("other")
    assert (code, "there is no pool other; kv (ready on 0" in text) == (1, True), text
    code, text = said("kv")
    assert (code, "failed: hostprep wait kv" in text) == (1, True), text
    operator.child.kill()
    cluster.api.delete(f"{_POOLS}/kv")


def test_uninstalling_keeps_the_custom_resources_and_the_pools(cluster: ControlPlane) -> None:
    cluster.api.create(_POOLS, _pool("kept"))
    cluster.helm("uninstall", RELEASE, "--no-hooks", "--namespace", NAMESPACE)
    assert cluster.kubectl("get", "hmp", "-o", "name").split() == [
        "hostmemorypool.hostprep.dev/kept"
    ]
    left = cluster.kubectl(
        *("get", "clusterroles,clusterrolebindings,validatingadmissionpolicies"),
        *("-l", "app.kubernetes.io/name=hostprep", "-o", "name"),
    )
    assert left == ""
    cluster.helm("install", RELEASE, str(CHART), "--no-hooks", "--namespace", NAMESPACE, *IMAGE)
    assert cluster.kubectl("get", "hmp", "-o", "name").strip()


def test_the_next_release_may_have_another_name_once_the_definitions_changed_hands(
    cluster: ControlPlane,
) -> None:
    """The steps of docs/install.md; with pods on a node it is a long test of tier `node`."""
    cluster.helm("uninstall", RELEASE, "--no-hooks", "--namespace", NAMESPACE)
    second = ("second", str(CHART), "--no-hooks", "--namespace", NAMESPACE, *IMAGE)
    with pytest.raises(ClientError, match="invalid ownership metadata"):
        cluster.helm("install", *second)
    owner = (
        f"meta.helm.sh/release-name={second[0]}",
        f"meta.helm.sh/release-namespace={NAMESPACE}",
    )
    cluster.kubectl("annotate", "crd", *_CRDS, "--overwrite", *owner)
    cluster.helm("install", *second)
    assert cluster.api.exists(f"{_APPS}/daemonsets/second-hostprep-agent")
    assert cluster.api.exists(f"{_POOLS}/kept")


def test_the_oldest_helm_installs_upgrades_and_hands_over_to_the_newest() -> None:
    """Helm 3 applies by itself and Helm 4 lets the server: an upgrade must survive the change."""
    with cluster_with_the_chart(helm="helm-3") as cluster:
        cluster.api.create(_POOLS, _pool("kept"))
        upgrade = ("upgrade", RELEASE, str(CHART), "--no-hooks", "--namespace", NAMESPACE)
        before = cluster.api.get(f"{_APPS}/daemonsets/hostprep-agent")["metadata"]
        cluster.helm(*upgrade, *IMAGE, program="helm-3")
        cluster.helm(*upgrade, *IMAGE)
        after = cluster.api.get(f"{_APPS}/daemonsets/hostprep-agent")["metadata"]
        assert (after["uid"], after["generation"]) == (before["uid"], before["generation"])
        cluster.helm(*upgrade, *IMAGE, "--set", "agent.extraEnv[0].name=X", "--server-side=true")
        (container,) = _containers(cluster)
        assert [variable["name"] for variable in container["env"]] == ["NODE_NAME", "X"]
        cluster.helm(*upgrade, *IMAGE, program="helm-3")
        (container,) = _containers(cluster)
        assert [variable["name"] for variable in container["env"]] == ["NODE_NAME"]
        cluster.helm("uninstall", RELEASE, "--no-hooks", "--namespace", NAMESPACE, program="helm-3")
        assert cluster.api.exists(f"{_POOLS}/kept")
        assert not cluster.api.exists(f"{_APPS}/daemonsets/hostprep-agent")


def _containers(cluster: ControlPlane) -> list[dict[str, Any]]:
    agent = cluster.api.get(f"{_APPS}/daemonsets/hostprep-agent")
    found: list[dict[str, Any]] = agent["spec"]["template"]["spec"]["containers"]
    return found


def test_everything_at_once_elsewhere_is_taken_too() -> None:
    """All that values can add, in a namespace of its own, as Helm 4 sends it."""
    options = (
        *("--set", "namespaceOverride=elsewhere,operator.replicas=2,apf.enabled=true"),
        *("--set", "operator.podDisruptionBudget.maxUnavailable=50%,agent.seLinuxOptions.type=x"),
        *("--set", "agent.updateStrategy.rollingUpdate.maxUnavailable=0"),
        *("--set", "agent.updateStrategy.rollingUpdate.maxSurge=10%"),
        *("--set", "commonLabels.a=b,operator.podLabels.a=c,agent.podAnnotations.x=y"),
        *("--set-json", 'extraObjects=[{"apiVersion":"v1","kind":"Namespace","metadata":'),
    )
    namespace = '{"name":"elsewhere"}}]'
    options = (*options[:-1], options[-1] + namespace)
    with cluster_with_the_chart(*options) as cluster:
        assert cluster.api.exists("/apis/apps/v1/namespaces/elsewhere/daemonsets/hostprep-agent")
        assert not cluster.api.exists(f"{_APPS}/daemonsets/hostprep-agent")
        level = "/apis/flowcontrol.apiserver.k8s.io/v1/prioritylevelconfigurations/hostprep-agents"
        schema = "/apis/flowcontrol.apiserver.k8s.io/v1/flowschemas/hostprep-agents"
        assert cluster.api.exists(level)

        def accepted() -> bool:
            found = cluster.api.get(schema).get("status", {}).get("conditions", [])
            return any(c["type"] == "Dangling" and c["status"] == "False" for c in found)

        wait_for(accepted, why="the flow schema finds no priority level")


def test_the_operator_works_under_any_user_id() -> None:
    """As restricted-v2 of OpenShift starts it: an id of the namespace's range, group 0, no home."""
    if os.geteuid() != 0:
        pytest.skip("only root may become somebody else")
    somebody = ["setpriv", "--reuid=1000650000", "--regid=0", "--clear-groups", "--no-new-privs"]
    tried = [*somebody, sys.executable, "-c", "import hostprep_operator"]
    if subprocess.run(tried, cwd="/", check=False).returncode != 0:
        pytest.skip("this checkout is for root alone")
    with cluster_with_the_chart() as cluster:
        kubeconfig = cluster.token_kubeconfig(NAMESPACE, "hostprep-operator")
        with tempfile.TemporaryDirectory() as folder:
            os.chmod(folder, 0o755)
            own = Path(folder) / "kubeconfig"
            own.write_text(kubeconfig.read_text())
            own.chmod(0o644)
            port = free_port()
            command = [*somebody, sys.executable, "-m", "hostprep_operator", "run"]
            command += [f"--listen=127.0.0.1:{port}", f"--kubeconfig={own}"]
            command += ["--agent-liveness=off", f"--namespace={NAMESPACE}"]
            environ = {"PATH": os.environ["PATH"], "HOME": "/nonexistent"}
            operator = cluster.spawn("operator", command, environ=environ)

            def is_ready() -> bool:
                assert operator.alive, operator.output()
                try:
                    with urllib.request.urlopen(f"http://127.0.0.1:{port}/readyz", timeout=5) as r:
                        return int(r.status) == 200
                except OSError:
                    return False

            wait_for(is_ready, 30, why="the operator is not ready")
            cluster.api.create(_POOLS, _pool("kv"))
            create_node(cluster.api, node_object("n1"))
            wait_for(lambda: cluster.api.exists(f"{_HMNS}/n1"), why=operator.output())
            operator.kill()
