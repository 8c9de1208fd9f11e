"""The project's chart on a testbed with a real node: installed from nothing, waited for."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from hostprep.errors import FailedError
from testbed.api import APPLY_PATCH, Api
from testbed.control_plane import ControlPlane
from testbed.operator_process import POOLS, pool_object
from testbed.processes import wait_for

NAMESPACE = "hostprep-system"
RELEASE = "hostprep"
IMAGE = ("--set", "image.registry=localhost")
"""For helm: images of the testbed come from no registry, they are in the nodes' stores."""
_CHART = Path(__file__).parents[1] / "charts" / "hostprep"
# An emulated agent that is replaced is away for longer than the minute that a real one is given.
_PATIENT = ("--set", "operator.extraArgs={--agent-grace=300}")
_CRD_PATH = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
_PRIVILEGED = {"pod-security.kubernetes.io/enforce": "privileged"}


def apply_crds(api: Api) -> list[str]:
    """Apply every CRD of the chart, whatever there is, and wait until they are served."""
    resources: list[dict[str, Any]] = []
    for path in sorted((_CHART / "files" / "crds").glob("*.yaml")):
        for document in yaml.safe_load_all(path.read_text()):
            name = document["metadata"]["name"]
            api.patch(
                f"{_CRD_PATH}/{name}",
                document,
                content_type=APPLY_PATCH,
                fieldManager="testbed",
                force="true",
            )
            resources.append(document)
    for resource in resources:
        wait_for(partial(_is_served, api, resource), why=f"{resource['metadata']} is not served")
    return [resource["metadata"]["name"] for resource in resources]


def _is_served(api: Api, resource: dict[str, Any]) -> bool:
    # More than condition Established: a while longer the server says 429, storage initializing.
    spec = resource["spec"]
    path = f"/apis/{spec['group']}/{spec['versions'][0]['name']}/{spec['names']['plural']}"
    return api.request("GET", path).status == 200


def install_chart(
    cluster: ControlPlane, *, release: str = RELEASE, arguments: Sequence[str] = ()
) -> None:
    """`helm install` as docs/install.md has it; `arguments` follow, such as `--set`.

    The image is in the node's store already. Raises ClientError.
    """
    if not cluster.api.exists(f"/api/v1/namespaces/{NAMESPACE}"):
        metadata = {"name": NAMESPACE, "labels": _PRIVILEGED}
        cluster.api.create("/api/v1/namespaces", {"metadata": metadata})
    cluster.helm(
        "install", release, str(_CHART), "--namespace", NAMESPACE, *IMAGE, *_PATIENT, *arguments
    )


def wait_for_deletion_protection(api: Api, *, timeout_s: float = 10.0) -> None:
    """Wait until the chart's policy keeps pools from being deleted: it acts a while later."""
    probe = pool_object("probe", nodeSelector={"a": "b"}, deletionProtection="Always")
    api.create(POOLS, probe)

    def is_enforced() -> bool:
        return api.request("DELETE", f"{POOLS}/probe?dryRun=All").status in {403, 422}

    wait_for(is_enforced, timeout_s, why="the policy is not enforced")
    api.patch(f"{POOLS}/probe", {"spec": {"deletionProtection": "None"}})
    api.delete(f"{POOLS}/probe")


def scale_operator(cluster: ControlPlane, replicas: int) -> None:
    """Scale the operator's Deployment; to 0 where it is to run elsewhere."""
    scale = ("-n", NAMESPACE, "scale", f"deployment/{RELEASE}-operator", f"--replicas={replicas}")
    cluster.kubectl(*scale)


def wait_for_chart(cluster: ControlPlane, *, timeout_s: float = 300.0) -> None:
    """Wait until operator and agents of the present version run, and are Ready.

    Raises FailedError with what the pods say of themselves.
    """
    deadline_s = time.monotonic() + timeout_s
    while not _chart_is_there(cluster.api):
        if time.monotonic() > deadline_s:
            pods = cluster.kubectl("describe", "pods", "--namespace", NAMESPACE)
            raise FailedError(f"the chart's pods were not ready after {timeout_s:.0f} s:\n{pods}")
        time.sleep(0.5)


def is_rolled_out(workload: dict[str, Any]) -> bool:
    """Whether a Deployment or DaemonSet has all its pods of the present version available.

    As `kubectl rollout status` judges; a DaemonSet that wants no pod at all does not count.
    """
    status = workload.get("status", {})
    if status.get("observedGeneration") != workload["metadata"]["generation"]:
        return False
    if "desiredNumberScheduled" in status:
        wanted = status["desiredNumberScheduled"]
        updated = status.get("updatedNumberScheduled", 0)
        available = status.get("numberAvailable", 0)
    else:
        wanted = workload["spec"]["replicas"]
        updated = status.get("updatedReplicas", 0)
        available = status.get("availableReplicas", 0)
        if status.get("replicas", 0) > updated:
            return False
    return bool(wanted > 0 and updated >= wanted and available >= wanted)


def _chart_is_there(api: Api) -> bool:
    found: list[dict[str, Any]] = []
    for plural in ("deployments", "daemonsets"):
        items = api.get(f"/apis/apps/v1/namespaces/{NAMESPACE}/{plural}")["items"]
        if not items:
            return False
        found += items
    return all(is_rolled_out(workload) for workload in found)
