"""The operator, a real process, against a real API server: from a pool to an open node and back."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from hostprep.api.node_resource import Phase
from testbed.api import Api
from testbed.chart import apply_crds
from testbed.control_plane import ControlPlane
from testbed.nodes import create_node, node_object, reboot_node
from testbed.opening_audit import OpeningAudit
from testbed.operator_process import (
    HMNS,
    NODES,
    POOLS,
    OperatorProcess,
    pool_object,
    traceless,
)
from testbed.processes import wait_for
from testbed.simulated_agents import SimulatedAgents

pytestmark = pytest.mark.cluster

JsonObject = dict[str, Any]
TAINT = "startup-taint.cluster-autoscaler.kubernetes.io/hostprep"
LABEL = "ready.hostprep.dev/kv"
_RELEASING = "hostprep.dev/HostMemoryReleasing"
FOREIGN = {"key": "example.org/mine", "effect": "NoSchedule"}
STARTUP = {"key": TAINT, "effect": "NoSchedule"}


@pytest.fixture(scope="module")
def cluster() -> Iterator[ControlPlane]:
    from tests.cluster.conftest import _started

    cluster = _started()
    apply_crds(cluster.api)
    yield cluster
    cluster.stop()


@pytest.fixture(scope="module")
def operator(cluster: ControlPlane) -> OperatorProcess:
    process = OperatorProcess(cluster, "--agent-liveness=off", "--log-format=json")
    process.wait_ready()
    return process


@pytest.fixture
def api(cluster: ControlPlane, operator: OperatorProcess) -> Iterator[Api]:
    """Everything that a test makes is gone afterwards."""
    yield cluster.api
    for path in (POOLS, HMNS, NODES):
        for item in cluster.api.get(path)["items"]:
            cluster.api.delete(f"{path}/{item['metadata']['name']}")


@pytest.fixture
def agents(api: Api) -> Iterator[SimulatedAgents]:
    agents = SimulatedAgents(api)
    yield agents
    agents.close()


def _node(api: Api, name: str) -> JsonObject:
    return api.get(f"{NODES}/{name}")


def _taints(node: JsonObject) -> list[str]:
    return [taint["key"] for taint in node["spec"].get("taints") or []]


def _is_open(api: Api, name: str) -> bool:
    node = _node(api, name)
    return TAINT not in _taints(node) and node["metadata"]["labels"].get(LABEL) == "true"


def _join(api: Api, name: str, **options: Any) -> JsonObject:
    options = {"labels": {"p": "kv"}, "taints": [FOREIGN, STARTUP]} | options
    return create_node(api, node_object(name, **options))


def _condition(api: Api, name: str, kind: str) -> JsonObject:
    conditions = _node(api, name)["status"].get("conditions") or ()
    return next((one for one in conditions if one["type"] == kind), {})


def _reason(api: Api, name: str) -> str:
    conditions = _node(api, name)["status"]["conditions"]
    ours = [c for c in conditions if c["type"] == "hostprep.dev/HostMemoryReady"]
    return f"{ours[0]['status']} {ours[0]['reason']}" if ours else ""


def test_a_pool_leads_to_specs_and_ready_memory_opens_the_node(
    api: Api, agents: SimulatedAgents
) -> None:
    _join(api, "n1")
    _join(api, "other", labels={"p": "none"})
    api.create(POOLS, pool_object(nodeSelector={"p": "kv"}))
    wait_for(lambda: _is_open(api, "n1"))
    hmn = api.get(f"{HMNS}/n1")
    assert [(e["name"], e["state"]) for e in hmn["spec"]["pools"]] == [("kv", "Present")]
    assert hmn["metadata"]["ownerReferences"][0]["uid"] == _node(api, "n1")["metadata"]["uid"]
    assert _reason(api, "n1") == "True Ready"
    assert _taints(_node(api, "n1")) == [FOREIGN["key"]]
    assert not api.exists(f"{HMNS}/other")
    assert TAINT in _taints(_node(api, "other")), "a node that no pool selects is not ours"
    wait_for(lambda: api.get(f"{POOLS}/kv").get("status", {}).get("ready") == 1)


def test_a_node_stays_closed_until_its_memory_is_ready(api: Api, agents: SimulatedAgents) -> None:
    agents.phase = lambda _node, _entry: Phase.PREPARING
    _join(api, "n1")
    api.create(POOLS, pool_object())
    wait_for(lambda: _reason(api, "n1") == "False Preparing")
    assert TAINT in _taints(_node(api, "n1"))
    agents.phase = lambda _node, _entry: Phase.READY
    agents.report()
    wait_for(lambda: _is_open(api, "n1"))


def test_a_start_up_taint_that_comes_back_on_an_open_node_is_removed_again(
    api: Api, agents: SimulatedAgents
) -> None:
    _join(api, "n1")
    api.create(POOLS, pool_object())
    wait_for(lambda: _is_open(api, "n1"))
    for _ in range(3):
        api.patch(f"{NODES}/n1", {"spec": {"taints": [FOREIGN, STARTUP]}})
        wait_for(lambda: _taints(_node(api, "n1")) == [FOREIGN["key"]])


def test_a_reboot_closes_the_node_at_once_and_only_memory_of_the_new_boot_opens_it(
    api: Api, agents: SimulatedAgents, operator: OperatorProcess
) -> None:
    audit = OpeningAudit(api)
    _join(api, "n1")
    api.create(POOLS, pool_object())
    wait_for(lambda: _is_open(api, "n1"))
    seen = operator.metric("hostprep_operator_reboots_detected_total")
    agents.silent = {"n1"}
    reboot_node(api, "n1")
    wait_for(lambda: TAINT in _taints(_node(api, "n1")), 2)
    wait_for(lambda: _reason(api, "n1") == "False Rebooted", 2)
    assert LABEL not in _node(api, "n1")["metadata"]["labels"]
    time.sleep(0.5)
    assert not _is_open(api, "n1"), "yesterday's status must not open today's boot"
    agents.silent = set()
    agents.report()
    wait_for(lambda: _is_open(api, "n1"))
    assert operator.metric("hostprep_operator_reboots_detected_total") == seen + 1
    wait_for(lambda: audit.openings == 2)  # a watch shows it a moment after a read does
    wait_for(lambda: audit.openings >= 2, 30)  # its watch may be a moment behind
    assert audit.check() == 2


def test_a_deleted_pool_is_released_and_no_trace_of_it_is_left_on_the_node(
    api: Api, agents: SimulatedAgents
) -> None:
    before = _join(api, "n1", taints=[FOREIGN])
    agents.held = {"n1"}
    api.create(POOLS, pool_object(release={"gracePeriodSeconds": 3}))
    wait_for(lambda: _is_open(api, "n1"))
    api.delete(f"{POOLS}/kv")
    wait_for(lambda: _condition(api, "n1", _RELEASING).get("reason") == "GracePeriod")
    assert api.get(f"{HMNS}/n1")["spec"]["pools"][0]["state"] == "Present"
    wait_for(lambda: api.get(f"{HMNS}/n1")["spec"]["pools"][0]["state"] == "Absent", 15)
    assert _condition(api, "n1", _RELEASING)["reason"] in ("Releasing", "Leased")
    assert "policy" not in api.get(f"{HMNS}/n1")["spec"]["pools"][0]
    time.sleep(0.5)
    assert api.exists(f"{HMNS}/n1"), "an engine still holds it: the instruction stays"
    agents.held = set()
    agents.report()
    wait_for(lambda: not api.exists(f"{HMNS}/n1"))
    wait_for(lambda: traceless(_node(api, "n1")) == traceless(before))


def test_nothing_of_kopfs_is_written_on_any_object(
    api: Api, agents: SimulatedAgents, cluster: ControlPlane
) -> None:
    _join(api, "n1")
    api.create(POOLS, pool_object())
    wait_for(lambda: _is_open(api, "n1"))
    wait_for(lambda: api.get(f"{POOLS}/kv").get("status", {}).get("ready") == 1)
    for path in (f"{NODES}/n1", f"{POOLS}/kv", f"{HMNS}/n1"):
        document = api.get(path)
        assert "finalizers" not in document["metadata"]
        assert "kopf" not in json.dumps(document)
        writers = {entry["manager"] for entry in document["metadata"]["managedFields"]}
        assert writers <= {"hostprep-operator", "unknown"}, writers


def test_a_quiet_stretch_with_heartbeats_and_progress_has_no_write_of_the_operators(
    api: Api, agents: SimulatedAgents, operator: OperatorProcess
) -> None:
    for name in ("n1", "n2"):
        _join(api, name)
    api.create(POOLS, pool_object())
    wait_for(lambda: _is_open(api, "n1") and _is_open(api, "n2"))
    wait_for(lambda: api.get(f"{POOLS}/kv").get("status", {}).get("ready") == 2)
    time.sleep(1.5)
    writes = operator.writes()
    versions = [api.get(f"{path}/n1")["metadata"]["resourceVersion"] for path in (NODES, HMNS)]
    for beat in range(30):
        body = {"status": {"conditions": [{"type": "MemoryPressure", "status": "False"}]}}
        body["status"]["conditions"][0]["lastHeartbeatTime"] = f"2026-01-01T00:00:{beat:02}Z"
        api.patch(f"{NODES}/n1/status", body, content_type="application/strategic-merge-patch+json")
        time.sleep(0.1)
    assert operator.writes() == writes
    assert api.get(f"{HMNS}/n1")["metadata"]["resourceVersion"] == versions[1]
    assert api.get(f"{NODES}/n1")["metadata"]["resourceVersion"] != versions[0]


def test_a_restarted_operator_is_in_sync_without_a_write(
    api: Api, agents: SimulatedAgents, operator: OperatorProcess
) -> None:
    _join(api, "n1")
    api.create(POOLS, pool_object())
    wait_for(lambda: _is_open(api, "n1"))
    wait_for(lambda: api.get(f"{POOLS}/kv").get("status", {}).get("ready") == 1)
    time.sleep(1.2)
    versions = [api.get(p)["metadata"]["resourceVersion"] for p in (f"{NODES}/n1", f"{POOLS}/kv")]
    operator.restart()
    operator.wait_ready()
    wait_for(lambda: operator.metric("hostprep_operator_pool_nodes", pool="kv", state="ready") == 1)
    time.sleep(1.0)
    assert operator.writes() == 0
    after = [api.get(p)["metadata"]["resourceVersion"] for p in (f"{NODES}/n1", f"{POOLS}/kv")]
    assert after == versions


def test_a_pool_that_no_node_ever_had_leaves_no_series(api: Api, operator: OperatorProcess) -> None:
    """Whether a pool is gone is asked of the API server only where entries hang on it."""
    series = 'hostprep_operator_pool_paused{pool="kv"}'
    api.create(POOLS, pool_object(nodeSelector={"no-node": "has-this"}))
    wait_for(lambda: series in operator.page("/metrics")[1])
    api.delete(f"{POOLS}/kv")
    wait_for(lambda: series not in operator.page("/metrics")[1])


def test_a_host_memory_node_deleted_by_hand_is_made_anew_and_the_node_stays_open(
    api: Api, agents: SimulatedAgents
) -> None:
    _join(api, "n1")
    api.create(POOLS, pool_object())
    wait_for(lambda: _is_open(api, "n1"))
    uid = api.get(f"{HMNS}/n1")["metadata"]["uid"]
    api.delete(f"{HMNS}/n1")
    wait_for(lambda: api.get(f"{HMNS}/n1")["metadata"]["uid"] != uid)
    wait_for(lambda: _is_open(api, "n1"))


def test_a_node_created_again_under_its_name_gets_a_host_memory_node_of_its_own(
    api: Api, agents: SimulatedAgents
) -> None:
    _join(api, "n1")
    api.create(POOLS, pool_object())
    wait_for(lambda: _is_open(api, "n1"))
    api.delete(f"{NODES}/n1")
    uid = _join(api, "n1")["metadata"]["uid"]
    wait_for(lambda: api.get(f"{HMNS}/n1")["metadata"]["ownerReferences"][0]["uid"] == uid)
    wait_for(lambda: _is_open(api, "n1"))


def test_a_node_whose_name_has_253_characters_is_served_like_any_other(
    api: Api, agents: SimulatedAgents, operator: OperatorProcess
) -> None:
    name = ".".join(["a" * 63] * 3 + ["a" * 61])
    _join(api, name)
    api.create(POOLS, pool_object())
    wait_for(lambda: _is_open(api, name))
    events = "/apis/events.k8s.io/v1/namespaces/default/events"
    wait_for(lambda: any(e["regarding"]["name"] == name for e in api.get(events)["items"]))


def test_a_rollout_changes_no_more_nodes_at_once_than_it_may(
    api: Api, agents: SimulatedAgents
) -> None:
    for number in range(5):
        _join(api, f"n{number}")
    api.create(POOLS, pool_object(rollout={"maxUnavailable": 2}))
    wait_for(lambda: all(_is_open(api, f"n{number}") for number in range(5)))
    agents.phase = lambda _node, entry: Phase.READY if entry.generation == 1 else Phase.RESIZING
    api.patch(f"{POOLS}/kv", {"spec": {"size": "128Mi"}})

    def updated() -> list[str]:
        items = api.get(HMNS)["items"]
        return [
            item["metadata"]["name"]
            for item in items
            if item["spec"]["pools"][0]["policy"]["size"] == "128Mi"
        ]

    wait_for(lambda: len(updated()) == 2)
    time.sleep(2.5)
    first = updated()
    assert len(first) == 2
    agents.phase = lambda node, entry: (
        Phase.READY if entry.generation == 1 or node in first else Phase.RESIZING
    )
    agents.report()
    wait_for(lambda: len(updated()) == 4, 10)
    agents.phase = lambda _node, _entry: Phase.READY
    agents.report()
    wait_for(lambda: len(updated()) == 5, 10)


def test_the_operator_wins_through_while_others_write_to_the_same_node_all_the_time(
    api: Api, agents: SimulatedAgents
) -> None:
    _join(api, "n1")
    stop = threading.Event()

    def scribble() -> None:
        number = 0
        while not stop.is_set():
            number += 1
            api.patch(f"{NODES}/n1", {"metadata": {"labels": {"scribble": str(number)}}})
            time.sleep(0.02)

    thread = threading.Thread(target=scribble, daemon=True)
    thread.start()
    try:
        api.create(POOLS, pool_object(release={"when": "Immediately"}))
        wait_for(lambda: _is_open(api, "n1"), 15)
        api.delete(f"{POOLS}/kv")
        wait_for(lambda: "hostprep.dev/marks" not in json.dumps(_node(api, "n1")), 15)
    finally:
        stop.set()
        thread.join()
    assert "scribble" in _node(api, "n1")["metadata"]["labels"]


def test_events_tell_the_story_on_node_and_pool(api: Api, agents: SimulatedAgents) -> None:
    node = _join(api, "n-events")
    api.create(POOLS, pool_object())
    wait_for(lambda: _is_open(api, "n-events"))
    uid = node["metadata"]["uid"]

    def reasons() -> set[str]:
        items = api.get("/apis/events.k8s.io/v1/namespaces/default/events")["items"]
        return {e["reason"] for e in items if e["regarding"].get("uid") == uid}

    wait_for(lambda: {"MemoryReady", "MemoryClosed"} <= reasons())


def test_probes_and_metrics_answer(api: Api, operator: OperatorProcess) -> None:
    assert operator.page("/healthz") == (200, "ok\n")
    assert operator.page("/readyz") == (200, "ok\n")
    assert operator.metric("hostprep_build_info", component="operator") == 1
    assert operator.metric("hostprep_operator_leader") == 1
    assert operator.metric("hostprep_operator_last_sync_timestamp_seconds") > 1e9
    text = operator.page("/metrics")[1]
    assert "_created" not in text
