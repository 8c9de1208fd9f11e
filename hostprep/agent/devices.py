"""Pools of `attach.mode: devicePlugin`: from what a round found to what kubelet is told."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace

from hostprep.agent.messages import PoolLook, RegionLook
from hostprep.agent.metrics import Metrics
from hostprep.client.handoff import Handoff
from hostprep.deviceplugin.devices import Device, RegionState, device_of
from hostprep.deviceplugin.plugins import PluginEvents, Plugins
from hostprep.deviceplugin.views import make_view, refresh_views
from hostprep.errors import HostprepError, NotReadyError
from hostprep.kube.logs import Logger
from hostprep.linux.inotify import WriterWatch
from hostprep.paths import PoolPaths, canonical_root
from hostprep.zipapp import STABLE_NAME

__all__ = ["DevicePool", "DeviceSide", "devices_of"]

_HURRY_S = 3.0
_HURRY_EVERY_S = 0.25


@dataclass(frozen=True, slots=True)
class DevicePool:
    """A pool that is to be handed out by kubelet."""

    name: str
    look: PoolLook
    scrubbed_on_claim: bool = False


def devices_of(pool: DevicePool, before: Iterable[Device] = ()) -> tuple[Device, ...]:
    """Return a pool's regions as devices; while it cannot be looked at, those of before, ill."""
    if pool.look.failure:
        return tuple(replace(device, healthy=False) for device in before)
    regions: dict[str, RegionLook] = {}
    for region in pool.look.regions:  # a half-made one may have a finished namesake
        if regions.get(region.name, region).state == "Unfinished" or region.name not in regions:
            regions[region.name] = region
    return tuple(
        device_of(
            RegionState(
                name=region.name,
                placement=region.placement,
                state=region.state,
                scrubbed_on_claim=pool.scrubbed_on_claim,
            )
        )
        for region in regions.values()
    )


@dataclass
class DeviceSide:
    """The agent's device plugins, told of every look. Does nothing where there is no kubelet."""

    root: str
    kubelet_dir: str
    metrics: Metrics
    log: Logger
    look_now: Callable[[], None] = lambda: None
    """Called when somebody let go of a region."""
    _hurry_until_s: float = 0.0
    """Until then whoever let go may still be ending: look more often."""
    _devices: dict[str, tuple[Device, ...]] = field(default_factory=dict)
    """What is offered, by pool."""
    _generations: dict[str, int] = field(default_factory=dict)
    """Of the handoff that a pool's views were made from."""
    _said: dict[str, str] = field(default_factory=dict)
    _writers: WriterWatch | None = None
    _resume: asyncio.TimerHandle | None = None
    """When the writers are listened to again."""

    def __post_init__(self) -> None:
        self.root = canonical_root(self.root)
        events = PluginEvents(
            registered=self._registered, failed=self._failed, gone=self._signed_off
        )
        self.plugins = Plugins(self.root, STABLE_NAME, self.kubelet_dir, events)

    async def run(self) -> None:
        """Speak to kubelet until cancelled."""
        loop = asyncio.get_running_loop()
        try:
            with contextlib.ExitStack() as stack:
                self._writers = self._watch_writers()
                self._generations.clear()  # what was seen before is to be watched as well
                if self._writers is not None:
                    stack.callback(self._writers.close)
                    self._listen(loop)
                    stack.callback(self._stop_listening, loop, self._writers.fd)
                await self.plugins.run()
        finally:
            self._writers = None

    def interval_s(self, usual_s: float) -> float:
        """Return how long to wait for the next look."""
        hurries = time.monotonic() < self._hurry_until_s
        return min(usual_s, _HURRY_EVERY_S) if hurries else usual_s

    def show(self, pools: Mapping[str, DevicePool] | None) -> None:
        """Offer these pools; with None (no instruction) go on as before.

        A pool is offered from the first look on that finds it published for this boot: kubelet
        would otherwise start containers over memory that nobody has verified yet.
        """
        if pools is None:
            return
        if not self.kubelet_dir:
            for name in pools:
                self._say(name, "device_plugin_not_registered", _no_folder())
            return
        offered: dict[str, tuple[Device, ...]] = {}
        for name, pool in pools.items():
            if pool.look.published or name in self._devices:
                self._refresh(name, pool.look)
                offered[name] = devices_of(pool, self._devices.get(name, ()))
        self._generations = {n: g for n, g in self._generations.items() if n in offered}
        self._devices = offered
        self.metrics.show_devices(
            {name: [device.health for device in devices] for name, devices in offered.items()}
        )
        self.plugins.show(offered)

    def _refresh(self, name: str, look: PoolLook) -> None:
        """Have what containers of this pool see, of the handoff that stands now."""
        if look.generation == self._generations.get(name):
            return
        paths = PoolPaths(self.root, name)
        try:
            handoff = refresh_views(paths)
            for region in handoff.regions if handoff else ():
                make_view(paths, [region.name])
        except HostprepError as error:
            self._say(name, "device_views_failed", error)
            return
        self._generations[name] = look.generation
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
        except OSError as error:  # then a lease's end is seen by the next round
            self.log.info("leases_not_watched", error=str(error))
            return None

    def _listen(self, loop: asyncio.AbstractEventLoop) -> None:
        if self._writers is not None:
            loop.add_reader(self._writers.fd, self._pause_and_look, loop, self._writers.fd)

    def _stop_listening(self, loop: asyncio.AbstractEventLoop, fd: int) -> None:
        loop.remove_reader(fd)
        if self._resume is not None:
            self._resume.cancel()
            self._resume = None

    def _pause_and_look(self, loop: asyncio.AbstractEventLoop, fd: int) -> None:
        """Listen again in a while only: whoever may open a region can close it without end."""
        loop.remove_reader(fd)
        self._resume = loop.call_later(_HURRY_EVERY_S, self._listen, loop)
        self._writer_left()

    def _writer_left(self) -> None:
        """Have a look at once, the first time; in a hurry there is one coming soon anyway."""
        if self._writers is None or not self._writers.was_closed():
            return
        now_s = time.monotonic()
        hurries, self._hurry_until_s = now_s < self._hurry_until_s, now_s + _HURRY_S
        if not hurries:
            self.look_now()

    # --- what became of it

    def _registered(self, pool: str) -> None:
        devices = self._devices.get(pool)
        if devices is None:
            return
        self._said.pop(pool, None)
        self.metrics.device_plugin_registered.labels(pool).set(1)
        self.log.info("device_plugin_registered", pool=pool, devices=len(devices))

    def _failed(self, pool: str, error: HostprepError) -> None:
        self.metrics.device_plugin_registered.labels(pool).set(0)
        self._say(pool, "device_plugin_not_registered", error)

    def _signed_off(self, pool: str) -> None:
        self._said.pop(pool, None)
        with contextlib.suppress(KeyError):
            self.metrics.device_plugin_registered.remove(pool)

    def _say(self, pool: str, event: str, error: HostprepError) -> None:
        """Say it once, however often it is met."""
        if self._said.get(pool) != error.message:
            self._said[pool] = error.message
            self.log.warning(event, pool=pool, error=error.message, remedy=error.remedy)


def _no_folder() -> NotReadyError:
    return NotReadyError(
        "kubelet's folder for device plugins is not ours to use",
        reason="NoKubelet",
        remedy="give --kubelet-dir (chart: agent.devicePlugin.enabled=true)",
    )
