"""The agent: the watch, the worker, the rounds, the report and the health server, put together."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import signal
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from hostprep.agent.brain import Brain
from hostprep.agent.desired import Desire, Source
from hostprep.agent.devices import DeviceSide
from hostprep.agent.messages import Message, PoolDone, Progress, RoundDone
from hostprep.agent.metrics import Metrics
from hostprep.agent.node_api import NodeApi
from hostprep.agent.reporter import Reporter
from hostprep.agent.start import Beginning
from hostprep.agent.supervisor import Supervisor
from hostprep.api.node_resource import NodeStatus
from hostprep.errors import BadInputError, HostprepError
from hostprep.kube.health import HealthServer

__all__ = ["run"]

_API_PATIENCE_S = 10.0
_WORKER_PATIENCE_S = 60.0
_ANSWER_PAUSE_S = 0.05
_DRAIN_S = 6.0
_LAST_WORD_S = 2.0
_NO_STATUS = NodeStatus()


async def run(beginning: Beginning) -> int:
    """Go on from there until SIGTERM, or with `once` until all is done. Returns the exit code."""
    metrics = Metrics()
    api = beginning.api
    if api is not None:
        metrics.connected.set_function(lambda: api.connected)
    return await _Agent(beginning, Brain(metrics)).run()


@dataclass
class _Agent:
    beginning: Beginning
    brain: Brain
    _wake: asyncio.Event = field(default_factory=asyncio.Event)
    _stop: asyncio.Event = field(default_factory=asyncio.Event)
    _heard: asyncio.Event = field(default_factory=asyncio.Event)
    """The API server said what it has."""
    _asked_s: float = 0.0
    """When the round was asked for that is not answered yet; 0 where all are."""
    _alive_s: float = 0.0
    """When the worker last finished a round or reported progress."""
    _turned_s: float = field(default_factory=time.monotonic)
    _exit_code: int = 0

    def __post_init__(self) -> None:
        beginning, metrics = self.beginning, self.brain.metrics
        self.settings, self.log = beginning.settings, beginning.log
        self.api, self.saver, self.place = beginning.api, beginning.saver, beginning.place
        self._alive_s = self.place.looked_s
        self.reporter = Reporter(self.brain, self.api, metrics, self.log)
        settings = self.settings
        self.worker = Supervisor(
            settings.root,
            settings.state_dir,
            self._take,
            self._worker_started,
            self._worker_lost,
            self.log,
            beginning.worker,
        )
        self.devices = DeviceSide(
            settings.root, settings.kubelet_dir, metrics, self.log, self._wake.set
        )
        self.health = HealthServer(
            self.place.listener, metrics.text, self._why_not_healthy, self._why_not_ready
        )

    async def run(self) -> int:
        await self.health.start()
        self.log.info(
            "started",
            port=self.place.listener.port,
            root=self.settings.root,
            boot_id=self.beginning.boot_id,
            instructed_at=self.beginning.instructed_at,
        )
        gc.unfreeze()
        gc.collect()
        gc.freeze()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stop.set)
        self._take_over()
        try:
            async with self._background():
                await self._stop.wait()
                await self._drain()
        finally:
            await self.health.stop()
        self.log.info("ended", exit_code=self._exit_code)
        return self._exit_code

    def _take_over(self) -> None:
        """Want what the worker was told, before it is asked for anything else."""
        if self.beginning.first is not None:
            self._instructed(self.beginning.first.document)
            self._heard.set()

    @contextlib.asynccontextmanager
    async def _background(self) -> AsyncIterator[None]:
        """Run everything beside the block. An error in any part ends the program."""
        parts = [
            self.worker.run(),
            self._rounds(),
            self.reporter.run(),
            self._saved_after_a_while(),
            self.devices.run(),
        ]
        if self.api is not None:
            parts.append(self._watch(self.api))
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(part) for part in parts]
            yield
            for task in tasks:
                task.cancel()

    async def _drain(self) -> None:
        """End in order: no new work, the worker stopped, what it left is the last word."""
        self.log.info("stopping")
        await self.worker.stop(timeout_s=_DRAIN_S)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self.reporter.report(now=True), _LAST_WORD_S)

    # --- what is asked for

    async def _watch(self, api: NodeApi) -> None:
        async for observed in api.watch(self.beginning.version):
            self._instructed(observed.document)
            self._heard.set()

    def _instructed(self, document: Mapping[str, Any] | None) -> None:
        """Act upon the object; where there is none, keep everything as it is."""
        self.reporter.observe(document)
        if document is None:
            if self.brain.desire.source is not Source.NOTHING or not self._heard.is_set():
                self.log.info("no_instruction", node=self.settings.node_name)
            self._adopt(Desire())
            return
        try:
            desire = Desire.of_object(document, boot_id=self.beginning.boot_id)
        except HostprepError as error:
            self.log.warning("bad_instruction", error=error.message, remedy=error.remedy)
            return
        if desire == self.brain.desire:
            return
        self.saver.keep(desire)
        self._adopt(desire)

    async def _saved_after_a_while(self) -> None:
        """Work from the saved entries where the API server does not answer in time."""
        if self.api is not None:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._heard.wait(), _API_PATIENCE_S)
        if self._heard.is_set():
            return
        saved = self.saver.saved
        if saved is None:
            self.log.warning("api_away_nothing_saved")
            if self.settings.once:
                self._end(1)
            return
        self.log.warning("works_from_saved", generation=saved.generation)
        self._adopt(saved)

    def _adopt(self, desire: Desire) -> None:
        self.brain.set_desire(desire)
        self.devices.show(self.brain.device_pools())
        self._wake.set()
        self.reporter.wake.set()

    # --- the worker and its rounds

    async def _rounds(self) -> None:
        """Ask for a round at every interval, and at once where something calls for it."""
        while True:
            self._turned_s = time.monotonic()
            interval_s = self.devices.interval_s(self.settings.verify_interval_s)
            # Not wait_for: Python 3.11's loses a cancellation that comes with the event.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(interval_s):
                    await self._wake.wait()
            now_s = time.monotonic()
            if self._asked_s:
                if now_s - self._asked_s > _WORKER_PATIENCE_S:
                    self.log.error("worker_hangs", pid=self.worker.pid)
                    self.worker.kill()
                await asyncio.sleep(_ANSWER_PAUSE_S)
                continue
            self._wake.clear()
            if self._stop.is_set() or self.worker.pid is None:
                continue
            if not self._is_alone():
                continue
            self.saver.try_again()
            self._asked_s = now_s
            await self.worker.send(self.brain.request(now_s=now_s))

    def _is_alone(self) -> bool:
        """Whether no other agent works below the same root: then this one ends, and says so."""
        try:
            # About to make something, it is the one to make the root: two might otherwise.
            makes = any(not entry.absent for entry in self.brain.desire.entries)
            self.place.root.hold(make_root=makes)
        except BadInputError as error:
            self.log.warning("not_alone", error=error.message, remedy=error.remedy)
            self._end(error.exit_code)
            return False
        return True

    def _take(self, message: Message) -> None:
        now_s = time.monotonic()
        if isinstance(message, RoundDone):
            self._asked_s = 0.0
        if isinstance(message, RoundDone | Progress):
            self._alive_s = now_s
        if self.brain.take(message, now_s=now_s, wall_s=time.time()):
            self._wake.set()
        if isinstance(message, RoundDone | PoolDone):
            self.devices.show(self.brain.device_pools())
        self.reporter.wake.set()
        if self.settings.once:
            self._end_if_done()

    def _worker_started(self) -> None:
        self._asked_s = 0.0
        self._wake.set()

    def _worker_lost(self) -> None:
        self._asked_s = 0.0
        self.brain.lost_worker()
        self.reporter.wake.set()

    # --- once

    def _end_if_done(self) -> None:
        """End the program once there is nothing left to do."""
        if self.api is not None and not (self._heard.is_set() or self.brain.desire.entries):
            return
        if not self.brain.is_settled:
            return
        status = self.brain.status(self.reporter.said or _NO_STATUS, wall_s=time.time())
        ready = status is not None and all(
            condition.status == "True"
            for condition in status.conditions
            if condition.type == "Ready"
        )
        self._end(0 if ready else 1)

    def _end(self, exit_code: int) -> None:
        self._exit_code = exit_code
        self._stop.set()

    # --- health

    def _why_not_healthy(self) -> str | None:
        late_s = time.monotonic() - self._turned_s
        return f"the loop last turned {late_s:.0f} s ago" if late_s > _WORKER_PATIENCE_S else None

    def _why_not_ready(self) -> str | None:
        if self._stop.is_set():
            return "stopping"
        if not self._alive_s:
            return "no verification round has ended yet"
        late_s = time.monotonic() - self._alive_s
        if late_s > 3 * self.settings.verify_interval_s:
            return f"the last verification round ended {late_s:.0f} s ago"
        return None
