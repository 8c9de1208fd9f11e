"""A real API server for the tests of tier `cluster`, and what they all do with it."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from hostprep.errors import NotReadyError
from testbed.api import Api
from testbed.chart import apply_crds
from testbed.control_plane import ControlPlane
from testbed.nodes import create_node, node_object
from testbed.operator_process import POOLS
from testbed.processes import wait_for

JsonObject = dict[str, Any]
_INDEPENDENT = (
    "test_fault_run.py",
    "test_operator_cleanup.py",
    "test_operator_faults.py",
)
"""Each of their tests has a control plane of its own."""
_MACHINE = ("agent/", "test_bad_input.py", "test_story.py")
"""They hold the machine's lock, for its huge pages: one after the other anyway."""
_LONGEST = (*_MACHINE, "test_karpenter.py", *_INDEPENDENT)
"""These begin, or one process would work on after all others have ended."""


def _name_of(nodeid: str) -> str:
    return nodeid.partition("::")[0].removeprefix("tests/cluster/")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest first."""

    def rank(item: pytest.Item) -> int:
        name = _name_of(item.nodeid)
        ranks = (rank for rank, begin in enumerate(_LONGEST) if name.startswith(begin))
        return next(ranks, len(_LONGEST))

    ours = [item for item in items if item.get_closest_marker("cluster")]
    others = [item for item in items if not item.get_closest_marker("cluster")]
    items[:] = [*others, *sorted(ours, key=rank)]


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With `--dist loadfile`, keep in one process what shares something, and no more than that."""
    from xdist.scheduler import LoadFileScheduling  # type: ignore[import-untyped]

    class Scheduling(LoadFileScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            name = _name_of(nodeid)
            if name in _INDEPENDENT:
                return nodeid
            return "machine" if name.startswith(_MACHINE) else name

    return Scheduling(config, log) if config.getoption("dist") == "loadfile" else None


def _started(**options: Any) -> ControlPlane:
    """A control plane, or the test is skipped with what is missing; CI makes that a failure."""
    try:
        cluster = ControlPlane(**options)
    except NotReadyError as error:
        pytest.skip(str(error))
    cluster.start()
    return cluster


@pytest.fixture(scope="session")
def control_plane() -> Iterator[ControlPlane]:
    """Etcd and API server alone, shared by all tests: use names of your own, and tidy up."""
    cluster = _started()
    yield cluster
    cluster.stop()


@pytest.fixture(scope="session")
def full_control_plane() -> Iterator[ControlPlane]:
    """With controller manager (garbage collection, namespaces) and scheduler; shared."""
    cluster = _started(controllers=True, scheduler=True)
    yield cluster
    cluster.stop()


@pytest.fixture
def private_control_plane() -> Iterator[ControlPlane]:
    """Etcd and API server for one test, which may kill them."""
    cluster = _started()
    yield cluster
    cluster.stop()


@pytest.fixture(scope="session")
def api(control_plane: ControlPlane) -> Api:
    """The administrator's client of `control_plane`."""
    return control_plane.api


@pytest.fixture(scope="session")
def kubeconfig(control_plane: ControlPlane) -> Path:
    """The administrator's kubeconfig of `control_plane`."""
    return control_plane.kubeconfig


@pytest.fixture(scope="session")
def kubectl(control_plane: ControlPlane) -> Callable[..., str]:
    """`kubectl("get", "nodes")`; keyword arguments `kubeconfig` and `stdin`."""
    return control_plane.kubectl


@pytest.fixture(scope="session")
def crds(control_plane: ControlPlane) -> list[str]:
    """The chart's custom resources, established on `control_plane`; returns their names."""
    return apply_crds(control_plane.api)


@pytest.fixture
def pool_without_selector(private_control_plane: ControlPlane) -> Api:
    """A cluster in which pool `kv` was stored before a selector was required."""
    api = private_control_plane.api
    apply_crds(api)
    name = "hostmemorypools.hostprep.dev"
    path = f"/apis/apiextensions.k8s.io/v1/customresourcedefinitions/{name}"
    definition = api.get(path)
    for version in definition["spec"]["versions"]:
        schema = version["schema"]["openAPIV3Schema"]["properties"]["spec"]
        rules = schema["x-kubernetes-validations"]
        schema["x-kubernetes-validations"] = [r for r in rules if not r.get("optionalOldSelf")]
        assert len(schema["x-kubernetes-validations"]) == len(rules) - 1
    api.replace(path, definition)
    pool = {"apiVersion": "hostprep.dev/v1alpha1", "kind": "HostMemoryPool"}
    body = {**pool, "metadata": {"name": "kv"}, "spec": {"size": "8Gi"}}

    other = {**body, "metadata": {"name": "other"}}
    wait_for(lambda: api.request("POST", POOLS, body).status == 201, why="the rule is still there")
    apply_crds(api)
    dry = f"{POOLS}?dryRun=All"
    wait_for(lambda: api.request("POST", dry, other).status == 422, why="the rule is not back")
    return api


@pytest.fixture
def make_node(api: Api) -> Iterator[Callable[..., JsonObject]]:
    """`make_node("a", labels=..., taints=..., boot_id=..., ready=..., capacity=...)`, see
    `node_object`: creates the Node and returns it; all are deleted after the test.
    """
    names: list[str] = []

    def make(name: str, **options: Any) -> JsonObject:
        names.append(name)
        return create_node(api, node_object(name, **options))

    yield make
    for name in names:
        api.delete(f"/api/v1/nodes/{name}")


@pytest.fixture
def namespace(api: Api) -> str:
    """A new namespace with a ServiceAccount `default`. It stays: nobody is there to empty it."""
    name = f"test-{secrets.token_hex(4)}"
    api.create("/api/v1/namespaces", {"metadata": {"name": name}})
    path = f"/api/v1/namespaces/{name}/serviceaccounts"
    api.create(path, {"metadata": {"name": "default"}})
    return name
