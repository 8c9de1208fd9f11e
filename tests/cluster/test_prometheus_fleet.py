"""What fires in a fleet of 2,000 nodes: real promtool over what agent and operator export.

Run with `-s` to see the table: for each story the alerts, how many of each at once, and when.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from hostprep.api.node_resource import Phase
from tests.cluster.prometheus import promtool
from tests.support.fleets import AgentAt, Group, OperatorView, Story, input_series
from tests.support.observability import METRICS, RULES, alerts, families_in, rules

pytestmark = pytest.mark.cluster

FLEET = 2000
_BEGIN = 12
"""The minute at which a story's trouble begins."""
_SEVERITIES = {alert["alert"]: alert["labels"]["severity"] for alert in alerts()}


@dataclass(frozen=True, slots=True)
class Fired:
    """An alert that fired in a story: minutes since its begin, and how many at most at once."""

    first: int
    last: int
    at_once: int
    states: frozenset[str]
    """Values of the label `state`, where it has one."""


# --- the stories


def _always(phase: Phase) -> AgentAt:
    return lambda minute: phase


def _in_turn(*parts: tuple[int, Phase | None]) -> AgentAt:
    """Return the phase of the last part whose minute has come."""
    return lambda minute: next(phase for begin, phase in reversed(parts) if minute >= begin)


def _counts(**counts: int) -> Mapping[str, int]:
    return {"selected": FLEET, "ready": FLEET, "updated": FLEET, **counts}


def _quiet_view(minute: int) -> OperatorView:
    return OperatorView(counts=_counts(), nodes={"ready": FLEET})


_READY = _always(Phase.READY)
_BEGIN_S = _BEGIN * 60.0

QUIET = Story(
    name="quiet",
    minutes=100,
    groups=(Group(name="well", nodes=FLEET, phase_at=_READY),),
    operator_at=_quiet_view,
)


def _one_dead_view(minute: int) -> OperatorView:
    if minute < _BEGIN:
        return _quiet_view(minute)
    return OperatorView(
        counts=_counts(ready=FLEET - 1, unavailable=1),
        since_s={"unavailable": _BEGIN_S},
        nodes={"ready": FLEET - 1, "unknown": 1},
    )


ONE_DEAD = Story(
    name="1 dead for 20 h",
    minutes=_BEGIN + 20 * 60 + 2,
    step=4,
    groups=(
        Group(name="well", nodes=FLEET - 1, phase_at=_READY),
        Group(name="dead", nodes=1, phase_at=_in_turn((0, Phase.READY), (_BEGIN, None))),
    ),
    operator_at=_one_dead_view,
)


def _stuck_view(minute: int) -> OperatorView:
    if minute < _BEGIN:
        return _quiet_view(minute)
    return OperatorView(
        counts=_counts(ready=FLEET - 200, updated=0, preparing=200, unavailable=200),
        since_s={"preparing": _BEGIN_S, "unavailable": _BEGIN_S},
        nodes={"ready": FLEET - 200, "closed": 200},
        closed_since_s=_BEGIN_S,
    )


STUCK = Story(
    name="200 stuck in Resizing",
    minutes=80,
    groups=(
        Group(name="well", nodes=FLEET - 200, phase_at=_READY),
        Group(
            name="stuck",
            nodes=200,
            phase_at=_in_turn((0, Phase.READY), (_BEGIN, Phase.RESIZING)),
        ),
    ),
    operator_at=_stuck_view,
)


def _storm_view(minute: int) -> OperatorView:
    # Down for six minutes, prepared for six.
    if minute < _BEGIN or minute >= _BEGIN + 12:
        return OperatorView(
            counts=_counts(),
            nodes={"ready": FLEET},
            openings=400 if minute == _BEGIN + 12 else 0,
        )
    is_down = minute < _BEGIN + 6
    return OperatorView(
        counts=_counts(ready=FLEET - 400, preparing=0 if is_down else 400, unavailable=400),
        since_s={"unavailable": _BEGIN_S} | ({} if is_down else {"preparing": _BEGIN_S}),
        nodes={"ready": FLEET - 400, "unknown" if is_down else "closed": 400},
        closed_since_s=None if is_down else _BEGIN_S,
        reboots=400 if minute == _BEGIN + 6 else 0,
    )


STORM = Story(
    name="400 reboot at once",
    minutes=80,
    groups=(
        Group(name="well", nodes=FLEET - 400, phase_at=_READY),
        Group(
            name="rebooted",
            nodes=400,
            phase_at=_in_turn(
                (0, Phase.READY),
                (_BEGIN, None),
                (_BEGIN + 6, Phase.PREPARING),
                (_BEGIN + 12, Phase.READY),
            ),
        ),
    ),
    operator_at=_storm_view,
)


def _slip_view(minute: int) -> OperatorView:
    # 500 nodes lose a label for eight minutes; the grace period is ten.
    if _BEGIN <= minute < _BEGIN + 8:
        counts = {"selected": 1500, "ready": 1500, "updated": 1500, "leaving": 500}
        return OperatorView(
            counts=counts,
            since_s={"leaving": _BEGIN_S},
            nodes={"ready": 1500, "releasing": 500},
        )
    return _quiet_view(minute)


SLIP = Story(
    name="500 lose a label for 8 min",
    minutes=60,
    groups=(Group(name="well", nodes=FLEET, phase_at=_READY),),
    operator_at=_slip_view,
)


def _deleted_view(minute: int) -> OperatorView:
    """The pool is deleted; after the grace period waves of 200 release, until 60 nodes are left."""
    if minute < _BEGIN:
        return _quiet_view(minute)
    told = min(FLEET, max(0, 200 * (minute - _BEGIN - 9)))
    done = min(FLEET - 60, max(0, told - 200))
    counts = {"leaving": FLEET - told, "releasing": told - done}
    since_s = {
        name: _BEGIN_S + (0 if name == "leaving" else 600) for name in counts if counts[name]
    }
    return OperatorView(counts=counts, since_s=since_s, nodes={"releasing": FLEET - done})


RELEASE_STALLED = Story(
    name="a deleted pool, 60 keep it",
    minutes=80,
    groups=(
        Group(
            name="freed",
            nodes=FLEET - 60,
            phase_at=_in_turn((0, Phase.READY), (_BEGIN + 15, Phase.RELEASING)),
        ),
        Group(
            name="leased",
            nodes=50,
            phase_at=_in_turn((0, Phase.READY), (_BEGIN + 15, Phase.RELEASING)),
        ),
        Group(name="gone", nodes=10, phase_at=_in_turn((0, Phase.READY), (_BEGIN + 5, None))),
    ),
    operator_at=_deleted_view,
)


def _lost_view(minute: int) -> OperatorView:
    if minute < _BEGIN:
        return _quiet_view(minute)
    return OperatorView(
        counts=_counts(ready=FLEET - 600, unavailable=600),
        since_s={"unavailable": _BEGIN_S},
        nodes={"ready": FLEET - 600, "unknown": 600},
    )


LOST = Story(
    name="600 lose power for good",
    minutes=80,
    groups=(
        Group(name="well", nodes=FLEET - 600, phase_at=_READY),
        Group(name="lost", nodes=600, phase_at=_in_turn((0, Phase.READY), (_BEGIN, None))),
    ),
    operator_at=_lost_view,
)


# --- asking promtool


def fired(story: Story, folder: Path) -> dict[str, Fired]:
    """Return what fires in a story, by name of the alert. Raises AssertionError for bad rules.

    promtool says what an expression gives only where it expected something else.
    """
    families = {
        name + part
        for rule in rules()
        for name in families_in(rule["expr"])
        for part in ("", "_bucket", "_sum", "_count")
    }
    folder.mkdir(exist_ok=True)
    firing = 'ALERTS{alertstate="firing"}'
    window = f"[{story.minutes}m:2m]"
    asked = {
        "first": f"min_over_time((min by (alertname) (timestamp({firing}))){window})",
        "last": f"max_over_time((max by (alertname) (timestamp({firing}))){window})",
        "at_once": f"max_over_time((count by (alertname) ({firing})){window})",
        "state": f"max by (alertname, state) (max_over_time({firing}{window}))",
    }
    unlike = [{"labels": '{asked="x"}', "value": 0}]
    end = f"{story.minutes - 2}m"
    test = {
        "name": story.name,
        "interval": f"{story.step}m",
        "input_series": input_series(story, families),
        "promql_expr_test": [
            {"expr": expr, "eval_time": end, "exp_samples": unlike} for expr in asked.values()
        ],
    }
    document = {
        "rule_files": [str(RULES)],
        "evaluation_interval": f"{story.step}m",
        "tests": [test],
    }
    path = folder / "story.yaml"
    path.write_text(yaml.dump(document, Dumper=getattr(yaml, "CSafeDumper", yaml.SafeDumper)))
    done = promtool("test", "rules", str(path), timeout_s=540)
    text = done.stdout + done.stderr
    answers = re.findall(r"^ +got: (.*)$", text, re.MULTILINE)
    assert len(answers) == len(asked), text[-3000:]
    found = dict(zip(asked, map(_samples, answers), strict=True))
    names = {labels["alertname"] for labels, _ in found["first"]}
    by = {
        what: {labels["alertname"]: value for labels, value in found[what]}
        for what in ("first", "last", "at_once")
    }
    return {
        name: Fired(
            first=int(by["first"][name] / 60),
            last=int(by["last"][name] / 60),
            at_once=int(by["at_once"][name]),
            states=frozenset(
                labels["state"]
                for labels, _ in found["state"]
                if labels["alertname"] == name and "state" in labels
            ),
        )
        for name in names
    }


def _samples(text: str) -> list[tuple[dict[str, str], float]]:
    return [
        (dict(re.findall(r'(\w+)="([^"]*)"', labels)), float(value))
        for labels, value in re.findall(r"\{([^}]*)\} (\S+?)(?:,|$)", text)
    ]


def _print(story: Story, found: Mapping[str, Fired]) -> None:
    if not found:
        print(f"\n{story.name:28} nothing fires")
    for name, one in sorted(found.items(), key=lambda item: item[1].first):
        state = "".join(f" ({state})" for state in sorted(one.states))
        print(
            f"\n{story.name:28} {name + state:42} {_SEVERITIES[name]:8} {one.at_once} at once, "
            f"minute {one.first} to {one.last} of {story.minutes - 2}",
            end="",
        )


def _run(story: Story, folder: Path) -> dict[str, Fired]:
    found = fired(story, folder)
    _print(story, found)
    return found


def test_the_stories_give_the_rules_every_metric_that_a_quiet_fleet_exports(
    tmp_path: Path,
) -> None:
    """A story without a series that the rules read would be quiet for that reason."""
    (entry,) = input_series(QUIET, {metric.name for metric in METRICS})
    given = {line.partition("{")[0] for line in entry["series"].splitlines()}
    read = set().union(*(families_in(rule["expr"]) for rule in rules()))
    happenings = {
        "hostprep_gates",
        "hostprep_operator_reconcile_errors_total",
        "hostprep_prepare_failures_total",
        "hostprep_verify_problems_total",
    }
    assert read - given <= happenings


def test_a_quiet_fleet_is_quiet(tmp_path: Path) -> None:
    assert _run(QUIET, tmp_path) == {}


def test_one_dead_node_of_two_thousand_is_one_information_and_no_page(tmp_path: Path) -> None:
    found = _run(ONE_DEAD, tmp_path)
    assert set(found) == {"HostprepNodesNeedAttention"}
    assert found["HostprepNodesNeedAttention"].at_once == 1
    assert found["HostprepNodesNeedAttention"].first > _BEGIN + 60
    assert _SEVERITIES["HostprepNodesNeedAttention"] == "info"


def test_two_hundred_nodes_stuck_in_resizing_raise_that_alert_and_no_other(tmp_path: Path) -> None:
    found = _run(STUCK, tmp_path)
    assert set(found) == {"HostprepNodesStuck"}
    assert found["HostprepNodesStuck"].at_once == 1
    assert found["HostprepNodesStuck"].states == {"Resizing"}
    assert _BEGIN + 30 < found["HostprepNodesStuck"].first < _BEGIN + 40


def test_a_storm_of_four_hundred_reboots_is_one_alert(tmp_path: Path) -> None:
    found = _run(STORM, tmp_path)
    assert set(found) == {"HostprepRebootStorm"}
    assert found["HostprepRebootStorm"].at_once == 1
    assert found["HostprepRebootStorm"].last < _BEGIN + 40


def test_a_lost_label_is_seen_while_nothing_is_released_yet(tmp_path: Path) -> None:
    found = _run(SLIP, tmp_path)
    assert set(found) == {"HostprepNodesLeaving"}
    assert found["HostprepNodesLeaving"].first <= _BEGIN + 4
    assert found["HostprepNodesLeaving"].last < _BEGIN + 8


def test_a_release_that_stalls_is_seen_although_the_pool_is_gone(tmp_path: Path) -> None:
    found = _run(RELEASE_STALLED, tmp_path)
    assert {"HostprepNodesLeaving", "HostprepReleaseStalled"} <= set(found)
    assert set(found) - {"HostprepNodesNeedAttention"} == {
        "HostprepNodesLeaving",
        "HostprepReleaseStalled",
    }
    assert found["HostprepNodesLeaving"].first <= _BEGIN + 4
    assert found["HostprepReleaseStalled"].last == RELEASE_STALLED.minutes - 2


def test_a_third_of_the_fleet_lost_is_a_page_with_its_cause(tmp_path: Path) -> None:
    found = _run(LOST, tmp_path)
    assert set(found) == {"HostprepPoolNotReady", "HostprepNodesUnknown"}
    assert _SEVERITIES["HostprepPoolNotReady"] == "critical"
    assert {one.at_once for one in found.values()} == {1}
