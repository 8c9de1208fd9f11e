"""The real Karpenter and our operator: who waits for whom, seen in both of them.

docs/autoscalers.md says what was seen here. The nodes are objects only: the tests play kubelet
and agent.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator

import pytest

from hostprep.api.names import CLUSTER_AUTOSCALER_TAINT, ready_label
from hostprep.errors import NotReadyError
from testbed import binaries
from testbed.processes import wait_for
from tests.cluster.karpenter_scene import EXAMPLE, Scene, condition, scene, taint_keys

pytestmark = pytest.mark.cluster

_TAINT = CLUSTER_AUTOSCALER_TAINT
_READY = ready_label("kv")
_HOLD_S = 20.0
"""How long a state must last that nothing changes. From a node's registration on Karpenter has no
timer (its 15 minutes are for registering): it looks again when the Node changes. Longer shows no
more; 18 minutes were tried by hand."""
_NO_NODE_S = 5.0
"""After ten times its batching window Karpenter makes no node for a pod any more."""


@pytest.fixture(scope="module")
def stage() -> Iterator[Scene]:
    try:
        binaries.find("karpenter")
        with scene() as found:
            yield found
    except NotReadyError as error:
        pytest.skip(str(error))


@pytest.fixture
def operator(stage: Scene) -> Iterator[None]:
    with stage.operator():
        yield


def test_the_docs_show_the_node_pool_that_is_applied() -> None:
    docs = (EXAMPLE.parents[1] / "docs" / "autoscalers.md").read_text()
    assert EXAMPLE.read_text().split("---\n")[1] in docs


def _serving_node(stage: Scene) -> str:
    """Have Karpenter make a node for the pending engine and open it; return its name."""
    node = stage.node_made()
    stage.kubelet_starts(node)
    stage.agent_has_all_ready(node)
    stage.wait_until_open(node)
    assert stage.wait_until_bound(len(stage.pods())) == {node}
    stage.kubelet_runs_pods(node)
    wait_for(lambda: _initialized(stage, node) == "True", 30, why="not initialized")
    return node


def _initialized(stage: Scene, node: str) -> str:
    return condition(stage.claim_of(node), "Initialized").get("status", "")


def _waits_for_the_taint(stage: Scene, node: str) -> None:
    # Karpenter adds the taint at registration, unless our operator saw the Node before: then it
    # has no value, and is the same taint to both.
    waits = re.compile(rf'StartupTaint "{re.escape(_TAINT)}(=pending)?:NoSchedule" still exists')
    wait_for(
        lambda: waits.fullmatch(condition(stage.claim_of(node), "Initialized").get("message", "")),
        30,
        why="Karpenter does not wait for the taint",
    )


def _rebooted(stage: Scene, node: str) -> None:
    stage.reboot(node)
    said = "hostprep.dev/HostMemoryReady"
    stage.wait_until(
        node, lambda found: condition(found, said).get("reason") == "Rebooted", "not closed again"
    )


def _undisturbed(stage: Scene, node: str) -> bool:
    """Whether Karpenter has done nothing to a node, nor plans to."""
    claim = stage.claim_of(node)
    disruption = condition(claim, "DisruptionReason").get("status", "False")
    return (
        "deletionTimestamp" not in claim["metadata"]
        and "karpenter.sh/disrupted" not in taint_keys(stage.node(node))
        and (disruption, _initialized(stage, node)) == ("False", "True")
    )


def test_a_node_that_karpenter_makes_is_opened_when_its_memory_is_ready_and_serves(
    stage: Scene, operator: None
) -> None:
    with stage.example():
        stage.scale(1)
        node = stage.node_made()
        made = stage.node(node)
        assert _TAINT in taint_keys(made)
        assert made["metadata"]["labels"]["pool.hostprep.dev/kv"] == "true"
        stage.kubelet_starts(node)
        _waits_for_the_taint(stage, node)
        assert not stage.pods()[0]["spec"].get("nodeName")

        stage.agent_has_all_ready(node)

        opened = stage.wait_until_open(node)
        assert opened["metadata"]["labels"][_READY] == "true"
        assert stage.wait_until_bound() == {node}
        wait_for(lambda: _initialized(stage, node) == "True", 30, why="not initialized")
        assert len(stage.claims()) == 1


def test_without_the_operator_pod_and_node_claim_wait_and_karpenter_says_for_which_taint(
    stage: Scene,
) -> None:
    with stage.example():
        stage.scale(1)
        node = stage.node_made()
        stage.kubelet_starts(node)
        _waits_for_the_taint(stage, node)
        # A second engine waits for the same node: Karpenter counts on it.
        stage.create_pod("second")
        end = time.monotonic() + _HOLD_S
        while time.monotonic() < end:
            assert not any(pod["spec"].get("nodeName") for pod in stage.pods())
            (claim,) = stage.claims()
            said = condition(claim, "Initialized")
            assert said["status"] == "Unknown"
            assert said["message"] == f'StartupTaint "{_TAINT}=pending:NoSchedule" still exists'
            time.sleep(0.5)


def test_a_taint_that_is_not_among_the_start_up_taints_has_karpenter_make_node_after_node(
    stage: Scene,
) -> None:
    with stage.example(startup_taints=False):
        # Held, so that the taint need not come before the scheduler does, as kubelet's would.
        stage.create_pod("engine", held=True)
        node = stage.node_made()
        stage.add_taint(node, _TAINT)
        stage.kubelet_starts(node)
        wait_for(lambda: _initialized(stage, node) == "True", 30, why="not initialized")
        assert stage.node_made(besides=node)


def test_reclose_taint_leaves_node_and_engines_alone_and_costs_a_second_node_for_new_ones(
    stage: Scene, operator: None
) -> None:
    with stage.example(reclose="Taint"):
        stage.scale(1)
        node = _serving_node(stage)
        _rebooted(stage, node)
        closed = stage.node(node)
        assert _TAINT in taint_keys(closed)
        assert _READY not in closed["metadata"]["labels"]

        stage.create_pod("late")

        other = stage.node_made(besides=node)
        assert _undisturbed(stage, node)
        engines = {pod["metadata"]["name"]: pod["spec"].get("nodeName") for pod in stage.pods()}
        assert engines.pop("late") is None
        assert set(engines.values()) == {node}

        # Open again, it takes the new engine in; the second node was made for nothing.
        stage.agent_has_all_ready(node)
        stage.wait_until_open(node)
        assert stage.wait_until_bound(2) == {node}
        assert _undisturbed(stage, node)
        assert _TAINT in taint_keys(stage.node(other))


def test_reclose_label_only_puts_new_engines_on_the_node_that_is_there(
    stage: Scene, operator: None
) -> None:
    with stage.example(reclose="LabelOnly"):
        stage.scale(1)
        node = _serving_node(stage)
        _rebooted(stage, node)
        closed = stage.node(node)
        assert _TAINT not in taint_keys(closed)
        assert _READY not in closed["metadata"]["labels"]

        stage.create_pod("late")

        assert stage.wait_until_bound(2) == {node}
        time.sleep(_NO_NODE_S)
        assert len(stage.claims()) == 1
        assert _undisturbed(stage, node)


def test_consolidation_by_default_removes_the_node_that_is_tainted_again(
    stage: Scene, operator: None
) -> None:
    default = {"consolidationPolicy": "WhenEmptyOrUnderutilized", "consolidateAfter": "0s"}
    with stage.example(reclose="Taint", disruption=default):
        stage.create_pod("first")
        node = _serving_node(stage)
        _rebooted(stage, node)
        # For this one Karpenter makes a larger node, with room for the first.
        stage.create_pod("large", cpu="2")
        other = stage.node_made(besides=node)
        stage.kubelet_starts(other)
        stage.agent_has_all_ready(other)
        stage.wait_until_open(other)
        assert stage.wait_until_bound(2) == {node, other}
        stage.kubelet_runs_pods(other)

        said = wait_for(
            lambda: stage.events("DisruptionTerminating"), 90, why="nothing was consolidated"
        )
        assert set(said) <= {
            "Disrupting NodeClaim: Underutilized",
            "Disrupting Node: Underutilized",
        }
        assert _undisturbed(stage, other)
        assert condition(stage.claim_of(node), "DisruptionReason")["reason"] == "Underutilized"


def test_a_ready_label_in_an_engines_node_selector_breaks_scaling_from_zero(stage: Scene) -> None:
    with stage.example():
        stage.create_pod("trapped", selector={_READY: "true"})
        said = wait_for(
            lambda: [text for text in stage.events("FailedScheduling") if _READY in text],
            30,
            why="Karpenter says nothing",
        )
        assert any(f'label "{_READY}" does not have known values' in text for text in said)
        time.sleep(_NO_NODE_S)
        assert stage.claims() == []
        assert stage.nodes() == []
