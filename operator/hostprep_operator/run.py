"""`hostprep-operator run`: starts and stops the parts of the operator in order."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Any

import structlog

from hostprep.errors import BadInputError, FailedError
from hostprep.kube.client import KubeClient
from hostprep.kube.health_server import CANNOT_LISTEN, HealthServer, Listener, parse_listen
from hostprep_operator.controller import Controller
from hostprep_operator.events import Recorder
from hostprep_operator.leader_election import Leader
from hostprep_operator.metrics import Metrics
from hostprep_operator.process import run_process
from hostprep_operator.queue import KeyedQueue
from hostprep_operator.reconcile.changes import Settings
from hostprep_operator.store import Cache, EventHandler, Key
from hostprep_operator.watch import Watches

_log = structlog.get_logger("operator")
_FINISH_S = 5.0
"""For writes that are in flight when the process stops."""
_STUCK_S = 300.0
"""A key that waited so long for a worker: all workers are stuck, and a restart helps."""

_AWAY_S = 600.0
"""An API server may be away for so long before this replica counts as not ready."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The command line's options."""

    namespace: str
    settings: Settings = field(default_factory=Settings)
    workers: int = 12
    leader_elect: bool = False
    lease_name: str = "hostprep-operator"
    listen: str = ":9809"
    resync_s: float = 3600.0
    kubeconfig: str | None = None
    identity: str = ""

    @property
    def watch_agents(self) -> bool:
        """Whether the readiness of agents' Pods is watched."""
        return self.settings.liveness == "pods"


async def run_operator(options: Options) -> int:
    """Run until SIGTERM or SIGINT. Returns the exit code.

    Raises BadInputError where the API server or the port cannot be addressed, and
    FailedError where it cannot listen.
    """
    parse_listen(options.listen)
    metrics = Metrics()
    kube = await KubeClient.connect(
        options.kubeconfig, name="hostprep-operator", on_write=metrics.wrote
    )
    async with AsyncExitStack() as stack:
        stack.push_async_callback(kube.close)
        try:
            listener = Listener.open(options.listen)
        except BadInputError as error:
            if error.reason != CANNOT_LISTEN:
                raise
            # An address that is taken: a restart may find it free.
            raise FailedError(error.message, reason=error.reason, remedy=error.remedy) from error
        stack.callback(listener.close)
        operator = _Operator(options, kube, listener, metrics)
        await operator.server.start()
        stack.push_async_callback(operator.server.stop)
        structlog.get_logger("health").info("listening", port=listener.port)
        return await operator.run()


@dataclass(slots=True)
class Health:
    """What the probes report."""

    synced: bool = False
    standby: bool = False
    """Another replica holds the Lease, and this one waits for it: ready, not working."""
    stopping: bool = False
    silent_s: Callable[[], float] = field(default=lambda: 0.0)
    """For how long a watch has brought nothing, not even a bookmark."""
    oldest_key_s: Callable[[], float] = field(default=lambda: 0.0)

    def alive(self) -> str:
        """Return what is wrong, or nothing. Any answer proves that the event loop runs."""
        oldest_s = self.oldest_key_s()
        if oldest_s > _STUCK_S:
            return f"a key has waited {oldest_s:.0f} s for a worker"
        return ""

    def ready(self) -> str:
        """Return why not ready, or nothing."""
        if self.stopping:
            return "stopping"
        if self.standby:
            return ""
        if not self.synced:
            return "not yet in sync with the API server"
        silent_s = self.silent_s()
        return f"a watch has brought nothing for {silent_s:.0f} s" if silent_s > _AWAY_S else ""


class _Operator:
    """One run of the program."""

    def __init__(
        self, options: Options, kube: KubeClient, listener: Listener, metrics: Metrics
    ) -> None:
        self._options = options
        self._stop = asyncio.Event()
        self._has_failed = False
        self._tasks: list[asyncio.Task[Any]] = []
        self.metrics = metrics
        self.kube = kube
        self._health = Health()
        self.server = HealthServer(listener, metrics.text, self._health.alive, self._health.ready)
        self._identity = options.identity or socket.gethostname()
        self._leader = Leader(
            self.kube,
            namespace=options.namespace,
            name=options.lease_name,
            identity=f"{self._identity}_{os.urandom(4).hex()}",
        )

    async def run(self) -> int:
        """Become the leader if configured, work, stop in order. Returns the exit code."""
        self._catch_signals()
        if not await self._lead():
            return 0
        try:
            return await self._work()
        finally:
            if self._options.leader_elect:
                await self._leader.release()
            _log.info("stopped")

    async def _lead(self) -> bool:
        """Become the leader; False when stopped before that."""
        if self._options.leader_elect:
            self._health.standby = True
            if not await self._unless_stopped(self._leader.acquire()):
                return False
            self._health.standby = False
            self._start(self._watch_lease(), "lease")
            _log.info("this replica leads", identity=self._identity)
        self.metrics.leader.set(1)
        return True

    async def _watch_lease(self) -> None:
        why = await self._leader.keep()
        _log.error("lost the lead; ending at once, since another replica may work now", why=why)
        sys.stderr.flush()
        os._exit(1)

    async def _work(self) -> int:
        cache, queue = Cache(), KeyedQueue[Key]()
        handler = EventHandler(cache, queue)
        self._health.oldest_key_s = queue.oldest_s
        watches = Watches(
            self.kube,
            cache,
            handler,
            self.metrics,
            namespace=self._options.namespace,
            watch_agents=self._options.watch_agents,
            relist_s=self._options.resync_s,
        )
        # All of our tasks start before kopf: it cancels tasks that were started after it.
        for kind in watches.kinds:
            self._start(watches.follow(kind), f"watch of {kind}")
        if not await self._unless_stopped(watches.synced()):
            await self._cancel()
            return 0
        self._health.silent_s = watches.silent_s
        recorder = Recorder(self.kube, identity=self._identity)
        controller = Controller(
            kube=self.kube,
            cache=cache,
            queue=queue,
            handler=handler,
            recorder=recorder,
            metrics=self.metrics,
            settings=self._options.settings,
        )
        self._start(recorder.run(), "events")
        workers = [
            self._start(controller.work(), f"worker {number}")
            for number in range(self._options.workers)
        ]
        guard = asyncio.create_task(self._guard(), name="guard")

        async def start_up() -> None:
            self._catch_signals()  # kopf has put its own handlers there, good for one signal
            handler.open()
            self._health.synced = True

        async def clean_up() -> None:
            self._health.stopping = True
            guard.cancel()
            await self.server.stop()
            self.server.listener.close()
            await self._finish(queue, workers, recorder)

        try:
            await run_process(
                self.kube,
                namespace=self._options.namespace,
                stop=self._stop,
                start_up=start_up,
                clean_up=clean_up,
            )
        except Exception as error:
            _log.error("kopf failed", error=repr(error))
            await self._cancel()
            return 1
        return 1 if self._has_failed else 0

    async def _guard(self) -> None:
        """Stop everything where a task ends by itself."""
        done, _ = await asyncio.wait(self._tasks, return_when=asyncio.FIRST_COMPLETED)
        self._has_failed = _report(done)
        self._stop.set()

    async def _finish(
        self, queue: KeyedQueue[Key], workers: list[asyncio.Task[Any]], recorder: Recorder
    ) -> None:
        """Let writes in flight end, post the events that wait, stop the rest."""
        queue.close()
        await asyncio.wait(workers, timeout=_FINISH_S)
        await self._cancel()
        await recorder.flush(1.0)

    async def _cancel(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _start(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[Any]:
        task = asyncio.create_task(work, name=name)
        self._tasks.append(task)
        return task

    def _catch_signals(self) -> None:
        """Take SIGTERM and SIGINT; again once kopf has put its own handlers there."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stop.set)

    async def _unless_stopped(self, work: Awaitable[None]) -> bool:
        """Wait for it; False when stopped before it is done."""
        task = asyncio.ensure_future(work)
        stopping = asyncio.create_task(self._stop.wait())
        await asyncio.wait({task, stopping}, return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        if task.done():
            await task
            return not self._stop.is_set()
        task.cancel()
        return False


def _report(done: set[asyncio.Task[Any]]) -> bool:
    """Log the tasks that ended although they never should; return whether any did."""
    for task in done:
        error = None if task.cancelled() else task.exception()
        _log.error("a part ended by itself", part=task.get_name(), error=repr(error))
    return bool(done)
