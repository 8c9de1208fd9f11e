"""Parts of the agent that wait for an event end when they are told to, also in that very moment.

asyncio.wait_for of Python 3.11 takes a cancellation that comes together with the event for the
event alone: the agent then never ended (python/cpython issue 86296).
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from hostprep.agent.metrics import Metrics
from hostprep.agent.reporter import Reporter
from hostprep.agent.state import AgentState
from hostprep.deviceplugin.manager import PluginManager
from hostprep.kube.logs import make_logger, set_up_logs

pytestmark = pytest.mark.unit


class _Later(Reporter):
    """Has something to write in a minute."""

    async def report(self, *, now: bool = False) -> float | None:
        return 60.0


async def _ends_at_the_event(task: asyncio.Task[None], wake: asyncio.Event) -> bool:
    for _ in range(5):
        await asyncio.sleep(0)  # it waits by now
    wake.set()
    task.cancel()
    done, _ = await asyncio.wait({task}, timeout=1.0)
    task.cancel()
    await asyncio.wait({task})
    return bool(done)


def test_the_reporter_ends() -> None:
    async def check() -> bool:
        state = AgentState(Metrics())
        set_up_logs(style="json", level="error")
        reporter = _Later(state, None, state.metrics, make_logger("agent"))
        return await _ends_at_the_event(asyncio.create_task(reporter.run()), reporter.wake)

    assert asyncio.run(check())


def test_the_device_plugins_end(tmp_path: Path) -> None:
    async def check() -> bool:
        plugins = PluginManager(str(tmp_path), str(tmp_path), print, print, print)
        return await _ends_at_the_event(asyncio.create_task(plugins.run()), plugins._wake)

    assert asyncio.run(check())
