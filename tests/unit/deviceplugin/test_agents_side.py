"""When the agent offers a pool, what it says of it, and what it hears of leases that end."""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path
from typing import Any

import pytest

from hostprep.agent.devices import DevicePool, DevicePublisher
from hostprep.agent.metrics import Metrics
from hostprep.errors import FailedError, NotReadyError
from hostprep.linux.inotify import WriterWatch
from tests.support.agent_values import pool_observation, region

pytestmark = pytest.mark.unit

READY = pool_observation(region(), region("node1-0", placement="node:1"))
PREPARING = pool_observation(region(state="Unfinished"), region("node1-0", state="Unfinished"))


class Log:
    """What was logged."""

    def __init__(self) -> None:
        self.lines: list[tuple[str, dict[str, Any]]] = []

    def __getattr__(self, level: str) -> Any:
        return lambda event, **fields: self.lines.append((event, fields))


@pytest.fixture
def log() -> Log:
    return Log()


@pytest.fixture
def side(tmp_path: Path, log: Log) -> DevicePublisher:
    return DevicePublisher(str(tmp_path / "root"), str(tmp_path / "kubelet"), Metrics(), log)


def offered(side: DevicePublisher) -> dict[str, dict[str, str]]:
    return {
        name: {device.name: device.health for device in devices}
        for name, devices in side._devices.items()
    }


def show(side: DevicePublisher, look: Any) -> None:
    side.show({"kv": DevicePool(look)})


def test_a_pool_is_offered_once_its_regions_are_verified(side: DevicePublisher) -> None:
    show(side, PREPARING)
    assert offered(side) == {}
    show(side, READY)
    assert offered(side) == {"kv": {"node0-0": "Healthy", "node1-0": "Healthy"}}


def test_once_offered_it_stays_so_while_regions_are_rebuilt(side: DevicePublisher) -> None:
    show(side, READY)
    show(side, PREPARING)
    assert offered(side) == {"kv": {"node0-0": "Unhealthy", "node1-0": "Unhealthy"}}


def test_a_pool_that_is_gone_is_not_offered_and_must_be_verified_anew(
    side: DevicePublisher,
) -> None:
    show(side, READY)
    side.show({})
    assert offered(side) == {}
    show(side, PREPARING)
    assert offered(side) == {}


def test_without_an_instruction_all_stays_as_it_is(side: DevicePublisher) -> None:
    show(side, READY)
    side.show(None)
    assert set(offered(side)) == {"kv"}


def test_without_kubelets_folder_nothing_is_offered(tmp_path: Path, log: Log) -> None:
    side = DevicePublisher(str(tmp_path / "root"), "", Metrics(), log)
    show(side, READY)
    show(side, READY)
    assert offered(side) == {}
    ((event, fields),) = log.lines
    assert (event, fields["pool"]) == ("device_plugin_not_registered", "kv")
    assert "agent.devicePlugin.enabled" in fields["remedy"]


def test_the_same_trouble_is_said_once_and_again_after_it_had_gone(
    side: DevicePublisher, log: Log
) -> None:
    show(side, READY)
    log.lines.clear()
    away = NotReadyError("kubelet does not listen", remedy="look")
    for _ in range(3):
        side._failed("kv", away)
    side._failed("kv", FailedError("kubelet refuses"))
    side._registered("kv")
    side._failed("kv", away)
    assert [event for event, _ in log.lines] == [
        "device_plugin_not_registered",
        "device_plugin_not_registered",
        "device_plugin_registered",
        "device_plugin_not_registered",
    ]


def test_kubelet_answers_for_a_pool_that_is_gone_by_then(side: DevicePublisher, log: Log) -> None:
    show(side, READY)
    side.show({})
    log.lines.clear()
    side._registered("kv")
    assert not log.lines
    assert "hostprep_device_plugin_registered{" not in side.metrics.text().decode()


def test_metrics_follow(side: DevicePublisher) -> None:
    show(side, READY)
    show(side, pool_observation(region(), region("node1-0", state="Damaged")))
    side._registered("kv")
    text = side.metrics.text().decode()
    assert 'hostprep_devices{health="Healthy",pool="kv"} 1.0' in text
    assert 'hostprep_devices{health="Unhealthy",pool="kv"} 1.0' in text
    assert 'hostprep_device_plugin_registered{pool="kv"} 1.0' in text
    side.show({})
    text = side.metrics.text().decode()
    assert "hostprep_devices{" not in text
    assert "hostprep_device_plugin_registered{" not in text


def test_looks_come_faster_for_a_while_after_somebody_let_go(
    side: DevicePublisher, tmp_path: Path
) -> None:
    told: list[None] = []
    side.reconcile_now = lambda: told.append(None)
    side._writers = WriterWatch()
    try:
        path = tmp_path / "region"
        path.touch()
        side._writers.watch([str(path)])
        assert side.interval_s(5.0) == 5.0
        side._check_writers()
        assert not told
        path.write_text("x")
        side._check_writers()
        assert told
        assert side.interval_s(5.0) < 1.0
        assert side.interval_s(0.1) == 0.1
    finally:
        side._writers.close()


def test_whoever_lets_go_without_end_does_not_drive_the_agent(
    side: DevicePublisher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No lease is needed for that, only the pool's group: each close is an event."""
    looks: list[float] = []
    reads: list[float] = []
    side.reconcile_now = lambda: looks.append(time.monotonic())
    was_closed = WriterWatch.was_closed

    def counted(watch: WriterWatch) -> bool:
        reads.append(time.monotonic())
        return was_closed(watch)

    monkeypatch.setattr(WriterWatch, "was_closed", counted)
    path = tmp_path / "region"
    path.touch()

    async def life() -> None:
        task = asyncio.get_running_loop().create_task(side.run())
        await asyncio.sleep(0)
        assert side._writers is not None
        side._writers.watch([str(path)])
        for _ in range(100):
            os.close(os.open(path, os.O_RDWR))
            await asyncio.sleep(0.005)
        assert side.interval_s(5.0) == 0.25
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    begin_s = time.monotonic()
    asyncio.run(life())
    took_s = time.monotonic() - begin_s
    assert reads
    assert len(looks) <= 1 + took_s / 3.0, "the loop looks every 0.25 s by itself then"
    assert len(reads) <= 1 + took_s / 0.25


def test_one_that_lets_go_later_is_heard_again(side: DevicePublisher, tmp_path: Path) -> None:
    looked = asyncio.Event()
    side.reconcile_now = looked.set
    path = tmp_path / "region"
    path.touch()

    async def life() -> None:
        task = asyncio.get_running_loop().create_task(side.run())
        await asyncio.sleep(0)
        assert side._writers is not None
        side._writers.watch([str(path)])
        for _ in range(2):
            path.write_text("x")
            await asyncio.wait_for(looked.wait(), 30)
            looked.clear()
            side._hurry_until_s = 0.0
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(life())


def test_events_that_were_lost_count_as_somebody_who_let_go(tmp_path: Path) -> None:
    files = [tmp_path / "a", tmp_path / "b"]
    limit = int(Path("/proc/sys/fs/inotify/max_queued_events").read_text())
    if limit > 100_000:
        pytest.skip(f"a queue of {limit} events takes too long to fill")
    for file in files:
        file.touch()
    watch = WriterWatch()
    try:
        watch.watch(map(str, files))
        for number in range(limit + 10):  # the same one again would be merged
            os.close(os.open(files[number % 2], os.O_WRONLY))
        fills = os.read(watch.fd, 16 * limit)
        assert len(fills) == 16 * limit
        assert watch.was_closed(), "only the overflow is left"
        assert not watch.was_closed()
    finally:
        watch.close()


def test_only_who_could_write_is_heard(tmp_path: Path) -> None:
    path = tmp_path / "region"
    path.write_text("x")
    watch = WriterWatch()
    try:
        watch.watch([str(path), str(path), str(tmp_path / "missing")])
        with open(path, encoding="ascii") as reader:
            reader.read()
        assert not watch.was_closed()
        with open(path, "a", encoding="ascii") as writer:
            os.stat(path)
            assert not watch.was_closed()
            _ = writer
        assert watch.was_closed()
        assert not watch.was_closed()
        path.unlink()
        assert not watch.was_closed(), "a region that is removed is no lease that ends"
    finally:
        watch.close()


def test_it_ends_when_it_is_told_to(side: DevicePublisher) -> None:
    async def life() -> None:
        task = asyncio.get_running_loop().create_task(side.run())
        await asyncio.sleep(0.05)
        show(side, READY)
        await asyncio.sleep(0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    before = len(os.listdir("/proc/self/fd"))
    asyncio.run(life())
    assert len(os.listdir("/proc/self/fd")) <= before
