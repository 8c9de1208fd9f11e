"""All device plugins of a node: served while their pools exist, registered with every new kubelet.

Kubelet empties its folder for device plugins when it starts (CleanupPluginDirectory in
pkg/kubelet/cm/devicemanager/manager.go) and notifies no plugin: the folder is polled every second.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from hostprep.deviceplugin.devices import Device, plugins_folder, socket_identity
from hostprep.errors import FailedError, HostprepError, NotReadyError
from hostprep.paths import PoolPaths

if TYPE_CHECKING:
    from hostprep.deviceplugin.plugin import PoolPlugin

_POLL_EVERY_S = 1.0
_RETRY_MOST_S = 60.0
_DROPPED_AFTER_S = 10.0
"""Without a stream for that long after it registered, kubelet has let go of a plugin."""


@dataclass(slots=True)
class _Pool:
    """One pool that is, or is to be, served."""

    devices: Sequence[Device]
    plugin: PoolPlugin | None = None
    kubelet: tuple[int, ...] | None = None
    """The kubelet that it is registered with, by its socket; None for none."""
    tried: tuple[int, ...] | None = None
    """The kubelet that was last tried: another one is tried at once."""
    registered_s: float = 0.0
    retry_at_s: float = 0.0
    pause_s: float = _POLL_EVERY_S
    complaint: str = ""


@dataclass
class PluginManager:
    """Keeps a plugin for each pool that is offered. Never fails: it calls `on_failed`."""

    root: str
    kubelet_dir: str
    on_registered: Callable[[str], None]
    on_failed: Callable[[str, HostprepError], None]
    """A pool, and why it cannot be offered; once for each reason, however often it is tried."""
    on_gone: Callable[[str], None]
    _pools: dict[str, _Pool] = field(default_factory=dict)
    _leaving: list[PoolPlugin] = field(default_factory=list)
    _wake: asyncio.Event = field(default_factory=asyncio.Event)

    def show(self, offered: Mapping[str, Sequence[Device]]) -> None:
        """Offer these pools from now on, each with these devices, and no others."""
        for name in [name for name in self._pools if name not in offered]:
            plugin = self._pools.pop(name).plugin
            if plugin is not None:
                self._leaving.append(plugin)
            self.on_gone(name)
            self._wake.set()
        for name, devices in offered.items():
            pool = self._pools.get(name)
            if pool is None:
                self._pools[name] = _Pool(devices)
                self._wake.set()
            else:
                pool.devices = devices
                if pool.plugin is not None:
                    pool.plugin.show(devices)

    async def run(self) -> None:
        """Serve and register until cancelled; then stop, which unregisters."""
        try:
            while True:
                self._wake.clear()
                await self._stop_leaving()
                for name, pool in list(self._pools.items()):
                    if self._is_offered(name, pool):
                        await self._maintain(name, pool)
                # Not wait_for: Python 3.11's loses a cancellation that comes with the event.
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_POLL_EVERY_S):
                        await self._wake.wait()
        finally:
            self._leaving += [p.plugin for p in self._pools.values() if p.plugin is not None]
            await self._stop_leaving()

    def _is_offered(self, name: str, pool: _Pool) -> bool:
        """Whether this is still the pool: kubelet takes seconds to answer, and show() goes on."""
        return self._pools.get(name) is pool

    async def _stop_leaving(self) -> None:
        while self._leaving:
            await self._leaving.pop().stop()

    async def _maintain(self, name: str, pool: _Pool) -> None:
        kubelet = socket_identity(self._socket)
        if self._is_settled(pool, kubelet):
            return
        if pool.kubelet is not None or pool.tried != kubelet:
            # It ended, dropped the plugin, or is another one: earlier failures no longer count.
            pool.kubelet, pool.retry_at_s, pool.pause_s = None, 0.0, _POLL_EVERY_S
        pool.tried = kubelet
        if time.monotonic() < pool.retry_at_s:
            return
        try:
            await self._offer(name, pool, kubelet)
        except HostprepError as error:
            self._put_off(name, pool, error)
        except Exception as error:  # protobuf's VersionError, say: not to be the agent's end
            why = f"cannot offer pool {name}: {type(error).__name__}: {error}"
            self._put_off(name, pool, FailedError(why, reason="Unexpected"))

    def _put_off(self, name: str, pool: _Pool, error: HostprepError) -> None:
        """Report why it failed, and try again later."""
        if not self._is_offered(name, pool):
            return
        pool.pause_s = min(2 * pool.pause_s, _RETRY_MOST_S)
        if error.message != pool.complaint:
            pool.complaint = error.message
            self.on_failed(name, error)
        # A kubelet that does not listen is polled as ever: that costs nothing.
        pause_s = _POLL_EVERY_S if error.reason == "NoKubelet" else pool.pause_s
        pool.retry_at_s = time.monotonic() + pause_s

    def _is_settled(self, pool: _Pool, kubelet: tuple[int, ...] | None) -> bool:
        if pool.plugin is None or pool.kubelet is None or pool.kubelet != kubelet:
            return False
        if pool.plugin.watchers > 0:
            pool.registered_s = time.monotonic()
        dropped = time.monotonic() - pool.registered_s > _DROPPED_AFTER_S
        return pool.plugin.is_serving and not dropped

    async def _offer(self, name: str, pool: _Pool, kubelet: tuple[int, ...] | None) -> None:
        """Serve and register. Raises HostprepError."""
        if kubelet is None:
            raise NotReadyError(
                f"kubelet does not listen on {self._socket}",
                reason="NoKubelet",
                remedy="give the folder of kubelet's --root-dir as --kubelet-dir"
                " (chart: agent.kubeletDir)",
            )
        # Without its lines in the log: what goes wrong comes as an exception.
        os.environ.setdefault("GRPC_VERBOSITY", "NONE")
        try:
            import grpc

            from hostprep.deviceplugin.plugin import PoolPlugin
        except ImportError as error:  # the command line alone needs none of it
            raise FailedError(
                f"device plugins need {error.name}",
                reason="NoGrpc",
                remedy="install it from a clone by: pip install '.[agent]'",
            ) from error
        try:
            if pool.plugin is None:
                pool.plugin = PoolPlugin(self._folder, PoolPaths(self.root, name))
            pool.plugin.show(pool.devices)
            if not pool.plugin.is_serving:
                await pool.plugin.serve()
            if not self._is_offered(name, pool):
                return
            await pool.plugin.register(self._socket)
        except grpc.aio.AioRpcError as error:
            said = error.details() or error.code().name
            raise FailedError(f"kubelet refuses pool {name}: {said}", reason="Refused") from error
        except OSError as error:
            raise FailedError(
                f"cannot serve pool {name} in {self._folder}: {error}", reason="NoSocket"
            ) from error
        if not self._is_offered(name, pool):
            return  # its plugin is being stopped, which kubelet notices by itself
        pool.kubelet, pool.registered_s = kubelet, time.monotonic()
        pool.pause_s, pool.complaint = _POLL_EVERY_S, ""
        self.on_registered(name)

    @property
    def _folder(self) -> str:
        return plugins_folder(self.kubelet_dir)

    @property
    def _socket(self) -> str:
        return f"{self._folder}/kubelet.sock"
