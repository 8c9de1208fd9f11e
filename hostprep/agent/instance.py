"""One agent at a time on a node: two locks and the port. A new one stands by until the old exits.

An upgrade with `maxSurge` starts the new Pod beside the old one and ends the old one only once the
new one is Ready. So an agent that stands by is Ready for the same reason as any agent: it observes
the memory itself. It changes nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Self

from hostprep.agent.metrics import Metrics
from hostprep.agent.settings import Settings
from hostprep.agent.verification import verify_node
from hostprep.errors import BadInputError, HostprepError
from hostprep.kube.backoff import wait_for_event
from hostprep.kube.health_server import HealthServer, Listener
from hostprep.kube.logs import Logger
from hostprep.linux.files import from_os_error
from hostprep.linux.lock_holders import is_held_by_another_user
from hostprep.linux.locks import open_own_lock, try_lock
from hostprep.node.apply.exclusive import AgentLock, holder_at, write_pid

_TRY_EVERY_S = 0.2


@dataclass
class InstanceLock:
    """What makes this process the agent of the node."""

    root: AgentLock
    state_fd: int
    listener: Listener
    observed_s: float = 0.0
    """When memory was last observed while standing by, monotonic; 0 without standing by."""

    @classmethod
    def acquire(cls, settings: Settings, listener: Listener | None = None) -> Self:
        """Take both locks, and the port unless it is open already.

        Raises BadInputError: AlreadyRunning, or CannotListen.
        """
        with contextlib.ExitStack() as stack:
            state_fd = lock_state_dir(settings.state_dir)
            stack.callback(os.close, state_fd)
            root = AgentLock(settings.root)
            root.hold()
            stack.callback(root.close)
            listener = listener or Listener.open(settings.listen)
            stack.pop_all()
        return cls(root, state_fd, listener)

    def close(self) -> None:
        """Let the next agent start."""
        self.listener.close()
        self.root.close()
        os.close(self.state_fd)


async def acquire_instance_lock(settings: Settings, log: Logger) -> InstanceLock | None:
    """Become the node's agent, standing by for one that still runs. None after SIGTERM.

    Raises BadInputError (AlreadyRunning) when `settings.wait_s` is over, at once with `once`;
    (CannotListen) where the port cannot be had.
    """
    try:
        return InstanceLock.acquire(settings)
    except BadInputError as error:
        if error.reason != "AlreadyRunning" or settings.once or settings.wait_s <= 0:
            raise
        busy = error
    try:
        listener = Listener.open(settings.listen)
    except BadInputError:
        raise busy from None
    lock = None
    try:
        lock = await _Standby(settings, log, listener).wait(busy)
    finally:
        if lock is None:
            listener.close()
    return lock


def lock_state_dir(folder: str) -> int:
    """Be the only agent with this state folder. Returns a descriptor to keep open.

    Raises BadInputError where another one runs.
    """
    path = f"{folder}/agent.lock"
    try:
        folder_fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise from_os_error(error, f"open {folder}") from error
    try:
        fd = open_own_lock(path)
    except HostprepError:  # a full disk is no reason to leave the node without its memory
        if try_lock(folder_fd, exclusive=True):
            return folder_fd
    else:
        if try_lock(fd, exclusive=True):
            # An agent of an earlier version, or one that started on a full disk, has locked the
            # folder. So may any user who can enter it, for ever: such a lock counts for nothing.
            if try_lock(folder_fd, exclusive=True):
                write_pid(fd)  # not before: else the file names one that is refused
                os.close(fd)
                return folder_fd
            if is_held_by_another_user(folder):
                write_pid(fd)
                os.close(folder_fd)
                return fd
        os.close(fd)
    os.close(folder_fd)
    raise BadInputError(
        f"{holder_at(path, 'agent')} works with {folder}",
        reason="AlreadyRunning",
        remedy="end it first; two nodes on one machine need a --root and a --state-dir each",
    )


@dataclass
class _Standby:
    """Waits for the instance lock, and answers kubelet meanwhile."""

    settings: Settings
    log: Logger
    listener: Listener
    _stop: asyncio.Event = field(default_factory=asyncio.Event)
    _observed_s: float = 0.0

    async def wait(self, busy: BadInputError) -> InstanceLock | None:
        """Try again until it works or SIGTERM comes; raise what is in the way in the end."""
        server = HealthServer(self.listener, Metrics().text, lambda: None, self._why_not_ready)
        await server.start()
        why, wait_s = busy.message, self.settings.wait_s
        self.log.warning("stands_by", port=self.listener.port, why=why, wait_s=wait_s)
        observing = asyncio.create_task(self._observe())
        try:
            with self._stopped_by_signals():
                return await self._try(busy)
        finally:
            observing.cancel()
            await server.stop()

    async def _try(self, busy: BadInputError) -> InstanceLock | None:
        deadline_s = time.monotonic() + self.settings.wait_s
        while not self._stop.is_set():
            try:
                lock = InstanceLock.acquire(self.settings, self.listener)
            except BadInputError as error:
                busy = error
            else:
                lock.observed_s = self._observed_s
                self.log.info("takes_over")
                return lock
            if time.monotonic() >= deadline_s:
                raise busy
            await wait_for_event(self._stop, _TRY_EVERY_S)
        return None

    async def _observe(self) -> None:
        while True:
            try:
                await asyncio.to_thread(verify_node, self.settings.root, repair=False)
            except Exception as error:  # whatever it is: the next round may succeed
                self.log.warning("cannot_look", error=f"{type(error).__name__}: {error}")
            else:
                self._observed_s = time.monotonic()
            await asyncio.sleep(self.settings.verify_interval_s)

    @contextlib.contextmanager
    def _stopped_by_signals(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        signals = (signal.SIGTERM, signal.SIGINT)
        for number in signals:
            loop.add_signal_handler(number, self._stop.set)
        try:
            yield
        finally:
            for number in signals:
                loop.remove_signal_handler(number)

    def _why_not_ready(self) -> str | None:
        if not self._observed_s:
            return "stands by; no verification round has ended yet"
        late_s = time.monotonic() - self._observed_s
        if late_s > 3 * self.settings.verify_interval_s:
            return f"stands by; the last verification round ended {late_s:.0f} s ago"
        return None
