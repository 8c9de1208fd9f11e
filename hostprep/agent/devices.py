"""Device plugins of pools with `attach.mode: DevicePlugin`: from observations to kubelet."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace

from hostprep.agent.messages import PoolObservation
from hostprep.agent.metrics import Metrics
from hostprep.client.handoff import Handoff
from hostprep.deviceplugin.devices import Device, device_of
from hostprep.deviceplugin.manager import PluginManager
from hostprep.deviceplugin.views import make_view, refresh_views
from hostprep.errors import HostprepError, NotReadyError
from hostprep.kube.logs import Logger
from hostprep.linux.inotify import WriterWatch
from hostprep.node.observe.pools import pool_error
from hostprep.paths import PoolPaths, canonical_root

_HURRY_S = 3.0
_HURRY_EVERY_S = 0.25
_NO_FOLDER = NotReadyError(
    "kubelet's folder for device plugins is not ours to use",
    reason="NoKubelet",
    remedy="give --kubelet-dir (chart: agent.devicePlugin.enabled=true)",
)


@dataclass(frozen=True, slots=True)
class DevicePool:
    """A pool whose regions kubelet hands out."""

    observation: PoolObservation
    scrubbed_on_claim: bool = False


def devices_of(pool: DevicePool, before: Iterable[Device] = ()) -> tuple[Device, ...]:
    """Return a pool's regions as devices; if it cannot be observed, those of before, unhealthy."""
    if pool.observation.failure:
        return tuple(replace(device, healthy=False) for device in before)
    return tuple(
        device_of(region, scrubbed_on_claim=pool.scrubbed_on_claim)
        for region in pool.observation.named_regions
    )


@dataclass
class DevicePublisher:
    """Offers every observation's regions to kubelet. Does nothing without a kubelet."""

    root: str
    kubelet_dir: str
    metrics: Metrics
    log: Logger
    reconcile_now: Callable[[], None] = lambda: None
    """Called when a process has released a region."""
    _hurry_until_s: float = 0.0
    """Until then a process that released a region may still be ending: observe more often."""
    _devices: dict[str, tuple[Device, ...]] = field(default_factory=dict)
    """What is offered, by pool."""
    _generations: dict[str, int] = field(default_factory=dict)
    """Of the handoff that a pool's views were made from."""
    _complaints: dict[str, str] = field(default_factory=dict)
    """The error last logged, by pool."""
    _writers: WriterWatch | None = None
    _resume: asyncio.TimerHandle | None = None
    """Pending while the writers are not listened to."""

    def __post_init__(self) -> None:
        self.root = canonical_root(self.root)
        self.plugins = PluginManager(
            self.root, self.kubelet_dir, self._registered, self._failed, self._gone
        )

    async def run(self) -> None:
        """Serve kubelet until cancelled."""
        loop = asyncio.get_running_loop()
        try:
            with contextlib.ExitStack() as stack:
                self._writers = self._watch_writers()
                self._generations.clear()  # so that regions of earlier observations are watched
                if self._writers is not None:
                    stack.callback(self._writers.close)
                    self._listen(loop)
                    stack.callback(self._stop_listening, loop, self._writers.fd)
                await self.plugins.run()
        finally:
            self._writers = None

    def interval_s(self, usual_s: float) -> float:
        """Return how long to wait for the next verification round."""
        hurries = time.monotonic() < self._hurry_until_s
        return min(usual_s, _HURRY_EVERY_S) if hurries else usual_s

    def show(self, pools: Mapping[str, DevicePool] | None) -> None:
        """Offer these pools; with None (no instruction) go on as before.

        A pool is offered from the first observation on that finds it published for this boot:
        kubelet would otherwise start containers over memory that is not verified yet.
        """
        if pools is None:
            return
        if not self.kubelet_dir:
            for name in pools:
                self._complain(name, "device_plugin_not_registered", _NO_FOLDER)
            return
        offered: dict[str, tuple[Device, ...]] = {}
        for name, pool in pools.items():
            if pool.observation.published or name in self._devices:
                self._refresh(name, pool.observation)
                offered[name] = devices_of(pool, self._devices.get(name, ()))
        self._generations = {n: g for n, g in self._generations.items() if n in offered}
        self._devices = offered
        self.metrics.show_devices(
            {name: [device.health for device in devices] for name, devices in offered.items()}
        )
        self.plugins.show(offered)

    def _refresh(self, name: str, pool: PoolObservation) -> None:
        """Bring the views of this pool's containers up to date with its handoff."""
        if pool.generation == self._generations.get(name):
            return
        paths = PoolPaths(self.root, name)
        try:
            handoff = refresh_views(paths)
            for region in handoff.regions if handoff else ():
                make_view(paths, [region.name])
        except (HostprepError, OSError) as error:
            self._complain(name, "device_views_failed", pool_error(name, error))
            return
        self._generations[name] = pool.generation
        self._watch(paths, handoff)

    def _watch(self, paths: PoolPaths, handoff: Handoff | None) -> None:
        if self._writers is None or handoff is None:
            return
        try:
            self._writers.watch(paths.region_of(region.path) for region in handoff.regions)
        except OSError as error:
            self.log.info("leases_not_watched", pool=paths.pool, error=str(error))

    def _watch_writers(self) -> WriterWatch | None:
        try:
            return WriterWatch()
        except OSError as error:  # then the next round sees the end of a lease
            self.log.info("leases_not_watched", error=str(error))
            return None

    def _listen(self, loop: asyncio.AbstractEventLoop) -> None:
        if self._writers is not None:
            loop.add_reader(self._writers.fd, self._pause_and_check, loop, self._writers.fd)

    def _stop_listening(self, loop: asyncio.AbstractEventLoop, fd: int) -> None:
        loop.remove_reader(fd)
        if self._resume is not None:
            self._resume.cancel()
            self._resume = None

    def _pause_and_check(self, loop: asyncio.AbstractEventLoop, fd: int) -> None:
        """Listen again after a pause: a process may open and close a region without end."""
        loop.remove_reader(fd)
        self._resume = loop.call_later(_HURRY_EVERY_S, self._listen, loop)
        self._check_writers()

    def _check_writers(self) -> None:
        """Ask for a round at once; while in a hurry the next one comes soon anyway."""
        if self._writers is None or not self._writers.was_closed():
            return
        now_s = time.monotonic()
        hurries, self._hurry_until_s = now_s < self._hurry_until_s, now_s + _HURRY_S
        if not hurries:
            self.reconcile_now()

    # --- events of the plugins

    def _registered(self, pool: str) -> None:
        devices = self._devices.get(pool)
        if devices is None:
            return
        self._complaints.pop(pool, None)
        self.metrics.device_plugin_registered.labels(pool).set(1)
        self.log.info("device_plugin_registered", pool=pool, devices=len(devices))

    def _failed(self, pool: str, error: HostprepError) -> None:
        self.metrics.device_plugin_registered.labels(pool).set(0)
        self._complain(pool, "device_plugin_not_registered", error)

    def _gone(self, pool: str) -> None:
        self._complaints.pop(pool, None)
        with contextlib.suppress(KeyError):
            self.metrics.device_plugin_registered.remove(pool)

    def _complain(self, pool: str, event: str, error: HostprepError) -> None:
        """Log an error once, however often it is met."""
        if self._complaints.get(pool) != error.message:
            self._complaints[pool] = error.message
            self.log.warning(event, pool=pool, error=error.message, remedy=error.remedy)
