"""`kubectl hostprep`, as krew installs it: its archive, the real kubectl, a real API server.

Its `doctor` needs a kubelet: tests/node/test_krew_plugin.py.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
import subprocess
import sys
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from hostprep.api.node_resource import Phase
from testbed.api import Api
from testbed.binaries import find
from testbed.chart import apply_crds, wait_for_deletion_protection
from testbed.control_plane import ControlPlane
from testbed.nodes import create_node, node_object
from testbed.operator_process import HMNS, NODES, POOLS, OperatorProcess, pool_object
from testbed.processes import wait_for
from testbed.simulated_agents import SimulatedAgents
from tests.cluster.charts import render

pytestmark = pytest.mark.cluster

JsonObject = dict[str, Any]
Run = Callable[..., "subprocess.CompletedProcess[str]"]
ROOT = Path(__file__).parents[2]
LABEL = "pool.hostprep.dev/kv"
NAMES = ("n1", "n2", "n3")
_RBAC = "/apis/rbac.authorization.k8s.io/v1"


@pytest.fixture
def cluster(private_control_plane: ControlPlane) -> ControlPlane:
    apply_crds(private_control_plane.api)
    return private_control_plane


@pytest.fixture
def api(cluster: ControlPlane) -> Api:
    return cluster.api


@pytest.fixture
def agents(api: Api) -> Iterator[SimulatedAgents]:
    agents = SimulatedAgents(api)
    yield agents
    agents.close()


@pytest.fixture
def plugin(cluster: ControlPlane, tmp_path: Path) -> Run:
    """Runs `kubectl hostprep ...`, installed from what scripts/krew.py builds."""
    output = tmp_path / "dist"
    subprocess.run([sys.executable, "scripts/krew.py", f"--output={output}"], check=True, cwd=ROOT)
    content = (output / "kubectl-hostprep.tar.gz").read_bytes()
    manifest = yaml.safe_load((output / "hostprep.yaml").read_text())
    (platform,) = manifest["spec"]["platforms"]
    assert platform["sha256"] == hashlib.sha256(content).hexdigest()
    folder = tmp_path / "bin"
    with tarfile.open(fileobj=io.BytesIO(content)) as archive:
        archive.extractall(folder, filter="data")
    assert os.access(folder / platform["bin"], os.X_OK)
    work = tmp_path / "work"
    work.mkdir()
    kubectl = find("kubectl")
    path = f"{folder}:{kubectl.parent}:{Path(sys.executable).parent}:/usr/bin:/bin"
    environ = {"PATH": path, "HOME": str(tmp_path), "KUBECONFIG": str(cluster.kubeconfig)}

    def run(*arguments: str, **changed: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [str(kubectl), "hostprep", *arguments],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
            env=environ | changed,
            cwd=work,
        )

    return run


@pytest.fixture
def operator(cluster: ControlPlane, api: Api, agents: SimulatedAgents) -> OperatorProcess:
    """Pool kv is Ready on n1 and n2, and failed on n3."""
    agents.phase = lambda node, _entry: Phase.FAILED if node == "n3" else Phase.READY
    operator = OperatorProcess(cluster, "--agent-liveness=off")
    for name in NAMES:
        create_node(api, node_object(name, labels={LABEL: "true"}))
    api.create(POOLS, pool_object("kv", nodeSelector={LABEL: "true"}))
    wait_for(lambda: _counts(api) == (3, 2, 1), why="the pool is not where it should be")
    return operator


def _counts(api: Api) -> tuple[int | None, ...]:
    said = api.get(f"{POOLS}/kv").get("status") or {}
    return tuple(said.get(name) for name in ("selected", "ready", "failed"))


def test_status_shows_shares_of_pools_and_nodes_worst_first(
    plugin: Run, operator: OperatorProcess
) -> None:
    done = plugin("status")
    assert done.returncode == 0, done.stderr
    heads, pool, _, node_heads, node, more = done.stdout.splitlines()
    row = dict(zip(heads.split(), pool.split(), strict=True))
    assert (row["READY"], row["SHARE"], row["FAILED"]) == ("2/3", "66.7%", "1")
    assert row["OLDEST"].endswith("s")
    assert node_heads.split()[:3] == ["NODE", "POOL", "PHASE"]
    assert node.split()[:3] == ["n3", "kv", "Failed"]
    assert "and 2 more" in more
    told = json.loads(plugin("status", "kv", "-o", "json").stdout)
    assert [row["node"] for row in told["nodes"]] == ["n3", "n1", "n2"]
    assert told["pools"][0]["readyPercent"] == 66.7
    assert len(plugin("status", "--all").stdout.splitlines()) == 7


def test_release_refuses_where_regions_are_leased_and_names_the_nodes(
    plugin: Run, operator: OperatorProcess, agents: SimulatedAgents, api: Api
) -> None:
    agents.held = {"n2"}
    agents.report()
    versions = _versions(api)
    for options in ((), ("--dry-run",), ("--yes",), ("--node=n2", "--yes")):
        done = plugin("release", "kv", *options)
        assert done.returncode == 2, done.stdout
        assert "on 1 nodes: n2" in done.stderr
        assert "--force leased" in done.stderr
    done = plugin("release", "kv", "--yes", "-o", "json")
    assert (done.returncode, json.loads(done.stdout)["reason"]) == (2, "Leased")
    assert _versions(api) == versions
    assert plugin("release", "kv", "--node=n1", "--dry-run").returncode == 0, "not leased there"


def test_a_released_pool_is_saved_first_and_comes_back_by_apply(
    plugin: Run, operator: OperatorProcess, api: Api, cluster: ControlPlane, tmp_path: Path
) -> None:
    before = api.get(f"{POOLS}/kv")["spec"]
    done = plugin("release", "kv")
    assert done.returncode == 2, "nobody confirmed it"
    assert "--yes" in done.stderr
    done = plugin("release", "kv", "--dry-run", "-o", "json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["nodes"] == list(NAMES)
    assert api.exists(f"{POOLS}/kv")
    done = plugin("release", "kv", "--yes", "-o", "json")
    assert done.returncode == 0, done.stderr
    assert not api.exists(f"{POOLS}/kv")
    wait_for(lambda: _shown(plugin)["n1"]["keptUntil"], why="the plugin does not show it")
    shown = _shown(plugin)
    assert {name: row["phase"] for name, row in shown.items()} == {
        **dict.fromkeys(("n1", "n2"), "Leaving"),
        "n3": "Failed",
    }
    heads, pool, *_, last = plugin("status").stdout.splitlines()
    counts = dict(zip(heads.split(), pool.replace(" (deleted)", "").split(), strict=True))
    assert (counts["LEAVING"], counts["RELEASING"]) == ("3", "0")
    assert f"kept at least until {shown['n2']['keptUntil']}" in last
    saved = tmp_path / "work" / json.loads(done.stdout)["saved"]
    cluster.kubectl("apply", "-f", str(saved))
    assert api.get(f"{POOLS}/kv")["spec"] == before


def test_a_pool_with_old_spellings_comes_back_by_apply(
    plugin: Run, api: Api, cluster: ControlPlane, tmp_path: Path
) -> None:
    """As the defaults of earlier versions stored them, and v1beta1 refuses them."""
    old: JsonObject = {"attach": {"mode": "hostPath"}, "boot": "none"}
    before = api.create(POOLS, pool_object("kv", **old))["spec"]
    assert before.items() >= old.items()
    done = plugin("release", "kv", "--yes", "--save=kv.json")
    assert done.returncode == 0, done.stderr
    cluster.kubectl("apply", "-f", str(tmp_path / "work" / "kv.json"))
    assert api.get(f"{POOLS}/kv")["spec"] == before


def test_a_pool_without_a_selector_comes_back_by_apply(
    pool_without_selector: Api, cluster: ControlPlane, plugin: Run, tmp_path: Path
) -> None:
    before = pool_without_selector.get(f"{POOLS}/kv")["spec"]
    done = plugin("release", "kv", "--yes", "--save=kv.json")
    assert done.returncode == 0, done.stderr
    cluster.kubectl("apply", "-f", str(tmp_path / "work" / "kv.json"))
    assert pool_without_selector.get(f"{POOLS}/kv")["spec"] == {**before, "allNodes": True}


def test_pools_saved_as_the_page_on_uninstalling_says_come_back_by_apply(
    cluster: ControlPlane, api: Api, tmp_path: Path
) -> None:
    page = (ROOT / "docs" / "uninstall.md").read_text()
    named = re.search(r"^kubectl (get \S+ -o yaml) > pools.yaml$", page, re.MULTILINE)
    assert named is not None
    before = api.create(POOLS, pool_object("kv", attach={"mode": "hostPath"}, boot="none"))
    (tmp_path / "pools.yaml").write_text(cluster.kubectl(*named[1].split()))
    api.delete(f"{POOLS}/kv")
    cluster.kubectl("apply", "-f", str(tmp_path / "pools.yaml"))
    assert api.get(f"{POOLS}/kv")["spec"] == before["spec"]


@pytest.fixture
def protected(
    operator: OperatorProcess, agents: SimulatedAgents, cluster: ControlPlane, api: Api
) -> Api:
    """The chart keeps pools in use from being deleted, and pool kv is leased on n2."""
    for document in render():
        if document["kind"].startswith("ValidatingAdmissionPolicy"):
            cluster.kubectl("apply", "-f", "-", stdin=json.dumps(document))
    wait_for_deletion_protection(api)
    agents.held = {"n2"}
    agents.report()
    wait_for(lambda: api.get(f"{POOLS}/kv")["status"].get("leased") == 1, why="it is not leased")
    return api


def test_release_of_what_is_leased_goes_on_when_forced_past_the_charts_policy(
    protected: Api, cluster: ControlPlane, plugin: Run, tmp_path: Path
) -> None:
    before = protected.get(f"{POOLS}/kv")["spec"]
    assert before["deletionProtection"] == "WhileLeased"
    done = plugin("release", "kv", "--force=leased", "--yes", "--save=kv.json")
    assert done.returncode == 0, done.stderr
    assert not protected.exists(f"{POOLS}/kv")
    cluster.kubectl("apply", "-f", str(tmp_path / "work" / "kv.json"))
    assert protected.get(f"{POOLS}/kv")["spec"] == before


def test_a_pool_that_could_not_be_deleted_is_as_it_was_and_the_same_command_can_be_tried_again(
    protected: Api, cluster: ControlPlane, plugin: Run, tmp_path: Path
) -> None:
    """For want of a right, which is given afterwards."""
    before = protected.get(f"{POOLS}/kv")["spec"]
    verbs = ["get", "list", "patch"]
    rule = {"apiGroups": ["hostprep.dev"], "resources": ["*"], "verbs": verbs}
    role = f"{_RBAC}/clusterroles/half"
    protected.create(role.rpartition("/")[0], {"metadata": {"name": "half"}, "rules": [rule]})
    account = "--serviceaccount=default:default"
    cluster.kubectl("create", "clusterrolebinding", "half", "--clusterrole=half", account)
    half = cluster.token_kubeconfig("default", "default")
    command = ("release", "kv", "--force=leased", "--yes", "--save=kv.json")
    done = plugin(*command, KUBECONFIG=str(half))
    assert done.returncode == 1, done.stdout
    assert "cannot delete" in done.stderr
    assert "the pool is as it was" in done.stderr
    assert not (tmp_path / "work" / "kv.json").exists()
    assert protected.get(f"{POOLS}/kv")["spec"] == before
    verbs.append("delete")
    protected.patch(role, {"rules": [rule]})
    wait_for(lambda: plugin(*command, KUBECONFIG=str(half)).returncode == 0, why="it is refused")
    saved = json.loads((tmp_path / "work" / "kv.json").read_text())
    assert saved["spec"] == before


@pytest.mark.parametrize("field", ["size", "regionSize"])
def test_a_size_may_be_a_number_of_bytes(plugin: Run, api: Api, field: str) -> None:
    pool = pool_object("kv")
    del pool["spec"]["size"]
    pool["spec"][field] = 8589934592
    api.create(POOLS, pool)
    done = plugin("status")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[1].split()[:2] == ["kv", "8589934592"]
    assert json.loads(plugin("status", "-o", "json").stdout)["pools"][0]["size"] == "8589934592"


def _shown(plugin: Run) -> dict[str, JsonObject]:
    rows = json.loads(plugin("status", "kv", "-o", "json").stdout or '{"nodes": []}')["nodes"]
    return {row["node"]: row for row in rows}


def test_a_file_that_exists_is_not_written_over_and_nothing_is_deleted(
    plugin: Run, operator: OperatorProcess, api: Api, tmp_path: Path
) -> None:
    (tmp_path / "work" / "kept.json").write_text("mine")
    done = plugin("release", "kv", "--yes", "--save=kept.json")
    assert done.returncode == 2, done.stdout
    assert (tmp_path / "work" / "kept.json").read_text() == "mine"
    assert api.exists(f"{POOLS}/kv")


def test_one_node_is_released_by_taking_its_label_off(
    plugin: Run, operator: OperatorProcess, api: Api
) -> None:
    api.patch(f"{NODES}/n1", {"metadata": {"labels": {LABEL: "rack-1"}}})
    terms = [{"matchExpressions": [{"key": LABEL, "operator": "Exists"}]}]
    api.patch(f"{POOLS}/kv", {"spec": {"nodeSelector": None, "nodeSelectorTerms": terms}})
    done = plugin("release", "kv", "--node=n1", "--yes")
    assert done.returncode == 0, done.stderr
    assert f"kubectl label node n1 {LABEL}=rack-1\n" in done.stdout
    assert LABEL not in api.get(f"{NODES}/n1")["metadata"]["labels"]
    assert LABEL in api.get(f"{NODES}/n2")["metadata"]["labels"]
    assert api.exists(f"{POOLS}/kv")
    again = plugin("release", "kv", "--node=n1", "--yes")
    assert again.returncode == 2
    assert "has no label" in again.stderr


def test_a_pool_with_another_selector_is_not_released_from_one_node(
    plugin: Run, operator: OperatorProcess, api: Api
) -> None:
    api.patch(f"{POOLS}/kv", {"spec": {"nodeSelector": {LABEL: None, "gpu": "h100"}}})
    done = plugin("release", "kv", "--node=n1", "--yes")
    assert done.returncode == 2
    assert "does not select nodes by label" in done.stderr
    assert LABEL in api.get(f"{NODES}/n1")["metadata"]["labels"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("release", "nowhere"), "not found"),
        (("status", "nowhere"), "not found"),
        (("doctor", "nowhere"), "not found"),
        (("doctor", "n1"), "no agent's Pod is on node n1"),
        (("release", "kv", "--force=everything"), "invalid choice"),
        ((), "required"),
    ],
)
def test_bad_input_is_said_with_exit_code_2(
    plugin: Run, api: Api, arguments: tuple[str, ...], said: str
) -> None:
    create_node(api, node_object("n1"))
    done = plugin(*arguments)
    assert done.returncode == 2, done.stdout
    assert said in done.stderr
    assert "Traceback" not in done.stderr


def test_without_the_definitions_or_kubectl_it_says_so(
    private_control_plane: ControlPlane, plugin: Run, api: Api
) -> None:
    done = plugin("status", KUBECTL="/nowhere/kubectl")
    assert done.returncode == 1
    assert "kubectl cannot be run" in done.stderr
    definitions = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
    for item in api.get(definitions)["items"]:
        api.delete(f"{definitions}/{item['metadata']['name']}")
    wait_for(lambda: not api.get(definitions)["items"], 20)
    done = plugin("status")
    assert done.returncode == 2, done.stderr
    assert "knows no HostMemoryPools" in done.stderr


def test_what_a_node_reports_is_no_escape_code(plugin: Run, api: Api) -> None:
    node = create_node(api, node_object("n1"))
    api.create(HMNS, {**_hmn("n1", node["metadata"]["uid"])})
    evil = {"name": "kv", "phase": "Failed", "message": "\x1b]0;pwned\x07", "regions": []}
    api.patch(f"{HMNS}/n1/status", {"status": {"pools": [{**evil, "reason": "X"}]}})
    done = plugin("status")
    assert done.returncode == 0, done.stderr
    assert "\x1b" not in done.stdout
    assert "kv (deleted)" in done.stdout


def _hmn(name: str, uid: str) -> JsonObject:
    owner = {"apiVersion": "v1", "kind": "Node", "name": name, "uid": uid}
    return {
        "apiVersion": "hostprep.dev/v1alpha1",
        "kind": "HostMemoryNode",
        "metadata": {"name": name, "ownerReferences": [owner]},
        "spec": {"pools": [{"name": "kv", "uid": "u", "generation": 1, "state": "Absent"}]},
    }


def _versions(api: Api) -> list[str]:
    """Of what people write: the operator goes on reporting."""
    pool = api.get(f"{POOLS}/kv")["metadata"]
    labels = [api.get(f"{NODES}/{name}")["metadata"]["labels"][LABEL] for name in NAMES]
    return [pool["uid"], str(pool["generation"]), *labels]
