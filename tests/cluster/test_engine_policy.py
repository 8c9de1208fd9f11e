"""Pods that mount the folder of all pools writable: warned of, or refused."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from testbed.api import Api, ApiError
from testbed.control_plane import ControlPlane
from testbed.engine_pods import HOST_PATH_MANIFESTS, documents, pod_specs
from testbed.processes import wait_for
from tests.cluster.charts import NAMESPACE, cluster_with_the_chart, render

pytestmark = pytest.mark.cluster

_PODS = "/api/v1/namespaces/{}/pods"
_DRY_RUN = {"dryRun": "All"}


@pytest.fixture(scope="module")
def cluster() -> Iterator[ControlPlane]:
    with cluster_with_the_chart("--set", "engineAdmissionPolicy.action=Deny") as cluster:
        api = cluster.api
        api.create("/api/v1/namespaces", {"metadata": {"name": "engines"}})
        for namespace in ("kube-system", "engines"):
            accounts = f"/api/v1/namespaces/{namespace}/serviceaccounts"
            wait_for(partial(api.exists, f"{accounts}/default"), why="no ServiceAccount")
        api.create(accounts, {"metadata": {"name": "hostprep-agent"}})
        # It takes effect with a delay.
        wait_for(lambda: _why_refused(cluster.api, _pod("/run/hostprep")), why="no policy")
        yield cluster


@pytest.fixture
def api(cluster: ControlPlane) -> Api:
    return cluster.api


def _pod(path: str, kind: str = "containers", **mount: Any) -> dict[str, Any]:
    """A pod that mounts a path of the node's in a container of that kind."""
    pod: dict[str, Any] = {
        "metadata": {"generateName": "engine-"},
        "spec": {
            "volumes": [
                {"name": "host", "hostPath": {"path": path}},
                {"name": "tmp", "emptyDir": {}},
            ],
            "containers": [{"name": "plain", "image": "engine:1"}],
        },
    }
    mounts = [
        {"name": "tmp", "mountPath": "/tmp"},
        {"name": "host", "mountPath": "/run/hostprep", **mount},
    ]
    container = {"name": "engine", "image": "engine:1", "volumeMounts": mounts}
    pod["spec"].setdefault(kind, []).append(container)
    return pod


def _why_refused(api: Api, pod: dict[str, Any], namespace: str = "engines") -> str:
    try:
        api.create(_PODS.format(namespace), copy.deepcopy(pod), **_DRY_RUN)
    except ApiError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("kind", ["containers", "initContainers"])
@pytest.mark.parametrize(
    "path",
    [
        *("/run/hostprep", "/run/hostprep/", "/run", "/", "//run//hostprep", "/run/./hostprep"),
        *("/var/run/hostprep", "/var/run", "/run/hostprep/hostprep.pyz"),
    ],
)
def test_who_could_write_all_pools_is_refused(api: Api, path: str, kind: str) -> None:
    why = _why_refused(api, _pod(path, kind))
    assert "container engine may be root and write /run/hostprep" in why, why
    assert "runAsNonRoot: true" in why
    assert _why_refused(api, _pod(path, kind, readOnly=True)) == ""


@pytest.mark.parametrize(
    "path",
    [
        *("/run/hostprep/kv", "/run/hostprep/turnstile", "/run/hostprep-other", "/run/host"),
        *("/var/lib", "/data/run/hostprep"),
    ],
)
def test_a_pool_and_what_is_not_ours_may_be_written(api: Api, path: str) -> None:
    assert _why_refused(api, _pod(path)) == ""


@pytest.mark.parametrize("of", ["pod", "container"])
def test_who_cannot_be_root_may_mount_all_pools(api: Api, of: str) -> None:
    pod = _pod("/run/hostprep")
    engine = pod["spec"]["containers"][-1]
    engine["securityContext"] = {"allowPrivilegeEscalation": False}
    bearer = pod["spec"] if of == "pod" else engine
    bearer.setdefault("securityContext", {})["runAsNonRoot"] = True
    assert _why_refused(api, pod) == ""
    engine["securityContext"]["allowPrivilegeEscalation"] = True
    assert "may be root" in _why_refused(api, pod)
    engine["securityContext"] = {"allowPrivilegeEscalation": False, "runAsNonRoot": False}
    assert "may be root" in _why_refused(api, pod)


@pytest.mark.parametrize("path", HOST_PATH_MANIFESTS, ids=lambda path: path.stem)
def test_no_example_is_refused_not_even_as_root(api: Api, path: Path) -> None:
    """What it mounts keeps it from the folder of all pools, whoever changes its user."""
    (spec,) = _engine_specs(path)
    assert _why_refused(api, {"metadata": {"generateName": "engine-"}, "spec": spec}) == ""
    spec.pop("securityContext", None)
    for container in (*spec.get("initContainers", ()), *spec["containers"]):
        container.pop("securityContext", None)
    pod = {"metadata": {"generateName": "engine-"}, "spec": spec}
    assert _why_refused(api, pod) == ""
    for container in (*spec.get("initContainers", ()), *spec["containers"]):
        for mount in container["volumeMounts"]:
            mount["readOnly"] = False
    assert "may be root and write /run/hostprep" in _why_refused(api, pod)


def _engine_specs(path: Path) -> list[dict[str, Any]]:
    return list(pod_specs([d for d in documents(path) if d["kind"] in ("Pod", "Deployment")]))


def test_a_sub_path_counts(api: Api) -> None:
    assert _why_refused(api, _pod("/run/hostprep", subPath="kv")) == ""
    assert "write /run/hostprep" in _why_refused(api, _pod("/run", subPath="hostprep"))


def test_our_agent_and_exempt_namespaces_may(api: Api) -> None:
    pod = _pod("/run/hostprep")
    assert _why_refused(api, pod, "kube-system") == ""
    assert "write /run/hostprep" in _why_refused(api, pod, NAMESPACE)
    pod["spec"]["serviceAccountName"] = "hostprep-agent"
    assert _why_refused(api, pod, NAMESPACE) == ""
    assert "write /run/hostprep" in _why_refused(api, pod)


def test_a_pod_without_host_paths_is_not_looked_at(api: Api) -> None:
    pod = _pod("/run/hostprep")
    pod["spec"]["volumes"][0] = {"name": "host", "emptyDir": {}}
    assert _why_refused(api, pod) == ""


@pytest.mark.parametrize(
    ("action", "actions"), [("Warn", ["Warn", "Audit"]), ("Deny", ["Deny"]), ("None", None)]
)
def test_the_action_is_chosen_by_a_value(action: str, actions: list[str] | None) -> None:
    objects = render("--set", f"engineAdmissionPolicy.action={action}")
    bindings = [
        item["spec"]["validationActions"]
        for item in objects
        if item["kind"] == "ValidatingAdmissionPolicyBinding"
        and item["metadata"]["name"] == "hostprep-engines"
    ]
    assert bindings == ([actions] if actions else [])


def test_warning_is_what_happens_by_default() -> None:
    assert [
        item["spec"]["validationActions"]
        for item in render()
        if item["metadata"]["name"] == "hostprep-engines" and "Binding" in item["kind"]
    ] == [["Warn", "Audit"]]
