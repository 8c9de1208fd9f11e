"""What the agent knows and decides, without a clock, a file or a socket of its own."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import hostprep
from hostprep.agent.desired import (
    Desire,
    Instruction,
    Source,
    scrubbed_on_claim,
    wanted_of,
)
from hostprep.agent.devices import DevicePool
from hostprep.agent.messages import (
    Done,
    Failure,
    Look,
    Message,
    Outcome,
    PoolDone,
    Progress,
    RegionLook,
    Round,
    RoundDone,
)
from hostprep.agent.metrics import Metrics
from hostprep.agent.status import View, node_status
from hostprep.api.node_resource import NodeStatus
from hostprep.kube.backoff import Backoff
from hostprep.node.boot import BootUnit

__all__ = ["Brain"]

_RETRY_FIRST_S = 5.0
_RETRY_MOST_S = 300.0


@dataclass(slots=True)
class _Setback:
    """A pool on which work failed: tried again later, or once its regions have changed."""

    backoff: Backoff
    retry_at_s: float
    regions: tuple[RegionLook, ...]


@dataclass
class Brain:
    """Takes instructions and the worker's messages; gives requests and the status."""

    metrics: Metrics
    desire: Desire = field(default_factory=Desire)
    look: Look | None = None
    busy: bool = False
    """The worker works, other than looking."""
    _instruction: Instruction = field(default_factory=Instruction)
    _boot: BootUnit = field(default_factory=BootUnit)
    _outcomes: dict[str, Outcome] = field(default_factory=dict)
    _progress: dict[str, Progress] = field(default_factory=dict)
    _setbacks: dict[str, _Setback] = field(default_factory=dict)
    _number: int = 0
    _answers_from: int = 0
    """Rounds of this number and later ones were asked about the present desire."""
    _answered: bool = False

    @property
    def is_settled(self) -> bool:
        """Whether there is nothing left to do for the present desire, or nothing that works."""
        pending = any(outcome.pending for outcome in self._outcomes.values())
        return self._answered and not self.busy and not pending

    def set_desire(self, desire: Desire) -> None:
        """Act upon other entries from now on."""
        before = self._instruction
        self.desire = desire
        self._instruction = wanted_of(desire)
        for name, failure in self._instruction.refused.items():
            if before.refused.get(name) != failure:
                self.metrics.count_failure(name, failure.reason)
        keys = {one.spec.name: one.key for one in self._instruction.wanted}
        for name in [n for n, outcome in self._outcomes.items() if keys.get(n) != outcome.key]:
            del self._outcomes[name]
            self._progress.pop(name, None)
            self._setbacks.pop(name, None)
        if before.wanted != self._instruction.wanted:
            self._answers_from = self._number + 1
            self._answered = False

    def request(self, *, now_s: float) -> Round:
        """Return the next round's request. `now_s` is monotonic."""
        self._number += 1
        held = tuple(name for name in self._setbacks if self._is_held(name, now_s))
        return Round(number=self._number, wanted=self._instruction.wanted, held=held)

    def _is_held(self, name: str, now_s: float) -> bool:
        setback = self._setbacks[name]
        return now_s < setback.retry_at_s and setback.regions == self._regions(name)

    def _regions(self, name: str) -> tuple[RegionLook, ...]:
        pool = self.look.pool(name) if self.look else None
        return pool.regions if pool else ()

    def take(self, message: Message, *, now_s: float, wall_s: float) -> bool:
        """Learn what the worker says. Returns whether another round should follow at once."""
        if isinstance(message, RoundDone):
            self._saw(message.look, wall_s)
            self._boot = message.boot
            self.busy = message.busy
            self._answered = self._answered or message.number >= self._answers_from
            for outcome in message.outcomes:
                self._learn(outcome)
        elif isinstance(message, Progress):
            self._moves(message)
        elif isinstance(message, PoolDone):
            self._saw(message.look, wall_s)
            self._pool_done(message, now_s)
        elif isinstance(message, Done):
            self._done(message, now_s)
            return message.stopped
        return False

    def lost_worker(self) -> None:
        """Forget what the worker was doing: it is gone."""
        self.busy = False
        self._progress.clear()
        self.metrics.worker_restarts.inc()

    def status(self, previous: NodeStatus, *, wall_s: float) -> NodeStatus | None:
        """Return what to report; None before a round answered to the present desire."""
        if self.desire.source is Source.NOTHING:
            self.metrics.show_status(NodeStatus())
            return None
        if self.look is None or not self._answered:
            return None
        view = View(
            desire=self.desire,
            instruction=self._instruction,
            look=self.look,
            outcomes=self._outcomes,
            progress=self._progress,
            boot=self._boot,
            agent_version=hostprep.__version__,
        )
        status = node_status(view, previous, now_s=wall_s)
        self.metrics.show_status(status)
        return status

    def device_pools(self) -> dict[str, DevicePool] | None:
        """Return what kubelet is to hand out, as last seen; None where nobody says so now."""
        if self.desire.source is Source.NOTHING or self.look is None:
            return None
        looks = {pool.name: pool for pool in self.look.pools}
        return {
            entry.name: DevicePool(entry.name, looks[entry.name], scrubbed_on_claim(entry))
            for entry in self.desire.entries
            if entry.uses_devices and entry.name in looks
        }

    def _saw(self, look: Look, wall_s: float) -> None:
        self.metrics.show_look(look, self.look, now_s=wall_s)
        self.look = look

    def _moves(self, progress: Progress) -> None:
        self._progress[progress.pool] = progress
        outcome = self._outcomes.get(progress.pool)
        if outcome is not None and outcome.error is not None and progress.done_bytes > 0:
            self._outcomes[progress.pool] = replace(outcome, error=None)

    def _learn(self, outcome: Outcome) -> None:
        keys = {one.spec.name: one.key for one in self._instruction.wanted}
        if keys.get(outcome.name) != outcome.key:
            return
        before = self._outcomes.get(outcome.name)
        is_news = before is None or before.unmet is None
        if outcome.unmet and outcome.error is None and is_news:  # errors are counted by _failed
            self.metrics.count_failure(outcome.name, outcome.unmet.reason)
        if outcome.pending and before is not None and before.error is not None:
            # Trying again is no news: what stood in the way is said until something moves.
            outcome = replace(outcome, error=before.error)
        if before is not None and not outcome.pending and not outcome.steps:
            # A round that found nothing to do may be answered before anybody was told of the work.
            outcome = replace(outcome, steps=before.steps)
        if outcome.pending and not (before and before.pending):
            self._progress.pop(outcome.name, None)
        self._outcomes[outcome.name] = outcome

    def _pool_done(self, message: PoolDone, now_s: float) -> None:
        outcome = message.outcome
        seconds = dict(outcome.steps)
        took_s = sum(seconds.values()) if "Populate" in seconds else None
        self.metrics.count_prepared(outcome.name, took_s, message.populated)
        self._progress.pop(outcome.name, None)
        self._learn(outcome)
        if outcome.error is not None:
            self._failed(outcome.name, outcome.error, now_s)
        else:
            self._setbacks.pop(outcome.name, None)

    def _done(self, message: Done, now_s: float) -> None:
        self.busy = False
        if message.error is None:
            return
        for name, outcome in self._outcomes.items():
            if outcome.pending:
                self._outcomes[name] = replace(outcome, pending=False, error=message.error)
                self._failed(name, message.error, now_s)

    def _failed(self, name: str, failure: Failure, now_s: float) -> None:
        """Try again later, ever more rarely; at the next round where others are in the way."""
        if failure.waits:
            return
        self.metrics.count_failure(name, failure.reason)
        fresh = _Setback(Backoff(_RETRY_FIRST_S, _RETRY_MOST_S), 0.0, ())
        setback = self._setbacks.setdefault(name, fresh)
        setback.retry_at_s = now_s + setback.backoff.next_s()
        setback.regions = self._regions(name)
