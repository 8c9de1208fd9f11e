"""What the scenes of vllm_simple_scenes.py have in common: leases, engines, the driver's log."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import hostprep
from hostprep.client.environment import LeaseEnvironment
from hostprep.errors import HostprepError
from tests.engines.simple_engine import (
    BLOCK_TOKENS,
    HANG_S,
    OURS,
    Rank,
    SmallEngine,
    cache_of,
    configuration,
)

ROOT, MODEL, LOCK, LOG = sys.argv[1:5]
PROMPT = [7 + at % 900 for at in range(8 * BLOCK_TOKENS + 5)]
OTHER = [11 + at * 3 % 900 for at in range(8 * BLOCK_TOKENS + 5)]
ALWAYS: dict[str, Any] = {"hostprep.register": "always"}
SCENES: list[Callable[[], None]] = []


def scene(function: Callable[[], None]) -> Callable[[], None]:
    SCENES.append(function)
    return function


class Said(logging.Filter):
    """What we log, in this scene. No handler: vLLM takes those away when it configures logging."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[tuple[str, str]] = []

    def filter(self, record: logging.LogRecord) -> bool:
        self.lines.append((record.levelname, record.getMessage()))
        return True

    def warnings(self) -> list[str]:
        return [text for level, text in self.lines if level == "WARNING"]


SAID = Said()


@contextlib.contextmanager
def leased() -> Iterator[Any]:
    """Have a region of one's own, and the variables of `hostprep exec`."""
    with hostprep.attach("kv", root=ROOT) as memory:
        lease = LeaseEnvironment.of([memory._lease])
        os.environ.update(lease.to_variables())
        yield memory


@contextlib.contextmanager
def busy_driver() -> Iterator[None]:
    """Have every registration wait in the driver: the seed's sleep, without an end."""
    with open(LOCK, "a", encoding="ascii") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextlib.contextmanager
def engine(world: int = 1, connector: dict[str, str] = OURS, **extra: Any) -> Iterator[SmallEngine]:
    small = SmallEngine(
        configuration(MODEL, world=world, connector=connector, **extra), world=world
    )
    try:
        yield small
    finally:
        small.close()


@contextlib.contextmanager
def worker(rank: int = 0, world: int = 1, cache: Any = None, **extra: Any) -> Iterator[Rank]:
    config = configuration(MODEL, world=world, connector=OURS, **extra)
    one = Rank(config, rank, cache or cache_of())
    try:
        yield one
    finally:
        one.connector.shutdown()


def calls(name: str) -> list[str]:
    """Return this process's calls to the driver so far."""
    with open(LOG, encoding="ascii") as file:
        lines = [line.strip().split(" ", 2) for line in file]
    return [
        text for pid, _, text in lines if pid == str(os.getpid()) and text.startswith(f"{name}(")
    ]


def wait_for(so: Callable[[], Any]) -> None:
    end_s = time.monotonic() + HANG_S
    while not so():
        assert time.monotonic() < end_s, "waited in vain"
        time.sleep(0.01)


def is_open(small: SmallEngine) -> bool:
    return bool(small.scheduler.connector._gate.is_open)


def refused(call: Callable[[], object], *words: str) -> None:
    try:
        call()
    except HostprepError as error:
        told = str(error)
        missing = [word for word in words if word not in told]
    else:
        raise AssertionError("it was not refused")
    assert not missing, f"{missing} not in {told}"
