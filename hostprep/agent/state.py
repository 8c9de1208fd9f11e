"""What the agent knows and decides, without a clock, a file or a socket of its own."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from hostprep.agent.desired import DesiredState, Instruction, Source, instruction_of
from hostprep.agent.devices import DevicePool
from hostprep.agent.kept import KeptHistory, Key
from hostprep.agent.messages import (
    Done,
    Failure,
    Message,
    Observation,
    PoolDone,
    PoolResult,
    Progress,
    ReconcileRequest,
    ReconcileResult,
    RegionObservation,
)
from hostprep.agent.metrics import Metrics
from hostprep.agent.status import NodeContext, node_status
from hostprep.api.node_resource import GivenUp, NodeStatus
from hostprep.kube.backoff import Backoff
from hostprep.node.boot import BootUnit


@dataclass(slots=True)
class _RetryState:
    """A pool on which work failed: tried again later, or once its regions have changed."""

    backoff: Backoff = field(default_factory=lambda: Backoff(first_s=5.0, most_s=300.0))
    retry_at_s: float = 0.0
    regions: tuple[RegionObservation, ...] = ()


@dataclass
class AgentState:
    """Takes the desired state and the worker's messages; gives requests and the status."""

    metrics: Metrics
    desired: DesiredState = field(default_factory=DesiredState)
    observation: Observation | None = None
    busy: bool = False
    """The worker is at work, other than observing."""
    _instruction: Instruction = field(default_factory=Instruction)
    _boot: BootUnit = field(default_factory=BootUnit)
    _results: dict[str, PoolResult] = field(default_factory=dict)
    _progress: dict[str, Progress] = field(default_factory=dict)
    _retries: dict[str, _RetryState] = field(default_factory=dict)
    _kept: KeptHistory = field(default_factory=KeptHistory)
    _given_up: dict[Key, GivenUp] = field(default_factory=dict)
    """What each region gave up last, since this agent began."""
    _number: int = 0
    _answers_from: int = 0
    """Requests of this number and later ones were made for the present desired state."""
    _answered: bool = False

    @property
    def is_settled(self) -> bool:
        """Whether nothing is left to do for the present desired state, or nothing that works."""
        pending = any(result.pending for result in self._results.values())
        return self._answered and not self.busy and not pending

    def set_desired(self, desired: DesiredState) -> None:
        """Act upon other entries from now on."""
        before = self._instruction
        self.desired = desired
        self._instruction = instruction_of(desired)
        for name, failure in self._instruction.refused.items():
            if before.refused.get(name) != failure:
                self.metrics.count_failure(name, failure.reason)
        keys = self._keys()
        for name in [n for n, result in self._results.items() if keys.get(n) != result.key]:
            del self._results[name]
            self._progress.pop(name, None)
            self._retries.pop(name, None)
        if before.pools != self._instruction.pools:
            self._answers_from = self._number + 1
            self._answered = False

    def request(self, *, now_s: float) -> ReconcileRequest:
        """Return the next request to the worker. `now_s` is monotonic."""
        self._number += 1
        held = tuple(
            name
            for name, retry in self._retries.items()
            if now_s < retry.retry_at_s and retry.regions == self._regions(name)
        )
        return ReconcileRequest(number=self._number, pools=self._instruction.pools, held=held)

    def take(self, message: Message, *, now_s: float, wall_s: float) -> bool:
        """Take a message of the worker. Returns whether another request should follow at once."""
        if isinstance(message, ReconcileResult):
            self._observed(message.observation, wall_s)
            self._boot = message.boot
            self.busy = message.busy
            self._answered = self._answered or message.number >= self._answers_from
            for result in message.results:
                self._take_result(result)
        elif isinstance(message, Progress):
            self._take_progress(message)
        elif isinstance(message, PoolDone):
            self._observed(message.observation, wall_s)
            self._pool_done(message, now_s)
        elif isinstance(message, Done):
            self._done(message, now_s)
            return message.stopped
        return False

    def worker_lost(self) -> None:
        """Forget what the worker was doing."""
        self.busy = False
        self._progress.clear()
        self.metrics.worker_restarts.inc()

    def status(self, previous: NodeStatus, *, wall_s: float) -> NodeStatus | None:
        """Return what to report; None before the worker answered for the desired state."""
        if self.desired.source is Source.NOTHING:
            self.metrics.show_status(NodeStatus(), now_s=wall_s)
            return None
        if self.observation is None or not self._answered:
            return None
        context = NodeContext(
            desired=self.desired,
            instruction=self._instruction,
            observation=self.observation,
            results=self._results,
            progress=self._progress,
            boot=self._boot,
            given_up=self._given_up,
        )
        status = node_status(context, previous, now_s=wall_s)
        self.metrics.show_status(status, now_s=wall_s)
        return status

    def device_pools(self) -> dict[str, DevicePool] | None:
        """Return what kubelet is to hand out, as last observed; None without an instruction."""
        if self.desired.source is Source.NOTHING or self.observation is None:
            return None
        observed = {pool.name: pool for pool in self.observation.pools}
        return {
            entry.name: DevicePool(observed[entry.name], entry.scrubbed_on_claim)
            for entry in self.desired.entries
            if entry.uses_devices and entry.name in observed
        }

    def _keys(self) -> dict[str, str]:
        return {pool.spec.name: pool.key for pool in self._instruction.pools}

    def _regions(self, name: str) -> tuple[RegionObservation, ...]:
        pool = self.observation.pool(name) if self.observation else None
        return pool.regions if pool else ()

    def _observed(self, observation: Observation, wall_s: float) -> None:
        given_up = self._kept.take(observation, now_s=wall_s)
        self._given_up |= given_up
        self.metrics.show_observation(
            observation, self.observation, given_up=given_up, now_s=wall_s
        )
        self.observation = observation

    def _take_progress(self, progress: Progress) -> None:
        self._progress[progress.pool] = progress
        result = self._results.get(progress.pool)
        if result is not None and result.error is not None and progress.done_bytes > 0:
            self._results[progress.pool] = replace(result, error=None)

    def _take_result(self, result: PoolResult) -> None:
        if self._keys().get(result.name) != result.key:
            return
        before = self._results.get(result.name)
        is_new = before is None or before.unmet is None
        if result.unmet and result.error is None and is_new:  # _failed counts errors
            self.metrics.count_failure(result.name, result.unmet.reason)
        if result.pending and before is not None and before.error is not None:
            # A retry alone is no news: the error is reported until something moves.
            result = replace(result, error=before.error)
        if before is not None and not result.pending and not result.steps:
            # A request that found nothing to do may be answered before the work was reported.
            result = replace(result, steps=before.steps)
        if result.pending and not (before and before.pending):
            self._progress.pop(result.name, None)
        self._results[result.name] = result

    def _pool_done(self, message: PoolDone, now_s: float) -> None:
        result = message.result
        seconds = dict(result.steps)
        took_s = sum(seconds.values()) if "Populate" in seconds else None
        self.metrics.count_prepared(result.name, took_s, message.populated)
        self._progress.pop(result.name, None)
        self._take_result(result)
        if result.error is not None:
            self._failed(result.name, result.error, now_s)
        else:
            self._retries.pop(result.name, None)

    def _done(self, message: Done, now_s: float) -> None:
        self.busy = False
        if message.error is None:
            return
        for name, result in self._results.items():
            if result.pending:
                self._results[name] = replace(result, pending=False, error=message.error)
                self._failed(name, message.error, now_s)

    def _failed(self, name: str, failure: Failure, now_s: float) -> None:
        """Try again later, ever more rarely; at the next request where others are in the way."""
        if failure.waits:
            return
        self.metrics.count_failure(name, failure.reason)
        retry = self._retries.setdefault(name, _RetryState())
        retry.retry_at_s = now_s + retry.backoff.next_s()
        retry.regions = self._regions(name)
