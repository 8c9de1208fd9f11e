"""Stories of a fleet as series over time, from what agent and operator really export.

A story drives the metrics of both minute by minute. Nodes to which the same happens are a group:
their agent's metrics are taken once and given to each node of the group.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby

from prometheus_client import CollectorRegistry

import hostprep.agent.metrics
import hostprep_operator.metrics
from hostprep.api.node_resource import NodeStatus, Phase, PoolStatus, RegionStatus
from tests.support.agent_values import observation_of, pool_observation, region
from tests.support.observability import AGENT_JOB, OPERATOR_JOB

POOL = "kv"
POOL_BYTES = 1 << 40
_BACKING = "HugeTLB2Mi"

AgentAt = Callable[[int], Phase | None]
"""The phase of the pool at a minute, on a node of a group; None while its agent is down."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Nodes to which the same happens."""

    name: str
    nodes: int
    phase_at: AgentAt


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorView:
    """What the operator holds of the fleet at a minute. Times are seconds since the epoch."""

    counts: Mapping[str, int]
    """Of the pool, by state."""
    since_s: Mapping[str, float] = field(default_factory=dict)
    nodes: Mapping[str, int] = field(default_factory=dict)
    """All nodes by verdict: ready, closed, waiting, unknown, releasing."""
    closed_since_s: float | None = None
    openings: int = 0
    """Within this step, as are reboots."""
    reboots: int = 0
    paused: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Story:
    """A fleet over time."""

    name: str
    minutes: int
    step: int = 2
    """Minutes from one sample, and one evaluation of the rules, to the next."""
    groups: Sequence[Group]
    operator_at: Callable[[int], OperatorView]


def input_series(story: Story, families: Iterable[str]) -> list[dict[str, str]]:
    """Return the story as promtool's `input_series`, a value a step, these families only."""
    wanted = set(families)
    lines = list(_operator_series(story, wanted))
    for group in story.groups:
        lines += _group_series(group, story, wanted)
    # One entry may carry many series: promtool hands the lines to its loader as they are.
    return [{"series": "\n".join(lines), "values": ""}]


def _group_series(group: Group, story: Story, wanted: set[str]) -> Iterator[str]:
    values: dict[tuple[str, str], list[float | None]] = {}
    metrics: hostprep.agent.metrics.Metrics | None = None
    for count, minute in enumerate(range(0, story.minutes, story.step)):
        phase = group.phase_at(minute)
        if phase is None:
            metrics = None  # a new process begins with new counters
        else:
            metrics = metrics or hostprep.agent.metrics.Metrics()
            _show(metrics, phase, now_s=minute * 60.0)
        now = {("up", ""): 0.0 if phase is None else 1.0}
        if metrics is not None:
            now |= _samples(metrics._registry, wanted)
        for key in {*values, *now}:
            values.setdefault(key, [None] * count).append(now.get(key))
    for (name, labels), history in values.items():
        text = _values(history)
        for number in range(group.nodes):
            node = f"{group.name}-{number}"
            own = f'instance="{node}:9808",job="{AGENT_JOB}",node="{node}"'
            yield f"{name}{{{own}{labels}}} {text}"


def _show(metrics: hostprep.agent.metrics.Metrics, phase: Phase, *, now_s: float) -> None:
    is_sound = phase in (Phase.READY, Phase.RELEASING)
    ready_bytes = POOL_BYTES if is_sound else 0
    held = RegionStatus(
        name="node0-0", placement="node:0", size_bytes=POOL_BYTES, backing=_BACKING, state="Free"
    )
    pool = PoolStatus(
        name=POOL,
        phase=phase,
        wanted_bytes=POOL_BYTES,
        ready_bytes=ready_bytes,
        regions=(held,) if is_sound else (),
    )
    metrics.show_status(NodeStatus(pools=(pool,)), now_s=now_s)
    observation = observation_of(pool_observation(region()))
    metrics.show_observation(observation, None, given_up={}, now_s=now_s)
    metrics.connected.set(1)


def _operator_series(story: Story, wanted: set[str]) -> Iterator[str]:
    now_s = 0.0
    metrics = hostprep_operator.metrics.Metrics(wall_clock=lambda: now_s)
    metrics.leader.set(1)
    values: dict[tuple[str, str], list[float | None]] = defaultdict(list)
    shown: dict[str, tuple[str, float | None]] = {}
    for minute in range(0, story.minutes, story.step):
        now_s = minute * 60.0
        view = story.operator_at(minute)
        metrics.show_pool(POOL, view.counts, view.since_s, paused=view.paused)
        states = [state for state, count in view.nodes.items() for _ in range(count)]
        for number, state in enumerate(states):
            now = (state, view.closed_since_s if state == "closed" else None)
            if shown.get(f"n{number}") != now:
                metrics.node_state(f"n{number}", *now)
                shown[f"n{number}"] = now
        for number in range(len(states), len(shown)):
            metrics.node_state(f"n{number}", None, None)
            shown.pop(f"n{number}", None)
        metrics.openings.inc(view.openings)
        metrics.reboots.inc(view.reboots)
        metrics.last_sync.set(now_s)
        metrics.text()  # brings gauges of ages and verdicts up to date
        values["up", ""].append(1.0)
        for key, value in _samples(metrics.registry, wanted).items():
            values[key].append(value)
    own = f'instance="op:9809",job="{OPERATOR_JOB}"'
    for (name, labels), history in values.items():
        yield f"{name}{{{own}{labels}}} {_values(history)}"


def _samples(registry: CollectorRegistry, wanted: set[str]) -> dict[tuple[str, str], float]:
    return {
        (sample.name, "".join(f',{key}="{value}"' for key, value in sample.labels.items())): (
            sample.value
        )
        for family in registry.collect()
        for sample in family.samples
        if sample.name in wanted
    }


def _values(history: Sequence[float | None]) -> str:
    """Return a history in promtool's notation: runs that stay or rise evenly are one item each.

    >>> _values([1.0, 1.0, 1.0, 0.0, 60.0, 120.0, None, None])
    '1x2 0+60x2 _x2'
    """
    steps: list[tuple[float | None, float | None]] = []
    for position, value in enumerate(history):
        before = history[position - 1] if position else None
        is_run = value is not None and before is not None
        steps.append((value, value - before if is_run else None))  # type: ignore[operator]
    items: list[str] = []
    position = 0
    while position < len(history):
        value = history[position]
        if value is None:
            length = len(list(next(groupby(history[position:], lambda each: each is None))[1]))
            items.append(f"_x{length}")
            position += length
            continue
        end = position + 1
        step = steps[end][1] if end < len(history) else None
        while end < len(history) and step is not None and steps[end][1] == step:
            end += 1
        extra = end - position - 1
        if extra == 0:
            items.append(f"{value:.15g}")
        elif step:
            items.append(f"{value:.15g}{step:+.15g}x{extra}")
        else:
            items.append(f"{value:.15g}x{extra}")
        position = end
    return " ".join(items)
