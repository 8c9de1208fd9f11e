"""One agent at a time on a node: a new one stands by until the old one has ended.

An upgrade with `maxSurge` starts the new Pod beside the old one and ends the old one only once the
new one is Ready. So whoever stands by is Ready, for the reason that any agent is: its own last look
at the memory. It changes nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from hostprep.agent.looking import look
from hostprep.agent.metrics import Metrics
from hostprep.agent.place import Place
from hostprep.agent.settings import Settings
from hostprep.errors import BadInputError
from hostprep.kube.health import HealthServer
from hostprep.kube.listener import Listener
from hostprep.kube.logs import Logger

__all__ = ["Standby"]

_TRY_EVERY_S = 0.2


@dataclass
class Standby:
    """Waits for a place."""

    settings: Settings
    log: Logger
    take: Callable[[Settings, Listener], Place]
    """Takes the place, with a port that is open already. Raises BadInputError."""
    _stop: asyncio.Event = field(default_factory=asyncio.Event)
    _looked_s: float = 0.0

    async def wait(self, busy: BadInputError) -> Place | None:
        """Try again until it works; raises what is in the way when the time is over."""
        try:
            listener = Listener.open(self.settings.listen)
        except BadInputError:
            raise busy from None
        place = None
        try:
            place = await self._wait(listener, busy)
        finally:
            if place is None:
                listener.close()
        return place

    async def _wait(self, listener: Listener, busy: BadInputError) -> Place | None:
        server = HealthServer(listener, Metrics().text, lambda: None, self._why_not_ready)
        await server.start()
        why, wait_s = busy.message, self.settings.wait_s
        self.log.warning("stands_by", port=listener.port, why=why, wait_s=wait_s)
        looks = asyncio.create_task(self._look())
        try:
            with self._told_to_end():
                return await self._try(listener, busy)
        finally:
            looks.cancel()
            await server.stop()

    async def _try(self, listener: Listener, busy: BadInputError) -> Place | None:
        deadline_s = time.monotonic() + self.settings.wait_s
        while not self._stop.is_set():
            try:
                place = self.take(self.settings, listener)
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
