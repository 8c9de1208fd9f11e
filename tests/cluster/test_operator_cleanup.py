"""`hostprep-operator cleanup`: checked first, pools kept, memory given back, no trace left; and
`restore`. With and without an operator."""

from __future__ import annotations

import json
import random
import re
import shlex
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from hostprep_operator.pools_backup import BACKUP_NAME, ORIGINAL_ANNOTATION
from testbed.api import MERGE_PATCH, Api
from testbed.chart import apply_crds
from testbed.control_plane import ControlPlane
from testbed.nodes import create_node, node_object
from testbed.operator_process import (
    HMNS,
    NODES,
    POOLS,
    OperatorProcess,
    parse_last_json,
    pool_object,
    run_command,
    traceless,
)
from testbed.processes import wait_for
from testbed.simulated_agents import SimulatedAgents

pytestmark = pytest.mark.cluster

JsonObject = dict[str, Any]
FOREIGN = {"key": "example.org/mine", "effect": "NoSchedule"}
NAMES = ("n1", "n2", "n3")
SELECTOR = {"example.org/pool": "yes"}
NAMESPACE = "hostprep-system"
CONFIGMAPS = f"/api/v1/namespaces/{NAMESPACE}/configmaps"
PODS = f"/api/v1/namespaces/{NAMESPACE}/pods"
POOL: JsonObject = {
    "apiVersion": "hostprep.dev/v1alpha1",
    "kind": "HostMemoryPool",
    "metadata": {
        "name": "kv",
        "labels": {"app.kubernetes.io/part-of": "inference", "example.org/number": "1e3"},
        "annotations": {"example.org/note": "two\nlines: \u00e4 # no comment", "empty": ""},
    },
    "spec": {"nodeSelector": SELECTOR, "size": "64Mi", "backings": ["Base"], "priority": 7},
}


@pytest.fixture
def cluster(private_control_plane: ControlPlane) -> ControlPlane:
    apply_crds(private_control_plane.api)
    _create_namespace(private_control_plane.api)
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
def before(api: Api) -> list[JsonObject]:
    """Three nodes, as they were before anything of ours came."""
    return [
        create_node(api, node_object(name, labels=SELECTOR, taints=[FOREIGN])) for name in NAMES
    ]


@pytest.fixture
def operator(
    cluster: ControlPlane, api: Api, agents: SimulatedAgents, before: list[JsonObject]
) -> OperatorProcess:
    """An operator that has opened the three nodes for two pools."""
    operator = OperatorProcess(cluster, "--agent-liveness=off")
    operator.wait_ready()
    for name in ("kv", "chat"):
        api.create(POOLS, pool_object(name, nodeSelector=SELECTOR))
    wait_for(lambda: all(_labels(api, name) == {"kv", "chat"} for name in NAMES))
    return operator


def _create_namespace(api: Api) -> None:
    api.create("/api/v1/namespaces", {"metadata": {"name": NAMESPACE}})
    account = f"/api/v1/namespaces/{NAMESPACE}/serviceaccounts"
    api.create(account, {"metadata": {"name": "default"}})


def _cleanup(cluster: ControlPlane, *options: str, agents: str = "off") -> tuple[int, str]:
    return run_command(cluster, "cleanup", "--yes", f"--agent-liveness={agents}", *options)


def _agent_pod(api: Api, node: str, *, ready: bool = True) -> None:
    """The Pod of an agent, as kubelet reports it."""
    labels = {"app.kubernetes.io/name": "hostprep", "app.kubernetes.io/component": "agent"}
    container = {"name": "agent", "image": "x"}
    pod = {
        "metadata": {"name": f"agent-{node}", "labels": labels},
        "spec": {"nodeName": node, "containers": [container]},
    }
    api.create(PODS, pod)
    _set_pod_ready(api, node, ready=ready)


def _set_pod_ready(api: Api, node: str, *, ready: bool) -> None:
    condition = {"type": "Ready", "status": str(ready)}
    api.patch(f"{PODS}/agent-{node}/status", {"status": {"conditions": [condition]}})


def _versions(api: Api) -> dict[str, str]:
    """Every object that a clean-up could write, with its resourceVersion."""
    return {
        f"{path}/{item['metadata']['name']}": item["metadata"]["resourceVersion"]
        for path in (POOLS, HMNS, NODES, CONFIGMAPS)
        for item in api.get(path)["items"]
    }


def _settled_versions(api: Api) -> dict[str, str]:
    """The versions once nobody writes any more."""
    versions: list[dict[str, str]] = []

    def is_settled() -> bool:
        versions.append(_versions(api))
        time.sleep(1.0)
        return versions[-1] == _versions(api)

    wait_for(is_settled, 30.0, why="somebody writes all the time")
    return versions[-1]


def _written_by_people(pool: JsonObject) -> JsonObject:
    """A pool without what the server writes."""
    metadata = {k: pool["metadata"].get(k) for k in ("name", "labels", "annotations")}
    return {"metadata": metadata, "spec": pool["spec"]}


def _apply_backup(cluster: ControlPlane) -> str:
    """What docs/uninstall.md says."""
    text = cluster.kubectl(
        *("-n", NAMESPACE, "get", "configmaps", "-l", "hostprep.dev/backup=pools"),
        *("-o", "jsonpath={.items[*].data.*}"),
    )
    return cluster.kubectl("apply", "-f", "-", stdin=text)


def _labels(api: Api, name: str) -> set[str]:
    labels = api.get(f"{NODES}/{name}")["metadata"]["labels"]
    return {key.partition("/")[2] for key in labels if key.startswith("ready.hostprep.dev/")}


def _leaving(api: Api, pool: str) -> set[str]:
    """The nodes that keep the memory of a pool that asks for it no more."""
    return {
        hmn["metadata"]["name"]
        for hmn in api.get(HMNS)["items"]
        for entry in hmn["spec"]["pools"]
        if entry["name"] == pool and "releaseAfter" in entry
    }


def _is_as_before(api: Api, before: list[JsonObject]) -> bool:
    return [traceless(api.get(f"{NODES}/{name}")) for name in NAMES] == [
        traceless(node) for node in before
    ]


@pytest.mark.parametrize("running", [True, False])
def test_pools_go_memory_is_given_back_and_nodes_are_as_before(
    cluster: ControlPlane,
    api: Api,
    operator: OperatorProcess,
    before: list[JsonObject],
    running: bool,
) -> None:
    if not running:
        operator.child.stop()
    code, printed = _cleanup(cluster, "--timeout=60", "-o", "json")
    assert code == 0, printed
    done = parse_last_json(printed)
    assert sorted(done["pools_deleted"]) == ["chat", "kv"]
    assert done["host_memory_nodes_deleted"] == list(NAMES)
    assert done["still_holding"] == []
    assert api.get(POOLS)["items"] == []
    assert api.get(HMNS)["items"] == []
    assert _is_as_before(api, before)
    code, printed = _cleanup(cluster, "-o", "json")
    assert code == 0, printed
    assert parse_last_json(printed)["nodes_cleaned"] == []


def test_a_node_whose_engine_holds_on_is_named_and_left_for_the_next_run(
    cluster: ControlPlane,
    api: Api,
    operator: OperatorProcess,
    agents: SimulatedAgents,
    before: list[JsonObject],
) -> None:
    agents.held = {"n2"}
    agents.report()
    code, printed = _cleanup(cluster, "--timeout=8", "--force=leased")
    assert code == 1, printed
    assert "1 node still holding memory: n2" in printed
    assert "kv: 1 of 1 regions" in printed
    assert [hmn["metadata"]["name"] for hmn in api.get(HMNS)["items"]] == ["n2"]
    agents.held = set()
    agents.report()
    assert _cleanup(cluster, "--timeout=30")[0] == 0
    assert _is_as_before(api, before)


def test_a_dry_run_says_what_would_go_and_changes_nothing(
    cluster: ControlPlane, api: Api, operator: OperatorProcess
) -> None:
    code, printed = _cleanup(cluster, "--dry-run", "-o", "json")
    assert code == 0
    told = parse_last_json(printed)
    assert told["nodes_cleaned"] == list(NAMES)
    assert sorted(told["pools_deleted"]) == ["chat", "kv"]
    assert len(api.get(POOLS)["items"]) == 2
    assert len(api.get(HMNS)["items"]) == 3


def test_with_keep_memory_marks_go_and_no_instruction_to_release_is_ever_given(
    cluster: ControlPlane, api: Api, operator: OperatorProcess, before: list[JsonObject]
) -> None:
    operator.child.stop()
    code, printed = _cleanup(cluster, "--keep-memory")
    assert code == 0, printed
    assert _is_as_before(api, before)
    assert len(api.get(POOLS)["items"]) == 2, "pools are people's"
    assert api.get(HMNS)["items"] == [], "no instruction: agents keep everything"


def test_keep_memory_beside_a_running_operator_says_that_it_cannot_last(
    cluster: ControlPlane, api: Api, operator: OperatorProcess
) -> None:
    code, printed = _cleanup(cluster, "--keep-memory")
    assert code == 1
    assert "operator is running" in printed
    assert len(api.get(POOLS)["items"]) == 2
    wait_for(lambda: len(api.get(HMNS)["items"]) == 3)
    states = [e["state"] for h in api.get(HMNS)["items"] for e in h["spec"]["pools"]]
    assert set(states) == {"Present"}


def test_after_the_definitions_are_gone_nodes_can_still_be_cleaned(
    cluster: ControlPlane, api: Api, operator: OperatorProcess, before: list[JsonObject]
) -> None:
    operator.child.kill()
    definitions = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
    for item in api.get(definitions)["items"]:
        api.delete(f"{definitions}/{item['metadata']['name']}")
    wait_for(lambda: not api.get(definitions)["items"], 20)
    code, printed = _cleanup(cluster)
    assert code == 0, printed
    assert _is_as_before(api, before)
    assert "no HostMemoryPool is known here" in printed
    code, printed = run_command(cluster, "restore")
    assert code == 2, printed


def test_an_api_server_that_does_not_answer_is_a_failure_with_a_sentence(
    cluster: ControlPlane,
) -> None:
    cluster.kill_api_server()
    code, printed = _cleanup(cluster)
    assert code == 1
    assert "Traceback" not in printed
    cluster.start_api_server()


def test_the_output_is_one_document_for_programs(
    cluster: ControlPlane, api: Api, operator: OperatorProcess
) -> None:
    _, printed = _cleanup(cluster, "--dry-run", "-o", "json")
    assert json.loads(printed)["dry_run"] is True


def test_leased_regions_refuse_and_nothing_is_changed(
    cluster: ControlPlane, api: Api, operator: OperatorProcess, agents: SimulatedAgents
) -> None:
    agents.held = {"n1", "n3"}
    agents.report()
    before = _settled_versions(api)
    code, printed = _cleanup(cluster, "-o", "json")
    assert code == 2, printed
    (refused,) = parse_last_json(printed.partition("hostprep: ")[0])["refused"]
    assert (refused["check"], refused["total"]) == ("leased", 2)
    assert [text.partition(" ")[0] for text in refused["first"]] == ["n1", "n3"]
    assert "--force leased" in printed
    assert "nothing was changed" in printed
    assert _versions(api) == before
    assert _cleanup(cluster, "--dry-run")[0] == 2, "a dry run says whether it would go"


def test_agents_that_cannot_act_refuse_and_nothing_is_changed(
    cluster: ControlPlane, api: Api, operator: OperatorProcess, before: list[JsonObject]
) -> None:
    """One Pod is Ready, one is not, and one node has none."""
    _agent_pod(api, "n1")
    _agent_pod(api, "n2", ready=False)
    versions = _settled_versions(api)
    code, printed = _cleanup(cluster, "-o", "json", agents="pods")
    assert code == 2, printed
    (refused,) = parse_last_json(printed.partition("hostprep: ")[0])["refused"]
    assert (refused["check"], refused["total"]) == ("unreachable", 2)
    assert [text.partition(" ")[0] for text in refused["first"]] == ["n2", "n3"]
    assert _versions(api) == versions
    _set_pod_ready(api, "n2", ready=True)
    _agent_pod(api, "n3")
    code, printed = _cleanup(cluster, "--timeout=60", agents="pods")
    assert code == 0, printed
    assert _is_as_before(api, before)


def test_what_force_unreachable_gives_up_is_named_and_not_waited_for(
    cluster: ControlPlane,
    api: Api,
    operator: OperatorProcess,
    agents: SimulatedAgents,
    before: list[JsonObject],
) -> None:
    agents.silent = {"n3"}
    for name in ("n1", "n2"):
        _agent_pod(api, name)
    code, printed = _cleanup(
        cluster, "--timeout=60", "--force=unreachable", "-o", "json", agents="pods"
    )
    assert code == 0, printed
    assert "given up, their memory stays taken: n3" in printed
    assert [h["metadata"]["name"] for h in api.get(HMNS)["items"]] == ["n3"], "still told to"
    assert [traceless(api.get(f"{NODES}/{name}")) for name in NAMES[:2]] == [
        traceless(node) for node in before[:2]
    ]
    assert _labels(api, "n3") == set()
    operator.child.stop()
    assert _cleanup(cluster, "--keep-memory")[0] == 0, "it never comes back"
    assert _is_as_before(api, before)
    assert api.get(HMNS)["items"] == []


def test_a_pool_that_is_always_protected_takes_a_word_of_its_own(
    cluster: ControlPlane, api: Api
) -> None:
    created = api.create(POOLS, {**POOL, "spec": {**_spec(), "deletionProtection": "Always"}})
    if created["spec"].get("deletionProtection") != "Always":
        pytest.skip("this API has no deletionProtection")
    code, printed = _cleanup(cluster)
    assert code == 2, printed
    assert "--force protected" in printed
    assert (
        api.get(f"{POOLS}/kv")["metadata"]["resourceVersion"]
        == (created["metadata"]["resourceVersion"])
    )
    code, printed = _cleanup(cluster, "--force=protected")
    assert code == 0, printed
    assert not api.exists(f"{POOLS}/kv")
    assert run_command(cluster, "restore")[0] == 0
    assert api.get(f"{POOLS}/kv")["spec"]["deletionProtection"] == "Always"


def test_a_missing_right_is_found_before_anything_is_changed(
    cluster: ControlPlane, api: Api
) -> None:
    """An account that may read everything, and do half of the rest."""
    api.create(POOLS, POOL)
    groups = {"apiGroups": ["*"], "resources": ["*"], "verbs": ["get", "list", "patch"]}
    _grant(api, [groups])
    before = _versions(api)
    reader = cluster.token_kubeconfig(NAMESPACE, "default")
    code, printed = _cleanup(cluster, f"--kubeconfig={reader}")
    assert code == 2, printed
    for right in ("delete hostmemorypools", f"create configmaps in {NAMESPACE}"):
        assert right in printed, printed
    assert "list pods" not in printed
    assert _versions(api) == before


def test_without_the_namespace_it_says_so(cluster: ControlPlane, api: Api) -> None:
    api.create(POOLS, POOL)
    before = _versions(api)
    for command in (("cleanup", "--yes"), ("restore",)):
        code, printed = run_command(cluster, *command, "--namespace=elsewhere")
        assert code == 2, printed
        assert "namespace elsewhere" in printed
    assert _versions(api) == before


@pytest.mark.parametrize("way", ["restore", "kubectl"])
def test_pools_come_back_as_they_were(
    cluster: ControlPlane, api: Api, operator: OperatorProcess, way: str
) -> None:
    api.delete(f"{POOLS}/kv")
    wait_for(lambda: _leaving(api, "kv") == set(NAMES))
    api.create(POOLS, POOL)
    wait_for(lambda: _leaving(api, "kv") == set())
    wait_for(lambda: all(_labels(api, name) == {"kv", "chat"} for name in NAMES))
    pools = [_written_by_people(pool) for pool in api.get(POOLS)["items"]]
    code, printed = _cleanup(cluster, "--timeout=60", "-o", "json")
    assert code == 0, printed
    assert parse_last_json(printed)["backup"] == f"{NAMESPACE}/{BACKUP_NAME}"
    if way == "restore":
        code, printed = run_command(cluster, "restore", "--dry-run", "-o", "json")
        assert (code, parse_last_json(printed)["created"]) == (0, ["chat", "kv"])
        assert api.get(POOLS)["items"] == []
        code, printed = run_command(cluster, "restore", "-o", "json")
        assert (code, parse_last_json(printed)["created"]) == (0, ["chat", "kv"])
    else:
        _apply_backup(cluster)
    restored = [_written_by_people(pool) for pool in api.get(POOLS)["items"]]
    for pool in restored:  # kubectl's own
        annotations = pool["metadata"]["annotations"] or {}
        annotations.pop("kubectl.kubernetes.io/last-applied-configuration", None)
        pool["metadata"]["annotations"] = annotations or None
    assert restored == pools
    wait_for(lambda: all(_labels(api, name) == {"kv", "chat"} for name in NAMES))
    if way == "restore":
        code, printed = run_command(cluster, "restore", "-o", "json")
        assert (code, parse_last_json(printed)["unchanged"]) == (0, ["chat", "kv"])


def test_a_pool_that_is_refused_keeps_no_other_from_being_restored(
    cluster: ControlPlane, api: Api
) -> None:
    """Of before percentages were whole, and first in the alphabet."""
    api.create(POOLS, pool_object("chat", nodeSelector=SELECTOR))
    api.create(POOLS, POOL)
    assert _cleanup(cluster)[0] == 0
    path = f"{CONFIGMAPS}/{BACKUP_NAME}"
    old = json.loads(api.get(path)["data"]["chat.json"])
    del old["spec"]["size"]
    old["spec"]["percent"] = 12.5
    api.patch(path, {"data": {"chat.json": json.dumps(old)}})
    code, printed = run_command(cluster, "restore", "-o", "json")
    told = parse_last_json(printed.partition("hostprep: ")[0])
    assert (code, told["created"], list(told["refused"])) == (1, ["kv"], ["chat"]), printed
    assert "spec.percent" in told["refused"]["chat"]
    assert api.exists(f"{POOLS}/kv")
    state = api.get(path)["metadata"]["annotations"]["hostprep.dev/backup-state"]
    assert state == "complete", "it is restored in part only"
    # As the message says: a copy, mended and applied.
    named = re.search(r"kubectl (-n .* get configmaps .*) > chat.json", printed)
    assert named is not None, printed
    copied = json.loads(cluster.kubectl(*shlex.split(named[1])))
    assert copied == old
    copied["spec"]["percent"] = 12
    cluster.kubectl("apply", "-f", "-", stdin=json.dumps(copied))
    code, printed = run_command(cluster, "restore")
    assert code == 0, printed


def test_a_restored_backup_is_replaced_by_the_next_and_an_interrupted_one_is_added_to(
    cluster: ControlPlane, api: Api
) -> None:
    api.create(POOLS, POOL)
    assert _cleanup(cluster)[0] == 0
    assert _cleanup(cluster)[0] == 0, "nothing is there to keep"
    assert set(api.get(f"{CONFIGMAPS}/{BACKUP_NAME}")["data"]) == {"kv.json"}
    api.create(POOLS, pool_object("later", nodeSelector=SELECTOR))
    assert _cleanup(cluster)[0] == 0
    assert set(api.get(f"{CONFIGMAPS}/{BACKUP_NAME}")["data"]) == {"later.json"}
    is_open = {"metadata": {"annotations": {"hostprep.dev/backup-state": "open"}}}
    api.patch(f"{CONFIGMAPS}/{BACKUP_NAME}", is_open)
    api.create(POOLS, POOL)
    assert _cleanup(cluster)[0] == 0
    assert set(api.get(f"{CONFIGMAPS}/{BACKUP_NAME}")["data"]) == {"kv.json", "later.json"}


def test_pools_beyond_a_megabyte_are_kept_in_several_configmaps(
    cluster: ControlPlane, api: Api
) -> None:
    names = [f"pool-{i}" for i in range(12)]
    for name in names:
        annotations = {"example.org/much": name[-1] * 200_000}
        metadata = {"name": name, "annotations": annotations}
        api.create(POOLS, {**POOL, "metadata": metadata})
    before = [_written_by_people(pool) for pool in api.get(POOLS)["items"]]
    assert _cleanup(cluster)[0] == 0
    parts = api.get(CONFIGMAPS, labelSelector="hostprep.dev/backup=pools")["items"]
    assert len(parts) == 3
    assert run_command(cluster, "restore")[0] == 0
    assert [_written_by_people(pool) for pool in api.get(POOLS)["items"]] == before


@pytest.mark.timeout(900)
def test_killed_at_any_point_and_run_again_it_ends_the_same_way(
    cluster: ControlPlane,
    api: Api,
    operator: OperatorProcess,
    agents: SimulatedAgents,
    before: list[JsonObject],
) -> None:
    """An operator runs beside it; pools must survive in the backup, whatever was cut short."""
    pools = [_written_by_people(pool) for pool in api.get(POOLS)["items"]]
    dice = random.Random(18)
    for _ in range(6):
        for _ in range(dice.randint(1, 3)):
            _kill_after(cluster, dice.uniform(0.4, 3.0))
            _none_is_lost(api, pools)
        code, printed = _cleanup(cluster, "--timeout=60")
        assert code == 0, printed
        assert api.get(POOLS)["items"] == api.get(HMNS)["items"] == []
        wait_for(lambda: _is_as_before(api, before), 20, why="marks are left")
        assert run_command(cluster, "restore")[0] == 0
        assert [_written_by_people(pool) for pool in api.get(POOLS)["items"]] == pools
        wait_for(lambda: all(_labels(api, name) == {"kv", "chat"} for name in NAMES))


def test_restoring_an_interrupted_clean_up_takes_back_what_it_changed(
    cluster: ControlPlane, api: Api
) -> None:
    """Killed between the change that lets a pool go and its deletion."""
    created = api.create(POOLS, POOL)
    assert _cleanup(cluster)[0] == 0
    original = {k: created["spec"].get(k) for k in ("deletionProtection", "release")}
    halfway = {
        **POOL,
        "metadata": {
            **_metadata(),
            "annotations": {
                **_metadata()["annotations"],
                ORIGINAL_ANNOTATION: json.dumps(original),
            },
        },
    }
    changed = {"deletionProtection": "None", "release": {"when": "Immediately"}}
    api.create(POOLS, {**halfway, "spec": {**_spec(), **changed}})
    code, printed = run_command(cluster, "restore", "-o", "json")
    assert (code, parse_last_json(printed)["put_back"]) == (0, ["kv"])
    assert _written_by_people(api.get(f"{POOLS}/kv")) == _written_by_people(created)


def test_a_pool_that_breaks_a_later_rule_is_kept_and_deleted_all_the_same(
    cluster: ControlPlane, api: Api
) -> None:
    """It cannot be changed any more: the server checks the whole spec again."""
    api.create(POOLS, POOL)
    path = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions/hostmemorypools.hostprep.dev"
    definition = api.get(path)
    for version in definition["spec"]["versions"]:
        spec = version["schema"]["openAPIV3Schema"]["properties"]["spec"]
        rule = {"rule": "self.priority < 7", "message": "tightened"}
        spec.setdefault("x-kubernetes-validations", []).append(rule)
    api.replace(path, definition)
    change = {"spec": {"size": "32Mi"}}
    wait_for(lambda: _is_refused(api, change), 20, why="the rule does not apply yet")
    code, printed = _cleanup(cluster, "-o", "json")
    assert code == 0, printed
    assert not api.exists(f"{POOLS}/kv")
    assert "kv.json" in api.get(f"{CONFIGMAPS}/{BACKUP_NAME}")["data"]


def _is_refused(api: Api, change: JsonObject) -> bool:
    path, query = f"{POOLS}/kv", {"dryRun": "All"}
    reply = api.request("PATCH", path, change, content_type=MERGE_PATCH, query=query)
    return reply.status == 422


def _kill_after(cluster: ControlPlane, seconds: float) -> None:
    command = [sys.executable, "-m", "hostprep_operator", "cleanup", "--yes"]
    options = [f"--kubeconfig={cluster.kubeconfig}", "--agent-liveness=off"]
    child = cluster.spawn("cleanup", [*command, *options])
    time.sleep(seconds)
    child.kill()


def _none_is_lost(api: Api, pools: Sequence[JsonObject]) -> None:
    """Every pool exists, or is in the backup as people wrote it."""
    there = {pool["metadata"]["name"] for pool in api.get(POOLS)["items"]}
    for pool in pools:
        name = pool["metadata"]["name"]
        if name not in there:
            kept = json.loads(api.get(f"{CONFIGMAPS}/{BACKUP_NAME}")["data"][f"{name}.json"])
            assert _written_by_people(kept) == pool


def _spec() -> JsonObject:
    return dict(POOL["spec"])


def _metadata() -> JsonObject:
    return dict(POOL["metadata"])


def _grant(api: Api, rules: list[JsonObject]) -> None:
    rbac = "/apis/rbac.authorization.k8s.io/v1"
    api.create(f"{rbac}/clusterroles", {"metadata": {"name": "some"}, "rules": rules})
    role = {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "some"}
    subject = {"kind": "ServiceAccount", "name": "default", "namespace": NAMESPACE}
    body = {"metadata": {"name": "some"}, "roleRef": role, "subjects": [subject]}
    api.create(f"{rbac}/clusterrolebindings", body)
