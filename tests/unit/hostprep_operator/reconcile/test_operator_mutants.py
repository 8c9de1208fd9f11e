"""Broken operators: each lacks one safety step, and the properties must notice.

What would go unnoticed here would go unnoticed in the operator itself.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from hostprep.api.conditions import Condition
from hostprep.api.names import HOST_MEMORY_READY
from hostprep.api.node_resource import Phase as PoolPhase
from hostprep_operator.reconcile import (
    assign,
    node,
    node_conditions,
    release,
    rollout,
    taint_and_labels,
)
from tests.unit.hostprep_operator.reconcile.operator_life import Life

pytestmark = pytest.mark.unit


def _patch_ready(monkeypatch: pytest.MonkeyPatch, ready: Callable[..., bool]) -> None:
    for module in (assign, node_conditions, rollout):
        monkeypatch.setattr(module, "pool_ready", ready)


def _no_boot_check(monkeypatch: pytest.MonkeyPatch) -> None:
    def ready(node: Any, hmn: Any, entry: Any) -> bool:
        report = hmn.status.pool(entry.name) if hmn and entry and not entry.absent else None
        if report is None or report.phase is not PoolPhase.READY:
            return False
        return bool((report.uid, report.generation) == (entry.uid, entry.generation))

    _patch_ready(monkeypatch, ready)
    monkeypatch.setattr(node_conditions, "_rebooted", lambda judged: False)


def _no_generation_check(monkeypatch: pytest.MonkeyPatch) -> None:
    def ready(node: Any, hmn: Any, entry: Any) -> bool:
        report = hmn.status.pool(entry.name) if hmn and entry and not entry.absent else None
        same_boot = hmn and node.boot_id == hmn.status.boot_id
        return bool(report and same_boot and report.phase is PoolPhase.READY)

    _patch_ready(monkeypatch, ready)


def _absence_from_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    def credulous(view: Any, record: Any) -> Any:
        entries = {entry.name for entry in view.hmn.entries} if view.hmn else set()
        seen = {pool.name for pool in view.pools}
        return assign.assign(replace(view, gone_pools=frozenset(entries - seen)), record)

    monkeypatch.setattr(node, "assign", credulous)


def _wrong_order(monkeypatch: pytest.MonkeyPatch) -> None:
    def reversed_(context: Any) -> Any:
        marked = taint_and_labels.mark(context)
        return replace(marked, writes=tuple(reversed(marked.writes)))

    monkeypatch.setattr(node, "mark", reversed_)


def _drops_too_early(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(assign, "_has_released", lambda hmn, entry: True)


def _no_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(assign, "_kept", lambda *args: assign._present(args[4]))


def _all_taints(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(taint_and_labels, "without_taints", lambda node, *keys: ())


def _forgets_labels(monkeypatch: pytest.MonkeyPatch) -> None:
    labels = taint_and_labels._labels
    monkeypatch.setattr(taint_and_labels, "_labels", lambda *args: (labels(*args)[0], ()))


def _retains_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(assign, "is_retained", lambda entry, pool: True)


def _no_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(assign, "_given_up", lambda view, entry, pool: release.absent(entry))


def _released_out_of_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    def impatient(view: Any, entry: Any, pool: Any) -> Any:
        due = release.is_due(entry, view.now_s)
        return release.absent(entry) if due else release.leaving(entry, pool, view.now_s)

    monkeypatch.setattr(assign, "_given_up", impatient)


def _prepares_out_of_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(assign, "_may_have_entry", lambda view, node, pool: True)


def _restores_what_was_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    def any_policy(pool: Any, node: Any, marks: Any) -> bool:
        return marks.opened_s is not None

    monkeypatch.setattr(assign, "is_restored", any_policy)


def _ignores_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(assign, "may_begin", lambda pool, node: True)


def _opens_when_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    ready = Condition(type=HOST_MEMORY_READY, status="True", reason="Ready")
    monkeypatch.setattr(taint_and_labels, "unreachable", lambda view, node: ready)


@pytest.mark.parametrize(
    "mutate",
    [
        _no_boot_check,
        _no_generation_check,
        _absence_from_the_cache,
        _wrong_order,
        _drops_too_early,
        _no_turns,
        _all_taints,
        _forgets_labels,
        _retains_nothing,
        _no_grace,
        _released_out_of_turn,
        _prepares_out_of_turn,
        _restores_what_was_changed,
        _ignores_pauses,
        _opens_when_unknown,
    ],
)
def test_a_broken_operator_is_caught(
    mutate: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    mutate(monkeypatch)
    quick = settings(
        max_examples=300,
        stateful_step_count=30,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.generate],
        derandomize=True,
        database=None,
        print_blob=False,
        report_multiple_bugs=False,
    )
    with pytest.raises((AssertionError, KeyError)):
        run_state_machine_as_test(Life, settings=quick)
