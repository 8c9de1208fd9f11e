"""The operator when things go wrong: killed, cut off, slowed down, told too little, doubled."""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Iterator
from typing import Any

import pytest

from testbed.api import STRATEGIC_PATCH, Api
from testbed.chart import apply_crds
from testbed.control_plane import ControlPlane
from testbed.fault_proxy import FaultProxy
from testbed.faults import answer, cut, expired
from testbed.nodes import create_node, node_object, reboot_node
from testbed.opening_audit import OpeningAudit
from testbed.operator_process import HMNS, NODES, POOLS, OperatorProcess, pool_object
from testbed.processes import wait_for
from testbed.simulated_agents import SimulatedAgents

pytestmark = pytest.mark.cluster

JsonObject = dict[str, Any]
TAINT = "startup-taint.cluster-autoscaler.kubernetes.io/hostprep"
STARTUP = {"key": TAINT, "effect": "NoSchedule"}
LEASE = "/apis/coordination.k8s.io/v1/namespaces/default/leases/hostprep-operator"


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
def proxy(cluster: ControlPlane) -> Iterator[FaultProxy]:
    with FaultProxy(cluster) as proxy:
        yield proxy


def _join(api: Api, *names: str) -> None:
    for name in names:
        create_node(api, node_object(name, taints=[STARTUP]))


def _open_nodes(api: Api) -> set[str]:
    return {
        node["metadata"]["name"]
        for node in api.get(NODES)["items"]
        if not any(t["key"] == TAINT for t in node["spec"].get("taints") or [])
        and "ready.hostprep.dev/kv" in node["metadata"]["labels"]
    }


def _is_bare(api: Api, name: str) -> bool:
    node = api.get(f"{NODES}/{name}")
    ours = [c for c in node["status"]["conditions"] if c["type"].startswith("hostprep.dev/")]
    return (
        not ours
        and "hostprep.dev/marks" not in node["metadata"].get("annotations", {})
        and not any(key.startswith("ready.") for key in node["metadata"]["labels"])
    )


def test_killed_at_random_twenty_times_it_ends_where_it_should_and_never_opens_wrongly(
    cluster: ControlPlane, api: Api, agents: SimulatedAgents
) -> None:
    chance = random.Random(4)
    audit = OpeningAudit(api)
    names = [f"n{number}" for number in range(6)]
    _join(api, *names)
    operator = OperatorProcess(cluster, "--agent-liveness=off")
    release = {"when": "Immediately"}
    api.create(POOLS, pool_object(rollout={"maxUnavailable": "50%"}, release=release))
    for turn in range(20):
        time.sleep(chance.uniform(0.5, 1.6))
        operator.child.kill()
        match turn % 4:
            case 0:
                reboot_node(api, chance.choice(names))
            case 1:
                api.patch(f"{POOLS}/kv", {"spec": {"size": f"{64 + turn}Mi"}})
            case 2:
                api.delete(f"{HMNS}/{chance.choice(names)}")
            case 3:
                body = {"spec": {"taints": [STARTUP]}}
                api.patch(f"{NODES}/{chance.choice(names)}", body)
        operator.start()
        agents.report()
    wait_for(lambda: agents.report() >= 0 and _open_nodes(api) == set(names), 40, every_s=0.5)
    size = api.get(f"{POOLS}/kv")["spec"]["size"]
    wait_for(
        lambda: {h["spec"]["pools"][0]["policy"]["size"] for h in api.get(HMNS)["items"]} == {size}
    )
    wait_for(lambda: api.get(f"{POOLS}/kv")["status"]["ready"] == len(names))
    api.delete(f"{POOLS}/kv")
    wait_for(lambda: not api.get(HMNS)["items"], 20)
    wait_for(lambda: all(_is_bare(api, name) for name in names))
    wait_for(lambda: audit.openings >= len(names), 30)  # its watch may be a moment behind
    assert audit.check() >= len(names)


def test_an_api_server_that_is_killed_and_comes_back_finds_it_at_work(
    cluster: ControlPlane, api: Api, agents: SimulatedAgents
) -> None:
    operator = OperatorProcess(cluster, "--agent-liveness=off")
    operator.wait_ready()
    _join(api, "n1")
    api.create(POOLS, pool_object())
    wait_for(lambda: _open_nodes(api) == {"n1"})
    cluster.kill_api_server()
    time.sleep(3)
    assert operator.child.alive
    assert operator.page("/healthz")[0] == 200
    cluster.start_api_server()
    _join(api, "n2")
    wait_for(lambda: agents.report() >= 0 and _open_nodes(api) == {"n1", "n2"}, 30)
    reboot_node(api, "n1")
    wait_for(lambda: agents.report() >= 0 and _open_nodes(api) == {"n1", "n2"}, 30)
    assert operator.child.alive


def test_a_pool_deleted_while_its_watch_was_away_and_expired_is_found_by_the_next_list(
    cluster: ControlPlane, api: Api, agents: SimulatedAgents, proxy: FaultProxy
) -> None:
    operator = OperatorProcess(
        cluster, "--agent-liveness=off", "--resync=600", kubeconfig=proxy.admin_kubeconfig()
    )
    operator.wait_ready()
    _join(api, "n1")
    api.create(POOLS, pool_object("other", nodeSelector={"none": "such"}))
    api.create(POOLS, pool_object(release={"when": "Immediately"}))
    wait_for(lambda: _open_nodes(api) == {"n1"})
    with proxy.fault(cut(path=POOLS, watches=True)):
        proxy.cut_watches(POOLS)
        time.sleep(0.3)
        api.delete(f"{POOLS}/kv")
        proxy.add(expired(path=POOLS, times=1))
    wait_for(lambda: not api.get(HMNS)["items"], 20)


def test_a_pool_deleted_while_lists_work_and_watches_do_not_is_found_by_a_list(
    cluster: ControlPlane, api: Api, agents: SimulatedAgents, proxy: FaultProxy
) -> None:
    operator = OperatorProcess(cluster, "--agent-liveness=off", kubeconfig=proxy.admin_kubeconfig())
    operator.wait_ready()
    _join(api, "n1")
    api.create(POOLS, pool_object(release={"when": "Immediately"}))
    wait_for(lambda: _open_nodes(api) == {"n1"})
    with proxy.fault(cut(path=POOLS, watches=True)):
        proxy.cut_watches(POOLS)
        time.sleep(0.3)
        api.delete(f"{POOLS}/kv")
        wait_for(lambda: not api.get(HMNS)["items"], 20)


def test_a_pool_definition_that_is_deleted_releases_no_memory(
    cluster: ControlPlane, api: Api, agents: SimulatedAgents
) -> None:
    operator = OperatorProcess(cluster, "--agent-liveness=off", "--resync=2")
    operator.wait_ready()
    _join(api, "n1")
    api.create(POOLS, pool_object())
    wait_for(lambda: _open_nodes(api) == {"n1"})
    crd = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions/hostmemorypools.hostprep.dev"
    api.delete(crd)
    wait_for(lambda: not api.exists(crd))
    time.sleep(5)  # two lists
    assert api.get(f"{HMNS}/n1")["spec"]["pools"][0]["state"] == "Present"
    assert operator.child.alive
    apply_crds(api)
    api.create(POOLS, pool_object())
    wait_for(lambda: api.get(f"{POOLS}/kv").get("status", {}).get("ready") == 1, 30)


def test_it_waits_for_its_definitions_instead_of_concluding_anything(
    private_control_plane: ControlPlane,
) -> None:
    operator = OperatorProcess(private_control_plane, "--agent-liveness=off")
    wait_for(lambda: operator.page("/healthz")[0] == 200, 20)
    assert operator.page("/readyz")[0] == 503
    apply_crds(private_control_plane.api)
    operator.wait_ready()


def test_answers_of_429_and_broken_watches_delay_it_and_change_nothing(
    cluster: ControlPlane, api: Api, agents: SimulatedAgents, proxy: FaultProxy
) -> None:
    audit = OpeningAudit(api)
    operator = OperatorProcess(cluster, "--agent-liveness=off", kubeconfig=proxy.admin_kubeconfig())
    operator.wait_ready()
    names = {f"n{number}" for number in range(10)}
    proxy.add(answer(429, retry_after_s=1, share=0.3, methods=("PATCH", "POST")))
    proxy.add(answer(500, share=0.1, methods=("PATCH",)))
    _join(api, *names)
    api.create(POOLS, pool_object())
    for _ in range(4):
        time.sleep(1)
        proxy.cut_watches()
        proxy.expire_watches()
    wait_for(lambda: _open_nodes(api) == names, 60)
    proxy.clear()
    wait_for(lambda: audit.openings >= len(names), 30)  # its watch may be a moment behind
    assert audit.check() >= len(names)
    assert operator.child.alive


def test_of_two_replicas_one_works_and_the_other_takes_over_when_it_is_gone(
    cluster: ControlPlane, api: Api, agents: SimulatedAgents
) -> None:
    audit = OpeningAudit(api)
    _join(api, "n1")
    api.create(POOLS, pool_object())
    options = ("--agent-liveness=off", "--leader-elect", "--namespace=default")
    first = OperatorProcess(cluster, *options)
    wait_for(lambda: first.metric("hostprep_operator_leader") == 1, 20)
    second = OperatorProcess(cluster, *options)
    second.wait_ready()
    wait_for(lambda: _open_nodes(api) == {"n1"})
    time.sleep(3)
    assert second.metric("hostprep_operator_leader") == 0
    assert second.writes() == 0
    assert first.child.stop() == 0, "told to stop, it hands the Lease over"
    began = time.monotonic()
    wait_for(lambda: second.metric("hostprep_operator_leader") == 1, 8)
    reboot_node(api, "n1")
    wait_for(lambda: agents.report() >= 0 and _open_nodes(api) == {"n1"})
    assert time.monotonic() - began < 12
    audit.check()


def test_a_replica_that_cannot_renew_its_lease_ends_before_another_takes_over(
    cluster: ControlPlane, api: Api, proxy: FaultProxy
) -> None:
    options = ("--agent-liveness=off", "--leader-elect", "--namespace=default")
    first = OperatorProcess(cluster, *options, kubeconfig=proxy.admin_kubeconfig())
    wait_for(lambda: first.metric("hostprep_operator_leader") == 1, 20)
    second = OperatorProcess(cluster, *options)
    second.wait_ready()
    proxy.add(cut(path="/leases"))
    wait_for(lambda: not first.child.alive, 20, why="it works on without the Lease")
    assert second.metric("hostprep_operator_leader") == 0
    assert first.child.returncode == 1
    assert "lost the lead" in first.child.output()
    wait_for(lambda: second.metric("hostprep_operator_leader") == 1, 25)
    assert api.get(LEASE)["spec"]["leaseTransitions"] == 1


def test_a_stopped_process_that_comes_back_after_another_took_over_writes_nothing_wrong(
    cluster: ControlPlane, api: Api, agents: SimulatedAgents
) -> None:
    audit = OpeningAudit(api)
    options = ("--agent-liveness=off", "--leader-elect", "--namespace=default")
    first = OperatorProcess(cluster, *options)
    wait_for(lambda: first.metric("hostprep_operator_leader") == 1, 20)
    second = OperatorProcess(cluster, *options)
    second.wait_ready()
    first.child.signal(signal.SIGSTOP)
    wait_for(lambda: second.metric("hostprep_operator_leader") == 1, 30)
    _join(api, "n1")
    api.create(POOLS, pool_object())
    wait_for(lambda: _open_nodes(api) == {"n1"})
    first.child.signal(signal.SIGCONT)
    wait_for(lambda: not first.child.alive, 15)
    reboot_node(api, "n1")
    wait_for(lambda: agents.report() >= 0 and _open_nodes(api) == {"n1"})
    audit.check()


def test_an_agents_pod_that_goes_makes_the_condition_unknown_and_leaves_taint_and_label(
    cluster: ControlPlane, api: Api, agents: SimulatedAgents
) -> None:
    _join(api, "n1")
    _make_agent_pod(api, "agent-1", "n1")
    api.create(POOLS, pool_object())
    operator = OperatorProcess(cluster, "--namespace=default", "--agent-grace=2")
    operator.wait_ready()
    wait_for(lambda: _open_nodes(api) == {"n1"})
    _set_pod_ready(api, "agent-1", ready=False)
    wait_for(lambda: _condition(api, "n1") == ("Unknown", "AgentNotReady"))
    assert _open_nodes(api) == {"n1"}
    _set_pod_ready(api, "agent-1", ready=True)
    wait_for(lambda: _condition(api, "n1") == ("True", "Ready"))
    api.delete("/api/v1/namespaces/default/pods/agent-1")
    wait_for(lambda: _condition(api, "n1") == ("Unknown", "NoAgent"))
    assert _open_nodes(api) == {"n1"}
    wait_for(lambda: api.get(f"{POOLS}/kv")["status"]["unavailable"] == 1)
    time.sleep(1.2)
    operator.restart()
    operator.wait_ready()
    time.sleep(3)
    assert operator.writes() == 0, "a restart does not make it less sure"
    _make_agent_pod(api, "agent-2", "n1")
    wait_for(lambda: _condition(api, "n1") == ("True", "Ready"))


def test_three_hundred_nodes_open_in_seconds_with_at_most_six_writes_each(
    cluster: ControlPlane, api: Api, agents: SimulatedAgents
) -> None:
    operator = OperatorProcess(cluster, "--agent-liveness=off", "--log-level=warning")
    operator.wait_ready()
    names = [f"n{number:03}" for number in range(300)]
    _join(api, *names)
    began = time.monotonic()
    api.create(POOLS, pool_object())
    wait_for(lambda: len(_open_nodes(api)) == 300, 60, every_s=0.5)
    seconds = time.monotonic() - began
    wait_for(lambda: api.get(f"{POOLS}/kv")["status"]["ready"] == 300)
    writes = operator.writes()
    pool_writes = operator.metric("hostprep_operator_writes_total", kind="HostMemoryPool")
    print(f"300 nodes in {seconds:.1f} s, {(writes - pool_writes) / 300:.2f} writes a node")
    assert writes - pool_writes <= 6 * 300
    assert pool_writes <= seconds + 5
    wait_for(lambda: _is_quiet(operator), 30, why="it goes on writing")


def _is_quiet(operator: OperatorProcess) -> bool:
    """Tell whether nothing is written for two seconds; the pool's last counts may still come."""
    before = operator.writes()
    time.sleep(2)
    return operator.writes() == before


def _make_agent_pod(api: Api, name: str, node: str) -> None:
    pod = {
        "metadata": {
            "name": name,
            "labels": {
                "app.kubernetes.io/name": "hostprep",
                "app.kubernetes.io/component": "agent",
            },
        },
        "spec": {"nodeName": node, "containers": [{"name": "agent", "image": "none"}]},
    }
    api.create("/api/v1/namespaces/default/pods", pod)
    _set_pod_ready(api, name, ready=True)


def _set_pod_ready(api: Api, name: str, *, ready: bool) -> None:
    moment = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    condition = {"type": "Ready", "status": str(ready), "lastTransitionTime": moment}
    api.patch(
        f"/api/v1/namespaces/default/pods/{name}/status",
        {"status": {"conditions": [condition]}},
        content_type=STRATEGIC_PATCH,
    )


def _condition(api: Api, name: str) -> tuple[str, str]:
    conditions = api.get(f"{NODES}/{name}")["status"]["conditions"]
    found = [c for c in conditions if c["type"] == "hostprep.dev/HostMemoryReady"]
    return (found[0]["status"], found[0]["reason"]) if found else ("", "")


def test_a_pool_definition_whose_deletion_takes_long_releases_no_memory(
    cluster: ControlPlane, api: Api, agents: SimulatedAgents
) -> None:
    OperatorProcess(cluster, "--agent-liveness=off", "--resync=2").wait_ready()
    _join(api, "n1")
    api.create(POOLS, pool_object())
    wait_for(lambda: _open_nodes(api) == {"n1"})
    held = pool_object("held", nodeSelector={"no": "node"})
    held["metadata"]["finalizers"] = ["example.com/slow"]
    api.create(POOLS, held)
    crd = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions/hostmemorypools.hostprep.dev"
    api.delete(crd)
    wait_for(lambda: not api.exists(f"{POOLS}/kv"))
    time.sleep(5)  # two lists
    assert api.exists(crd), "the definition is gone: this test shows nothing"
    assert api.get(f"{HMNS}/n1")["spec"]["pools"][0]["state"] == "Present"
