"""One agent at a time on a node: a new one stands by until the old one has ended.

An upgrade with `maxSurge` starts the new Pod beside the old one and ends the old one only once the
new one is Ready. So whoever stands by is Ready, for the reason that any agent is: its own last look
at the memory. It changes nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

from hostprep.agent.health import HealthServer
from hostprep.agent.logs import Logger
from hostprep.agent.looking import look
from hostprep.agent.metrics import Metrics
from hostprep.agent.settings import Settings
from hostprep.apply.exclusive import AgentLock
from hostprep.errors import BadInputError

__all__ = ["Place", "take_place"]

_TRY_EVERY_S = 0.2


@dataclass
class Place:
    """Being the node's agent: two locks, and when memory was last looked at on the way there."""

    root: AgentLock
    _state: int
    looked_s: float = 0.0
    """Monotonic; 0 where nobody stood by."""

    def close(self) -> None:
        """Let the next one in."""
        self.root.close()
        os.close(self._state)


async def take_place(settings: Settings, log: Logger, metrics: Metrics) -> Place | None:
    """Become the node's agent, standing by for one that still runs. None where told to end.

    Raises BadInputError (AlreadyRunning) when `settings.wait_s` is over, at once with `once`.
    """
    try:
        return _take(settings)
    except BadInputError as error:
        if error.reason != "AlreadyRunning" or settings.once or settings.wait_s <= 0:
            raise
        return await _Standby(settings, log, metrics).wait(error)


def _take(settings: Settings) -> Place:
    state = settings.lock()
    root = AgentLock(settings.root)
    try:
        root.hold()
    except BadInputError:
        os.close(state)
        raise
    return Place(root, state)


@dataclass
class _Standby:
    settings: Settings
    log: Logger
    metrics: Metrics
    _stop: asyncio.Event = field(default_factory=asyncio.Event)
    _looked_s: float = 0.0

    async def wait(self, busy: BadInputError) -> Place | None:
        """Try again until it works; raises what is in the way when the time is over."""
        server = HealthServer(self.settings.listen, self.metrics, lambda: None, self._why_not_ready)
        try:
            port = await server.start()
        except BadInputError:
            raise busy from None
        self.log.warning("stands_by", port=port, why=busy.message, wait_s=self.settings.wait_s)
        looks = asyncio.create_task(self._look())
        try:
            with self._told_to_end():
                return await self._try(busy)
        finally:
            looks.cancel()
            await server.stop()

    async def _try(self, busy: BadInputError) -> Place | None:
        deadline_s = time.monotonic() + self.settings.wait_s
        while not self._stop.is_set():
            try:
                place = _take(self.settings)
            except BadInputError as error:
                busy = error
            else:
                place.looked_s = self._looked_s
                self.log.info("takes_over")
                return place
            if time.monotonic() >= deadline_s:
                raise busy
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stop.wait(), _TRY_EVERY_S)
        return None

    async def _look(self) -> None:
        while True:
            try:
                await asyncio.to_thread(look, self.settings.root, repair=False)
            except Exception as error:  # whatever it is: the next look may go well
                self.log.warning("cannot_look", error=f"{type(error).__name__}: {error}")
            else:
                self._looked_s = time.monotonic()
            await asyncio.sleep(self.settings.verify_interval_s)

    @contextlib.contextmanager
    def _told_to_end(self) -> Iterator[None]:
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
        if not self._looked_s:
            return "stands by; nothing was looked at yet"
        late_s = time.monotonic() - self._looked_s
        if late_s > 3 * self.settings.verify_interval_s:
            return f"stands by; the last look ended {late_s:.0f} s ago"
        return None
