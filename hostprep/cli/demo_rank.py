"""One rank of the engine that `hostprep demo --gate` plays: a process of its own.

Joins the lease, registers its slice in the background, and writes what happens as lines of JSON.
Where there is no CUDA driver, only the registering itself is simulated: by time.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

from hostprep.backing import GIB, MIB
from hostprep.client.attach import Attachment, join
from hostprep.cuda.board import RankBoard, board_path
from hostprep.cuda.chunks import ChunkPolicy
from hostprep.cuda.driver import DeviceTraits, Driver, DriverError, load_driver
from hostprep.cuda.registration import Registration
from hostprep.cuda.turnstile import Turnstile
from hostprep.errors import HostprepError

__all__ = ["Part", "main"]

_OUT_OF_MEMORY = 2
_FAILING_CALL = 2
_CHUNKS = 4


class Tell(Protocol):
    """Tells the demo what happens in this rank, with the moment."""

    def __call__(self, event: str, **facts: object) -> None: ...


@dataclass(frozen=True, slots=True)
class Part:
    """What one rank plays."""

    root: str
    pool: str
    lease_id: str
    rank: int
    world: int
    delay_s_per_gib: float
    """Of a simulated registration."""
    fails: bool


class _SimulatedDriver(Driver):
    """Takes its time for each chunk, and registers nothing: there is no module to wrap."""

    def __init__(self, delay_s_per_gib: float, *, failing_call: int) -> None:
        self._delay_s_per_gib = delay_s_per_gib
        self._failing_call = failing_call
        self._calls = 0

    def device_of(self, context: int) -> int:  # noqa: ARG002 - one device
        return 0

    def attributes(self, device: int) -> DeviceTraits:
        return DeviceTraits(
            ordinal=device,
            uuid="",
            name="simulated",
            total_bytes=0,
            host_register_supported=True,
            read_only_supported=True,
            uses_host_page_tables=False,
            can_use_host_pointer=True,
            can_map_host_memory=True,
            unified_addressing=True,
        )

    @contextlib.contextmanager
    def using(self, context: int) -> Iterator[None]:  # noqa: ARG002 - none is needed
        yield

    @contextlib.contextmanager
    def relaxed_capture(self) -> Iterator[None]:
        yield

    def register(self, address: int, size_bytes: int, flags: int) -> None:  # noqa: ARG002
        self._calls += 1
        time.sleep(self._delay_s_per_gib * size_bytes / GIB)
        if self._calls == self._failing_call:
            raise DriverError(_OUT_OF_MEMORY, "CUDA_ERROR_OUT_OF_MEMORY", "cuMemHostRegister")

    def unregister(self, address: int) -> None:
        """Nothing is registered."""


def main() -> None:
    """Play the part that the only argument holds; a line of input starts it, another ends it."""
    part = Part(**json.loads(sys.argv[1]))
    # Libraries may print; only events may go to the pipe.
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as pipe:
        os.dup2(2, 1)

        def tell(event: str, **facts: object) -> None:
            pipe.write(json.dumps({"event": event, "at_s": time.monotonic(), **facts}) + "\n")
            pipe.flush()

        try:
            _play(part, tell)
        except HostprepError as error:
            tell("lost", why=str(error))


def _play(part: Part, tell: Tell) -> None:
    driver, context = _cuda(part)
    simulated = isinstance(driver, _SimulatedDriver)
    with (
        join(part.pool, lease_id=part.lease_id, root=part.root) as attachment,
        contextlib.closing(_board(part, attachment)) as board,
    ):
        offset, size = _slice(part, attachment)
        joined: list[float] = []
        registration = Registration(
            attachment,
            driver=driver,
            context=context,
            offset_bytes=offset,
            size_bytes=size,
            turnstile=Turnstile(part.root),
            board=board,
            on_registered=lambda: joined.append(_join_host_tier(part, driver)),
            policy=_policy(attachment, size) if simulated else None,
        )
        with registration:
            tell("attached", size_bytes=size, simulated=simulated)
            sys.stdin.readline()
            begin_s = time.perf_counter()
            registration.start()
            blocked_s = time.perf_counter() - begin_s
            tell("started", blocked_s=blocked_s)
            registration.wait()
            _tell_end(registration, joined, tell)
            sys.stdin.readline()


def _cuda(part: Part) -> tuple[Driver, int]:
    """Return the real driver with a context of this rank's device, or a simulated one."""
    try:
        driver = load_driver()
        api: Any = importlib.import_module("cuda.bindings.driver")
        device = api.cuDeviceGet(part.rank % driver.device_count())[1]
        code, context = api.cuDevicePrimaryCtxRetain(device)
        if int(code) == 0:
            return driver, int(context)
    except HostprepError:
        pass
    failing_call = _FAILING_CALL if part.fails else 0
    return _SimulatedDriver(part.delay_s_per_gib, failing_call=failing_call), 1


def _board(part: Part, attachment: Attachment) -> RankBoard:
    return RankBoard.open(
        board_path(attachment), generation=part.lease_id, world=part.world, rank=part.rank
    )


def _slice(part: Part, attachment: Attachment) -> tuple[int, int]:
    """Return offset and size of this rank's part, in whole pages."""
    page = max(attachment.page_bytes, 2 * MIB)
    size = attachment.size_bytes // part.world // page * page
    return part.rank * size, size


def _policy(attachment: Attachment, size_bytes: int) -> ChunkPolicy:
    """Return four chunks a slice: a simulated driver is too slow to steer by."""
    page = attachment.page_bytes
    chunk = max(page, size_bytes // _CHUNKS // page * page)
    return ChunkPolicy(first_bytes=chunk, least_bytes=chunk, most_bytes=chunk, page_bytes=page)


def _join_host_tier(part: Part, driver: Driver) -> float:
    """Stand for the engine's own work; with a real driver, for what fails on purpose, too.

    Returns when it was done: READY is said next.
    """
    if part.fails and not isinstance(driver, _SimulatedDriver):
        raise RuntimeError("failing on purpose, as the demo asked")
    return time.monotonic()


def _tell_end(registration: Registration, joined: list[float], tell: Tell) -> None:
    progress, error = registration.progress, registration.error
    if error is not None:
        tell("failed", why=error.message, reason=error.reason)
    else:
        longest = progress.longest_chunk_s
        facts = {"at_s": joined[0], "longest_chunk_s": longest, "state": progress.state}
        tell("ready", chunks=progress.chunks, **facts)


if __name__ == "__main__":
    main()
