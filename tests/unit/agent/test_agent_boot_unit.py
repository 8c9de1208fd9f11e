"""The boot unit in the status: a condition where a pool has one, and nothing where none has."""

from __future__ import annotations

import pytest

from hostprep.agent.desired import Source, instruction_of
from hostprep.agent.messages import ReconcileResult, decode, encode
from hostprep.agent.status import node_status
from hostprep.api.conditions import Condition
from hostprep.api.node_resource import NodeStatus, Phase, PoolEntry
from hostprep.node.boot import BootUnit
from tests.support.agent_values import (
    context_of,
    desired_state_of,
    entry_of,
    observation_of,
    pool_observation,
    region,
    result_of,
)

pytestmark = pytest.mark.unit

WHY = "cannot write /etc/hostprep/kv.sh: the file system is read-only; let the agent write there"


def _status(boot: BootUnit, *entries: PoolEntry, ready: bool = True) -> NodeStatus:
    look = observation_of(*(pool_observation(region(), name=e.name) for e in entries if ready))
    view = context_of(*entries, observation=look, results=tuple(map(result_of, entries)), boot=boot)
    return node_status(view, NodeStatus(), now_s=100)


def _boot(status: NodeStatus) -> Condition | None:
    return next((c for c in status.conditions if c.type == "BootUnit"), None)


def test_without_such_a_pool_nothing_is_said() -> None:
    assert _boot(_status(BootUnit(), entry_of())) is None


def test_what_the_next_boot_reserves_is_named() -> None:
    said = _boot(_status(BootUnit(pools=("kv", "batch")), entry_of()))
    assert said is not None
    assert (said.status, said.reason) == ("True", "Installed")
    assert said.message.endswith("kv, batch")


def test_a_pool_without_its_unit_stays_ready_and_the_remedy_is_told() -> None:
    status = _status(BootUnit(failures=(("kv", WHY),)), entry_of())
    said = _boot(status)
    assert said is not None
    assert (said.status, said.reason) == ("False", "BootUnitNotInstalled")
    assert said.message == f"kv: {WHY}"
    assert [pool.phase for pool in status.pools] == [Phase.READY]
    ready = next(c for c in status.conditions if c.type == "Ready")
    assert ready.status == "True"


def test_a_released_pool_stays_in_the_status_until_its_script_is_gone() -> None:
    """Else the next boot reserves pages for nobody, and nobody knows."""
    gone = entry_of(absent=True)
    status = _status(BootUnit(failures=(("kv", WHY),)), gone, ready=False)
    (pool,) = status.pools
    assert (pool.phase, pool.reason) == (Phase.RELEASING, "BootUnitNotRemoved")
    assert WHY in pool.message
    assert _status(BootUnit(), gone, ready=False).pools == ()


@pytest.mark.parametrize(
    ("boot", "absent", "expected"),
    [("systemd", False, True), ("none", False, False), ("systemd", True, False)],
)
def test_the_policy_decides(boot: str, absent: bool, expected: bool) -> None:
    policy = {"size": "8Gi", "boot": boot}
    entry = PoolEntry(name="kv", uid="u", absent=absent, policy=policy)
    assert [one.at_boot for one in instruction_of(desired_state_of(entry)).pools] == [expected]


def test_an_absence_that_nobody_confirmed_removes_nothing() -> None:
    assert instruction_of(desired_state_of(entry_of(absent=True), source=Source.SAVED)).pools == ()


def test_it_comes_over_the_line_whole() -> None:
    boot = BootUnit(pools=("kv",), failures=(("batch", WHY),))
    message = ReconcileResult(1, observation_of(), (), busy=False, boot=boot)
    assert decode(encode(message)) == message
