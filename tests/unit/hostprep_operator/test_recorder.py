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

    async def create(self, resource: Resource, body: Mapping[str, Any]) -> dict[str, Any]:
        await asyncio.sleep(0.005)
        self.posted += 1
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
