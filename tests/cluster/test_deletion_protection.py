"""Pools are not deleted by a slip: the API server itself refuses, and says what to do."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import yaml

from testbed.api import ApiError
from testbed.chart import wait_for_deletion_protection
from testbed.control_plane import ClientError, ControlPlane
from testbed.processes import wait_for
from tests.cluster.charts import CHART, cluster_with_the_chart

pytestmark = pytest.mark.cluster

_CRD = yaml.safe_load((CHART / "files" / "crds" / "hostmemorypools.yaml").read_text())
_VERSIONS = [version["name"] for version in _CRD["spec"]["versions"] if version["served"]]
_MERGE = "application/merge-patch+json"


@pytest.fixture(scope="module")
def cluster() -> Iterator[ControlPlane]:
    with cluster_with_the_chart() as cluster:
        wait_for_deletion_protection(cluster.api)
        yield cluster


def _path(version: str) -> str:
    return f"/apis/hostprep.dev/{version}/hostmemorypools"


def _make(
    cluster: ControlPlane,
    version: str,
    name: str,
    *,
    protection: str | None = None,
    leased: int = 0,
) -> None:
    spec: dict[str, Any] = {"nodeSelector": {"a": "b"}, "size": "1Gi"}
    if protection is not None:
        spec["deletionProtection"] = protection
    pool = {"metadata": {"name": name}, "spec": spec}
    body = {"apiVersion": f"hostprep.dev/{version}", "kind": "HostMemoryPool", **pool}
    cluster.api.create(_path(version), body)
    _lease(cluster, version, name, leased)


def _lease(cluster: ControlPlane, version: str, name: str, leased: int) -> None:
    reply = cluster.api.request(
        "PATCH",
        f"{_path(version)}/{name}/status",
        {"status": {"leased": leased}},
        content_type=_MERGE,
    )
    assert reply.status == 200, reply.body
    assert reply.body["status"].get("leased", 0) == leased, "the resource has no status.leased"


def _refusal(delete: Callable[[], object]) -> str:
    with pytest.raises((ClientError, ApiError)) as caught:
        delete()
    return str(caught.value)


@pytest.mark.parametrize("version", _VERSIONS)
def test_a_pool_in_use_is_not_deleted_until_its_engines_ended(
    version: str, cluster: ControlPlane
) -> None:
    _make(cluster, version, "kv", leased=3)
    said = _refusal(lambda: cluster.kubectl("delete", "hmp", "kv"))
    assert "pool kv is in use on 3 node(s)" in said
    assert "stop the engines there" in said
    assert cluster.api.exists(f"{_path(version)}/kv")
    _lease(cluster, version, "kv", 0)
    cluster.kubectl("delete", "hmp", "kv")
    assert not cluster.api.exists(f"{_path(version)}/kv")


@pytest.mark.parametrize(("protection", "leased"), [("Always", 0), ("WhileLeased", 1)])
@pytest.mark.parametrize("version", _VERSIONS)
def test_the_command_that_the_refusal_names_lets_it_go(
    version: str, protection: str, leased: int, cluster: ControlPlane
) -> None:
    _make(cluster, version, "kv", protection=protection, leased=leased)
    said = _refusal(lambda: cluster.kubectl("delete", "hmp", "kv"))
    assert f"spec.deletionProtection is {protection}" in said
    named = re.search(r"kubectl (patch hmp kv --type merge -p '[^']*')", said)
    assert named is not None, said
    cluster.kubectl(*shlex.split(named[1]))
    cluster.kubectl("delete", "hmp", "kv")
    assert not cluster.api.exists(f"{_path(version)}/kv")


def test_without_protection_a_leased_pool_goes_at_once(cluster: ControlPlane) -> None:
    _make(cluster, "v1alpha1", "kv", protection="None", leased=9)
    cluster.kubectl("delete", "hmp", "kv")
    assert not cluster.api.exists(f"{_path('v1alpha1')}/kv")


@pytest.mark.parametrize("version", _VERSIONS)
def test_deleting_all_of_them_spares_those_that_are_protected(
    version: str, cluster: ControlPlane
) -> None:
    """`kubectl delete hmp --all`, and a request that deletes the collection."""
    _make(cluster, version, "leased", leased=1)
    _make(cluster, version, "kept", protection="Always")
    assert cluster.api.request("DELETE", _path(version)).status >= 400
    _refusal(lambda: cluster.kubectl("delete", "hmp", "--all"))
    names = {item["metadata"]["name"] for item in cluster.api.get(_path(version))["items"]}
    assert names == {"leased", "kept"}
    for name in names:
        patch = json.dumps({"spec": {"deletionProtection": "None"}})
        cluster.kubectl("patch", "hmp", name, "--type", "merge", "-p", patch)
    cluster.kubectl("delete", "hmp", "--all")
    assert cluster.api.get(_path(version))["items"] == []


def test_the_definition_can_still_be_deleted_whole(cluster: ControlPlane) -> None:
    """Kubernetes deletes the objects of a definition by itself, past admission: no deadlock."""
    _make(cluster, "v1alpha1", "last", protection="Always")
    name = "hostmemorypools.hostprep.dev"
    cluster.kubectl("delete", "crd", name, "--timeout=60s")
    path = f"/apis/apiextensions.k8s.io/v1/customresourcedefinitions/{name}"
    wait_for(lambda: not cluster.api.exists(path), 60, why="the definition is still there")
