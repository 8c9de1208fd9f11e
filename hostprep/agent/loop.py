"""The agent's process: watch, worker, reconcile loop, status and health server put together."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from hostprep.agent.desired import DesiredState, DesiredStateStore, Source
from hostprep.agent.devices import DevicePublisher
from hostprep.agent.instance import InstanceLock, acquire_instance_lock
from hostprep.agent.last_status import LastStatus
from hostprep.agent.messages import Message, PoolDone, Progress, ReconcileResult
from hostprep.agent.metrics import Metrics
from hostprep.agent.node_api import NodeApi
from hostprep.agent.reporter import Reporter
from hostprep.agent.settings import Settings
from hostprep.agent.state import AgentState
from hostprep.agent.supervisor import Supervisor
from hostprep.api.node_resource import NodeStatus
from hostprep.errors import BadInputError, HostprepError
from hostprep.kube.backoff import wait_for_event
from hostprep.kube.health_server import HealthServer
from hostprep.kube.logs import Logger

_API_PATIENCE_S = 10.0
_WORKER_PATIENCE_S = 60.0
_ANSWER_PAUSE_S = 0.05
_FIRST_ROUND_S = 10.0
"""An agent that stood by is Ready: it stays so while its worker starts and verifies for once."""
_DRAIN_S = 6.0
_LAST_REPORT_S = 2.0


async def run(settings: Settings, log: Logger) -> int:
    """Run until SIGTERM, or with `once` until all is done. Returns the exit code.

    Raises BadInputError for settings that cannot be used, before anything is changed.
    """
    boot_id = settings.check()
    lock = await acquire_instance_lock(settings, log)
    if lock is None:
        return 0
    api = None
    try:
        store = DesiredStateStore(settings.state_dir, log)
        saved = store.read()
        api = await NodeApi.connect(settings.node_name, settings.kubeconfig, log)
        if api is None and saved is None:
            raise BadInputError(
                "there is no API server to ask, and nothing was saved by an earlier run",
                reason="NoInstruction",
                remedy="give --kubeconfig, or run it in a pod; without a cluster use"
                " `hostprep prepare`",
            )
        return await _Agent(settings, log, boot_id, lock, store, api).run()
    finally:
        if api is not None:
            await api.close()
        lock.close()


@dataclass
class _Agent:
    settings: Settings
    log: Logger
    boot_id: str
    lock: InstanceLock
    store: DesiredStateStore
    api: NodeApi | None
    """None without an API server to ask."""
    _wake: asyncio.Event = field(default_factory=asyncio.Event)
    _stop: asyncio.Event = field(default_factory=asyncio.Event)
    _api_answered: asyncio.Event = field(default_factory=asyncio.Event)
    _requested_s: float = 0.0
    """When the request was sent that is not answered yet; 0 where all are."""
    _alive_s: float = 0.0
    """When the worker last finished a verification round or reported progress."""
    _has_verified: bool = False
    _turned_s: float = field(default_factory=time.monotonic)
    _exit_code: int = 0

    def __post_init__(self) -> None:
        settings, metrics = self.settings, Metrics()
        if (api := self.api) is not None:
            metrics.connected.set_function(lambda: api.connected)
        self._alive_s = self.lock.observed_s
        self.state = AgentState(metrics)
        last = LastStatus(settings.state_dir)
        self.reporter = Reporter(self.state, self.api, metrics, self.log, last)
        self.worker = Supervisor(
            settings.root,
            settings.state_dir,
            on_message=self._take,
            on_start=self._worker_started,
            on_lost=self._worker_lost,
            log=self.log,
        )
        self.devices = DevicePublisher(
            settings.root, settings.kubelet_dir, metrics, self.log, self._wake.set
        )
        self.health = HealthServer(
            self.lock.listener, metrics.text, self._why_not_healthy, self._why_not_ready
        )

    async def run(self) -> int:
        await self.health.start()
        self.log.info(
            "started",
            port=self.lock.listener.port,
            root=self.settings.root,
            boot_id=self.boot_id,
        )
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stop.set)
        try:
            async with self._background():
                await self._stop.wait()
                await self._drain()
        finally:
            await self.health.stop()
        self.log.info("ended", exit_code=self._exit_code)
        return self._exit_code

    @contextlib.asynccontextmanager
    async def _background(self) -> AsyncIterator[None]:
        """Run everything beside the block. An error in any part ends the program."""
        parts = [
            self.worker.run(),
            self._reconcile(),
            self.reporter.run(),
            self._use_saved_state(),
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
        """End in order: no new work, the worker stopped, what it left reported last."""
        self.log.info("stopping")
        await self.worker.stop(timeout_s=_DRAIN_S)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self.reporter.report(now=True), _LAST_REPORT_S)

    # --- the desired state

    async def _watch(self, api: NodeApi) -> None:
        async for document in api.watch():
            self._take_object(document)
            self._api_answered.set()

    def _take_object(self, document: Mapping[str, Any] | None) -> None:
        """Act upon the object; where there is none, keep everything as it is."""
        self.reporter.observe(document)
        if document is None:
            if self.state.desired.source is not Source.NOTHING or not self._api_answered.is_set():
                self.log.info("no_instruction", node=self.settings.node_name)
            self._adopt(DesiredState())
            return
        try:
            desired = DesiredState.of_object(document, boot_id=self.boot_id)
        except HostprepError as error:
            self.log.warning("bad_instruction", error=error.message, remedy=error.remedy)
            return
        if desired == self.state.desired:
            return
        self.store.save(desired)
        self._adopt(desired)

    async def _use_saved_state(self) -> None:
        """Work from the saved entries where the API server does not answer in time."""
        if self.api is not None:
            await wait_for_event(self._api_answered, _API_PATIENCE_S)
        if self._api_answered.is_set():
            return
        saved = self.store.saved
        if saved is None:
            self.log.warning("api_away_nothing_saved")
            if self.settings.once:
                self._end(1)
            return
        self.log.warning("works_from_saved", generation=saved.generation)
        self._adopt(saved)

    def _adopt(self, desired: DesiredState) -> None:
        self.state.set_desired(desired)
        self.devices.show(self.state.device_pools())
        self._wake.set()
        self.reporter.wake.set()

    # --- the worker

    async def _reconcile(self) -> None:
        """Send the worker a request at every interval, and at once where something calls for it."""
        while True:
            self._turned_s = time.monotonic()
            interval_s = self.devices.interval_s(self.settings.verify_interval_s)
            await wait_for_event(self._wake, interval_s)
            now_s = time.monotonic()
            if self._requested_s:
                if now_s - self._requested_s > _WORKER_PATIENCE_S:
                    self.log.error("worker_hangs", pid=self.worker.pid)
                    self.worker.kill()
                await asyncio.sleep(_ANSWER_PAUSE_S)
                continue
            self._wake.clear()
            if self._stop.is_set() or self.worker.pid is None or not self._holds_root():
                continue
            self.store.try_again()
            self._requested_s = now_s
            await self.worker.send(self.state.request(now_s=now_s))

    def _holds_root(self) -> bool:
        """Whether no other agent works below the same root; where one does, this one ends."""
        try:
            # With something to prepare, the lock makes the root: two agents might otherwise.
            self.lock.root.hold(make=self.state.desired.asks_for_memory)
        except BadInputError as error:
            self.log.warning("not_alone", error=error.message, remedy=error.remedy)
            self._end(error.exit_code)
            return False
        return True

    def _take(self, message: Message) -> None:
        now_s = time.monotonic()
        if isinstance(message, ReconcileResult):
            self._requested_s = 0.0
            self._has_verified = True
        if isinstance(message, ReconcileResult | Progress):
            self._alive_s = now_s
        if self.state.take(message, now_s=now_s, wall_s=time.time()):
            self._wake.set()
        if isinstance(message, ReconcileResult | PoolDone):
            self.devices.show(self.state.device_pools())
        self.reporter.wake.set()
        if self.settings.once:
            self._end_if_done()

    def _worker_started(self) -> None:
        self._requested_s = 0.0
        self._wake.set()

    def _worker_lost(self) -> None:
        self._requested_s = 0.0
        self.state.worker_lost()
        self.reporter.wake.set()

    # --- the end

    def _end_if_done(self) -> None:
        """End the program once there is nothing left to do (`once`)."""
        knows = self.api is None or self._api_answered.is_set() or self.state.desired.entries
        if not knows or not self.state.is_settled:
            return
        status = self.state.status(self.reporter.reported or NodeStatus(), wall_s=time.time())
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
        return f"the loop last ran {late_s:.0f} s ago" if late_s > _WORKER_PATIENCE_S else None

    def _why_not_ready(self) -> str | None:
        if self._stop.is_set():
            return "stopping"
        if not self._alive_s:
            return "no verification round has ended yet"
        late_s = time.monotonic() - self._alive_s
        start_s = 0.0 if self._has_verified else _FIRST_ROUND_S
        if late_s > 3 * self.settings.verify_interval_s + start_s:
            return f"the last verification round ended {late_s:.0f} s ago"
        return None
