"""How many events the operator posts when a whole cluster has something to say."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import pytest

from hostprep.kube.client import KubeClient, Resource
from hostprep_operator.events import Recorder, Regarding
from hostprep_operator.reconcile.changes import EventNote
from tests.unit.hostprep_operator.virtual_time import run_virtually

pytestmark = pytest.mark.unit


class _Server(KubeClient):
    """Takes events in five milliseconds each."""

    def __init__(self) -> None:
        self.posted = 0
        self.reasons: list[str] = []

    async def create(self, resource: Resource, body: Mapping[str, Any]) -> dict[str, Any]:
        await asyncio.sleep(0.005)
        self.posted += 1
        self.reasons.append(body["reason"])
        return dict(body)


def test_sentences_that_come_one_by_one_are_held_back_like_those_that_come_at_once() -> None:
    async def scene() -> int:
        server = _Server()
        recorder = Recorder(server, identity="test")
        running = asyncio.create_task(recorder.run())
        for number in range(1000):
            node = Regarding(kind="Node", name=f"n{number}", uid=f"uid-{number}")
            recorder.record(node, EventNote("Normal", "MemoryReady", "Host memory is ready."))
            await asyncio.sleep(0.02)
        running.cancel()
        return server.posted

    assert 200 <= run_virtually(scene()) <= 25 + 10 * 20 + 1


def test_a_warning_is_told_before_all_that_is_usual_and_each_kind_in_its_order() -> None:
    async def scene() -> list[str]:
        server = _Server()
        recorder = Recorder(server, identity="test")
        for number in range(500):
            node = Regarding(kind="Node", name=f"n{number}", uid=f"uid-{number}")
            recorder.record(node, EventNote("Normal", f"Ready{number}", "Host memory is ready."))
        pool = Regarding(kind="HostMemoryPool", name="kv", uid="uid")
        for reason in ("ReleaseScheduled", "NothingSelected"):
            recorder.record(pool, EventNote("Warning", reason, "nodes leave"))
        running = asyncio.create_task(recorder.run())
        await asyncio.sleep(1)
        running.cancel()
        return server.reasons

    said = run_virtually(scene())
    assert said[:3] == ["ReleaseScheduled", "NothingSelected", "Ready0"]
    assert said[2:] == [f"Ready{number}" for number in range(len(said) - 2)]
