"""The fault run's short form: it ends well, and what watches over it can tell when it does not."""

from __future__ import annotations

import pytest

from benchmarks.control_plane.faults import Plan, run, show
from benchmarks.control_plane.troubles import left_undone
from hostprep.api.names import CLUSTER_AUTOSCALER_TAINT
from testbed.chart import apply_crds
from testbed.control_plane import ControlPlane
from testbed.nodes import create_node, node_object, reboot_node
from testbed.opening_audit import OpeningAudit
from testbed.operator_process import NODES, POOLS, OperatorProcess, pool_object
from testbed.processes import wait_for
from testbed.simulated_agents import SimulatedAgents
from tests.cluster.reckless_operator import BLIND

pytestmark = pytest.mark.cluster


def test_a_short_fault_run_ends_well(capsys: pytest.CaptureFixture[str]) -> None:
    tally = run(Plan(nodes=40, kills=5, restarts=1, seed=5, longest_life_s=3.0, settle_s=90.0))

    show(tally)
    assert not tally.wrong
    assert (tally.kills, tally.restarts) == (5, 1)
    assert tally.openings >= 39, "each node that is open at the end was opened"
    assert "wrong openings" in capsys.readouterr().out


def test_an_operator_without_its_safety_steps_is_found_out(
    private_control_plane: ControlPlane,
) -> None:
    cluster, api = private_control_plane, private_control_plane.api
    apply_crds(api)
    audit, agents = OpeningAudit(api), SimulatedAgents(api)
    for name in ("rebooted", "blind"):
        taint = {"key": CLUSTER_AUTOSCALER_TAINT, "effect": "NoSchedule"}
        labels = {"pool.hostprep.dev/kv": "true"}
        create_node(api, node_object(name, labels=labels, taints=[taint]))
    selector = {"pool.hostprep.dev/kv": "true"}
    api.create(POOLS, pool_object(nodeSelector=selector, release={"when": "Immediately"}))
    OperatorProcess(cluster, "--agent-liveness=off", module="tests.cluster.reckless_operator")
    wait_for(lambda: not left_undone(api), 30)
    assert not audit.wrong_releases

    agents.silent = {"rebooted"}
    reboot_node(api, "rebooted")
    api.patch(f"{NODES}/blind", {"metadata": {"labels": {BLIND: "true"}}})

    wait_for(lambda: audit.openings == 3, why="it did not open what it must not")
    wait_for(lambda: audit.wrong_releases, why="it did not release what it must not")
    assert audit.wrong_releases[0] == "blind was told to release kv"
    (wrong,) = audit.wrong_openings()
    assert wrong.startswith("rebooted was opened in ")
    assert any(problem.startswith("blind: ") for problem in left_undone(api))
    agents.close()
