"""`hostprep demo --gate`: an engine of four ranks serves at once, and registers meanwhile."""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from typing import IO, TYPE_CHECKING, Any, cast

from hostprep.backing import GIB, MIB
from hostprep.client.attach import Attachment, attach, join
from hostprep.console import print_table, say, wrapped
from hostprep.cuda.board import RankBoard, board_path
from hostprep.cuda.board_view import BoardReader
from hostprep.cuda.chunks import ChunkPolicy
from hostprep.cuda.driver import DeviceTraits, Driver, DriverError, load_driver
from hostprep.cuda.gate import Gate
from hostprep.cuda.registration import Registration
from hostprep.cuda.turnstile import Turnstile
from hostprep.errors import FailedError, HostprepError
from hostprep.linux.threads import Stopped, shielded
from hostprep.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from hostprep.linux.threads import Stop

WORLD = 4
DELAY_S_PER_GIB = 2.0
"""Of a simulated registration: some 20 times what drivers take for resident memory (0.03 to 0.1 s
per GB, docs/register.md), so that there is something to see."""
_FAILING_RANK = 2
_STEP_S = 0.01
_AFTER_STEPS = 20
"""Served after the gate is decided, to show that it goes on."""
_LONGEST_S = 300.0
_STOP_WITHIN_S = 0.1
_OUT_OF_MEMORY = 2
_FAILING_CALL = 2
_CHUNKS = 4
_PR_SET_PDEATHSIG = 1
"""linux/prctl.h"""

_Events = queue.Queue[tuple[int, dict[str, Any]]]
"""What ranks say, each with the number of its rank."""


@dataclass(frozen=True, slots=True)
class _Moment:
    at_s: float
    who: str
    what: str


@dataclass
class _Run:
    """What happened in one run of the engine."""

    title: str
    simulated: bool = False
    state: str = ""
    why: str = ""
    opened_after_s: float | None = None
    served_before: int = 0
    served_after: int = 0
    start_blocked_s: list[float] = field(default_factory=list)
    """How long `start()` took, of each rank."""
    moments: list[_Moment] = field(default_factory=list)


def run_gate_demo(
    root: str, pool: str, prepare: Callable[[], object], *, quiet: bool
) -> dict[str, Any]:
    """Prepare the pool and run the engine, twice; return what happened. Raises HostprepError."""
    runs = []
    size_bytes = 0
    for title, failing in (
        ("All ranks register", None),
        ("Rank 2 fails, on purpose", _FAILING_RANK),
    ):
        prepare()  # before the second run: scrubs, as the agent does
        with attach(pool, root=root) as attachment:
            size_bytes = attachment.size_bytes
            lease = attachment.lease_id
            ranks = [RankConfig(root, pool, lease, rank, rank == failing) for rank in range(WORLD)]
            runs.append(_run_engine(title, attachment, ranks))
        if not quiet:
            _show(runs[-1], size_bytes)
    given = {"size_bytes": size_bytes, "world": WORLD, "delay_s_per_gib": DELAY_S_PER_GIB}
    return {**given, "runs": [asdict(run) for run in runs]}


def _run_engine(title: str, attachment: Attachment, ranks: list[RankConfig]) -> _Run:
    run = _Run(title)

    def work(stop: Stop) -> None:
        events: _Events = queue.Queue()
        with contextlib.ExitStack() as stack:
            processes = [stack.enter_context(_rank_process(events, config)) for config in ranks]
            for _ in processes:
                _, event = _next(events, stop)
                if event["event"] != "attached":
                    raise FailedError(f"a rank of the demo could not attach: {event.get('why')}")
                run.simulated = bool(event["simulated"])
            _serve(run, attachment, processes, events, stop)

    shielded(work)  # Ctrl-C while a process or thread starts would leave it behind
    return run


def _serve(
    run: _Run,
    attachment: Attachment,
    ranks: list[subprocess.Popen[str]],
    events: _Events,
    stop: Stop,
) -> None:
    """Serve step by step, from before the ranks begin until after the gate is decided."""
    board = BoardReader(board_path(attachment), generation=attachment.lease_id)
    gate = Gate(WORLD, board, deadline_s=_LONGEST_S, on_degraded=lambda _: None)
    begin_s = time.monotonic()
    moments = [_Moment(0.0, "engine", "serves from GPU memory alone; ranks begin to register")]
    for rank in ranks:
        pipe = cast("IO[str]", rank.stdin)
        with contextlib.suppress(OSError):  # it has ended, as its own lines say
            pipe.write("go\n")
            pipe.flush()
    while gate.state == "Closed":
        if stop.is_set():
            raise Stopped
        time.sleep(_STEP_S)  # a step of the engine
        run.served_before += 1
    decided_s = time.monotonic() - begin_s
    run.state, run.why, run.opened_after_s = gate.state, gate.why, gate.opened_after_s
    for _ in range(_AFTER_STEPS):
        time.sleep(_STEP_S)
        run.served_after += 1
    moments += list(_moments_of_ranks(run, events, begin_s, stop))
    board.close()
    words = "gate open: the host tier joins" if gate.is_open else f"gate stays closed: {run.why}"
    moments.append(_Moment(decided_s, "engine", words))
    until = f"served {run.served_before} steps before that, and goes on serving"
    moments.append(_Moment(decided_s, "engine", until))
    run.moments = sorted(moments, key=lambda moment: moment.at_s)


def _moments_of_ranks(run: _Run, events: _Events, begin_s: float, stop: Stop) -> Iterator[_Moment]:
    """Yield what happens in the ranks, until each has come to an end."""
    ended = 0
    while ended < WORLD:
        number, event = _next(events, stop)
        name, at_s = event["event"], event["at_s"] - begin_s
        if name == "started":
            run.start_blocked_s.append(event["blocked_s"])
            continue
        ended += 1
        if name == "ready":
            longest = format_seconds(event["longest_chunk_s"])
            what = f"ready: {event['chunks']} chunks, the longest took {longest}"
        elif name == "failed":
            what = f"failed ({event['reason']}), and has taken back what it had registered"
        else:
            what = f"ended: {event['why']}"
        yield _Moment(at_s, f"rank {number}", what)


@contextlib.contextmanager
def _rank_process(events: _Events, config: RankConfig) -> Iterator[subprocess.Popen[str]]:
    """Run a rank's process, whose lines arrive in the queue; end it at the end."""
    command = [sys.executable, "-m", "hostprep.cli.demo_gate", json.dumps(asdict(config))]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:

        def read() -> None:
            for line in cast("IO[str]", process.stdout):
                try:
                    event = json.loads(line)
                    events.put((config.rank, {"event": event["event"], **event}))
                except (ValueError, TypeError, KeyError):  # some library's, before its main began
                    print(line, end="", file=sys.stderr)
            events.put(
                (config.rank, {"event": "lost", "at_s": time.monotonic(), "why": "it ended"})
            )

        reader = threading.Thread(target=read, daemon=True)
        reader.start()
        try:
            yield process
        except BaseException:
            process.kill()
            raise
        finally:
            # Its input ends with the pipe: it gives back what it registered, and ends.
            with contextlib.suppress(OSError):
                cast("IO[str]", process.stdin).close()
            process.wait()
            reader.join()


def _next(events: _Events, stop: Stop) -> tuple[int, dict[str, Any]]:
    deadline_s = time.monotonic() + _LONGEST_S
    while time.monotonic() < deadline_s:
        if stop.is_set():
            raise Stopped
        with contextlib.suppress(queue.Empty):
            return events.get(timeout=_STOP_WITHIN_S)
    raise FailedError(f"a rank of the demo said nothing for {_LONGEST_S:.0f} s")


def _show(run: _Run, size_bytes: int) -> None:
    how = f"{WORLD} ranks, each registers its quarter of {format_bytes(size_bytes)}"
    rows = [(f"{moment.at_s:.2f} s", moment.who, moment.what) for moment in run.moments]
    print_table(f"\n{run.title}: {how}", ("TIME", "WHO", ""), rows, flexible=("",))
    blocked = ", ".join(format_seconds(blocked_s) for blocked_s in sorted(run.start_blocked_s))
    say(f"start() blocked its thread for {blocked}.")
    if run.simulated:
        simulated = (
            f"Simulated: the driver's calls, by {DELAY_S_PER_GIB:g} s per GiB, since there is no "
            "CUDA driver here."
        )
        say(wrapped(simulated, begin="", then=""))
        say("Real: memory, processes, turns, rank board and gate.")


EmitEvent = Callable[..., None]
"""Sends the demo what happens in this rank: an event's name, and facts by keyword."""


@dataclass(frozen=True, slots=True)
class RankConfig:
    """What a rank's process is given."""

    root: str
    pool: str
    lease_id: str
    rank: int
    fails: bool


class _SimulatedDriver(Driver):
    """Takes its time for each chunk, and registers nothing: there is no module to wrap."""

    def __init__(self, *, failing_call: int) -> None:
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
        time.sleep(DELAY_S_PER_GIB * size_bytes / GIB)
        if self._calls == self._failing_call:
            raise DriverError(_OUT_OF_MEMORY, "CUDA_ERROR_OUT_OF_MEMORY", "cuMemHostRegister")

    def unregister(self, address: int) -> None:
        """Nothing is registered."""


def run_rank_process() -> None:
    """Play the config that the only argument holds; a line of input starts it, another ends it."""
    # A demo that is killed takes its ranks with it: the next demo gives back their memory.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    config = RankConfig(**json.loads(sys.argv[1]))
    # Libraries may print; only events may go to the pipe.
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as pipe:
        os.dup2(2, 1)

        def emit(event: str, **facts: object) -> None:
            pipe.write(json.dumps({"event": event, "at_s": time.monotonic(), **facts}) + "\n")
            pipe.flush()

        try:
            _run_rank(config, emit)
        except HostprepError as error:
            emit("lost", why=str(error))


def _run_rank(config: RankConfig, emit: EmitEvent) -> None:
    driver, context = _cuda(config)
    simulated = isinstance(driver, _SimulatedDriver)
    with (
        join(config.pool, lease_id=config.lease_id, root=config.root) as attachment,
        contextlib.closing(
            RankBoard.open(
                board_path(attachment), generation=config.lease_id, world=WORLD, rank=config.rank
            )
        ) as board,
    ):
        # Whole pages of the region, the same number for each rank.
        page = max(attachment.page_bytes, 2 * MIB)
        size = attachment.size_bytes // WORLD // page * page
        joined: list[float] = []
        registration = Registration(
            attachment,
            driver=driver,
            context=context,
            offset_bytes=config.rank * size,
            size_bytes=size,
            turnstile=Turnstile(config.root),
            board=board,
            on_registered=lambda: joined.append(_join_host_tier(config, driver)),
            policy=_policy(attachment, size) if simulated else None,
        )
        with registration:
            emit("attached", size_bytes=size, simulated=simulated)
            if not sys.stdin.readline():  # the demo ended before the line above was carried out
                return
            begin_s = time.perf_counter()
            registration.start()
            blocked_s = time.perf_counter() - begin_s
            emit("started", blocked_s=blocked_s)
            registration.wait()
            _emit_end(registration, joined, emit)
            sys.stdin.readline()


def _cuda(config: RankConfig) -> tuple[Driver, int]:
    """Return the real driver with a context of this rank's device, or a simulated one."""
    try:
        driver = load_driver()
        api: Any = importlib.import_module("cuda.bindings.driver")
        device = api.cuDeviceGet(config.rank % driver.device_count())[1]
        code, context = api.cuDevicePrimaryCtxRetain(device)
        if int(code) == 0:
            return driver, int(context)
    except HostprepError:
        pass
    return _SimulatedDriver(failing_call=_FAILING_CALL if config.fails else 0), 1


def _policy(attachment: Attachment, size_bytes: int) -> ChunkPolicy:
    """Return four chunks a slice: a simulated driver is too slow to steer by."""
    page = attachment.page_bytes
    chunk = max(page, size_bytes // _CHUNKS // page * page)
    return ChunkPolicy(first_bytes=chunk, least_bytes=chunk, most_bytes=chunk)


def _join_host_tier(config: RankConfig, driver: Driver) -> float:
    """Stand for the engine's own work; with a real driver, for what fails on purpose, too.

    Returns when it was done: READY is said next.
    """
    if config.fails and not isinstance(driver, _SimulatedDriver):
        raise RuntimeError("failing on purpose, as the demo asked")
    return time.monotonic()


def _emit_end(registration: Registration, joined: list[float], emit: EmitEvent) -> None:
    progress, error = registration.progress, registration.error
    if error is not None:
        emit("failed", why=error.message, reason=error.reason)
        return
    emit(
        "ready",
        at_s=joined[0],
        chunks=progress.chunks,
        longest_chunk_s=progress.longest_chunk_s,
        state=progress.state,
    )


if __name__ == "__main__":
    run_rank_process()
