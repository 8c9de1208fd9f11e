"""Apply populates in the lanes by which a plan reckons its seconds, on this machine's memory."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest

from hostprep.api.pool_spec import Placement
from hostprep.backing import Backing
from hostprep.node.apply.exclusive import exclusive
from hostprep.node.apply.runner import ProgressReporter
from hostprep.node.apply.service import Node
from hostprep.node.plan import plan
from hostprep.node.plan.actions import Action, CreateRegion, Plan, stages
from testbed.machine import pool_of

pytestmark = pytest.mark.kernel

_HANG_S = 60.0


class _Meeting(ProgressReporter):
    """Keeps each lane's first region from ending before all of these have begun."""

    def __init__(self, lanes: int) -> None:
        self._all_begun = threading.Barrier(lanes, timeout=_HANG_S)
        self._lock = threading.Lock()
        self._met: set[str] = set()
        self.events: list[tuple[str, str]] = []

    def begin(self, action: Action) -> None:
        if isinstance(action, CreateRegion):
            with self._lock:
                self.events.append(("begin", action.region))

    def advance(self, action: Action, size_bytes: int) -> None:
        if isinstance(action, CreateRegion) and action.region.endswith("-0"):
            with self._lock:
                is_first = action.region not in self._met
                self._met.add(action.region)
            if is_first:
                self._all_begun.wait()

    def end(self, action: Action, *, took_s: float) -> None:
        if isinstance(action, CreateRegion):
            with self._lock:
                self.events.append(("end", action.region))


def _with_lanes(made: Plan) -> Plan:
    """Have every second region interleaved, over the only node that there may be: another lane."""
    actions: list[Action] = []
    populating = [action for action in made.actions if isinstance(action, CreateRegion)]
    for action in made.actions:
        if not isinstance(action, CreateRegion):
            actions.append(action)
            continue
        number = populating.index(action)
        place = Placement(None if number % 2 else 0)
        name = place.region_name(number // 2)
        actions.append(replace(action, placement=place, region=name, threads=1))
    return replace(made, actions=tuple(actions))


def test_a_stages_lanes_run_at_once_and_a_lanes_regions_one_after_another(node: Node) -> None:
    specs = [pool_of(regions=4, mib=4, backing=Backing.BASE)]
    facts = node.facts(specs)
    made = _with_lanes(plan(specs, facts))
    (lanes,) = [stage for stage in stages(made.actions) if isinstance(stage[0][0], CreateRegion)]
    named = [[each.region for each in lane if isinstance(each, CreateRegion)] for lane in lanes]
    assert named == [["node0-0", "node0-1"], ["interleave-0", "interleave-1"]]
    meeting = _Meeting(len(lanes))

    with exclusive(node.root, wait_timeout_s=_HANG_S, on_wait=lambda _: None):
        assert node.carry_out(made, facts, specs, progress=meeting) is None

    for lane in named:
        seen = [event for event in meeting.events if event[1] in lane]
        assert seen == [(what, region) for region in lane for what in ("begin", "end")]
    begins = [meeting.events.index(("begin", lane[0])) for lane in named]
    ends = [meeting.events.index(("end", lane[0])) for lane in named]
    assert max(begins) < min(ends)
    populate_s = [sum(action.expected_s for action in lane) for lane in lanes]
    assert made.expected_s < sum(populate_s) or len(facts.process.cpus) == 1
    assert max(populate_s) <= made.expected_s
