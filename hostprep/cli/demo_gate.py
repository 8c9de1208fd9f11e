"""`hostprep demo --gate`: an engine of four ranks decodes from the start, and registers meanwhile.

Each rank is a process with a decode loop. Its host tier is used from the first bytes on that all
ranks have registered, and grows with them; beside it the loops keep their pace.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import json
import logging
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import IO, TYPE_CHECKING, Any, cast

from hostprep.backing import GIB, MIB
from hostprep.client.attach import Attachment, attach, join
from hostprep.console import print_table, say, wrapped
from hostprep.cuda.board import RankBoard, board_path
from hostprep.cuda.board_view import BoardReader
from hostprep.cuda.driver import DeviceTraits, Driver, DriverError, load_driver
from hostprep.cuda.gate import ALL, Gate
from hostprep.cuda.registration import Registration
from hostprep.cuda.turnstile import Turnstile
from hostprep.errors import FailedError, HostprepError
from hostprep.linux.threads import Stopped, shielded
from hostprep.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from hostprep.linux.threads import Stop

WORLD = 4
DELAY_S_PER_GIB = 0.4
"""Of a simulated registration: some four times what drivers take at most for resident memory (0.03
to 0.1 s per GB, docs/register.md), so that there is something to see."""
_TROUBLED_RANK = 2
_STEP_S = 0.004
"""What a decode step of the demo computes."""
_UNDISTURBED_S = 0.5
"""Decoded before the ranks begin, to know the pace."""
_AFTER_S = 0.2
"""Decoded after all is decided, to show that it goes on."""
_SAMPLE_S = 0.05
_LONGEST_S = 300.0
_STOP_WITHIN_S = 0.1
_WIDTH = 48
_BARS = "▁▂▃▄▅▆▇█"
_PR_SET_PDEATHSIG = 1
"""linux/prctl.h"""

_Events = queue.Queue[tuple[int, dict[str, Any]]]
"""What ranks say, each with the number of its rank."""

_OUT_OF_MEMORY = (2, "CUDA_ERROR_OUT_OF_MEMORY")
_NOT_SUPPORTED = (801, "CUDA_ERROR_NOT_SUPPORTED")
_RUNS: tuple[tuple[str, dict[str, tuple[int, str]]], ...] = (
    ("All ranks register", {}),
    ("Rank 2 runs short of memory for a while, on purpose", {"2": _OUT_OF_MEMORY}),
    ("Rank 2 fails for good, on purpose", {"1": _NOT_SUPPORTED}),
)
"""And by the number of the call of rank 2 that fails, how: JSON, which the rank is given."""


@dataclass(frozen=True, slots=True)
class _Moment:
    at_s: float
    who: str
    what: str


@dataclass(frozen=True, slots=True)
class _Sample:
    at_s: float
    usable_bytes: int
    """Of all ranks together."""
    pace: float
    """Steps a second of the slowest rank, against those before the ranks began."""


@dataclass
class _Run:
    """What happened in one run of the engine."""

    title: str
    simulated: bool = False
    state: str = ""
    why: str = ""
    opened_after_s: float | None = None
    opened_with_bytes: int = 0
    whole_after_s: float | None = None
    """When all of the tier was in use; None where it never was."""
    pace: float = 0.0
    """From when the ranks began until the last one had come to an end."""
    served_before: int = 0
    """Decode steps before the gate was decided, and after."""
    served_after: int = 0
    start_blocked_s: list[float] = field(default_factory=list)
    """How long `start()` took, of each rank."""
    moments: list[_Moment] = field(default_factory=list)
    samples: list[_Sample] = field(default_factory=list)


def run_gate_demo(
    root: str, pool: str, prepare: Callable[[], object], *, quiet: bool
) -> dict[str, Any]:
    """Prepare the pool and run the engine, three times; return what happened.

    Raises HostprepError.
    """
    runs = []
    size_bytes = 0
    for title, troubles in _RUNS:
        prepare()  # before the next run: scrubs, as the agent does
        with attach(pool, root=root) as attachment:
            size_bytes = attachment.size_bytes
            lease = attachment.lease_id
            ranks = [
                RankConfig(root, pool, lease, rank, troubles if rank == _TROUBLED_RANK else {})
                for rank in range(WORLD)
            ]
            runs.append(_run_engine(title, attachment, ranks))
        if not quiet:
            _show(runs[-1], size_bytes)
    given = {"size_bytes": size_bytes, "world": WORLD, "delay_s_per_gib": DELAY_S_PER_GIB}
    return {**given, "runs": [asdict(run) for run in runs]}


# --- the engine


@dataclass
class _Ranks:
    """What the ranks have said."""

    begin_s: float = 0.0
    steps: list[list[tuple[float, int]]] = field(default_factory=lambda: [[] for _ in range(WORLD)])
    """Of each rank: when it had decoded how many."""
    ended: set[int] = field(default_factory=set)
    blocked_s: list[float] = field(default_factory=list)
    moments: list[_Moment] = field(default_factory=list)

    def take(self, number: int, event: dict[str, Any]) -> None:
        """Note an event."""
        name, at_s = event["event"], event["at_s"]
        if name == "decoded":
            self.steps[number].append((at_s, event["steps"]))
            return
        if name == "started":
            self.blocked_s.append(event["blocked_s"])
            return
        if name == "ready":
            longest = format_seconds(event["longest_chunk_s"])
            what = f"ready: {event['chunks']} calls, the longest took {longest}"
        elif name == "failed":
            what = f"failed ({event['reason']}), and has taken back what it had registered"
        elif name == "trouble":
            what = f"out of memory: what it has stays in use, {event['why']}"
        elif name == "back":
            what = "comes back, and goes on"
        else:
            what = f"ended: {event['why']}"
        if name in ("ready", "failed", "lost"):
            self.ended.add(number)
        self.moments.append(_Moment(at_s - self.begin_s, f"rank {number}", what))

    def decoded(self, begin_s: float, end_s: float) -> float:
        """Return the steps of the slowest rank between two moments."""
        return min(_steps_at(each, end_s) - _steps_at(each, begin_s) for each in self.steps)

    def pace(self, begin_s: float, end_s: float) -> float:
        """Return the pace of the rank that is slowest then, as a share of its undisturbed one."""
        shares = []
        for each in self.steps:
            before = _steps_at(each, self.begin_s) - _steps_at(each, self.begin_s - _UNDISTURBED_S)
            now = _steps_at(each, end_s) - _steps_at(each, begin_s)
            shares.append(now / (end_s - begin_s) / (before / _UNDISTURBED_S) if before else 0.0)
        return min(shares)


def _steps_at(counts: list[tuple[float, int]], at_s: float) -> float:
    """Return how many steps were done at a moment, between two reports as many as time says."""
    place = bisect_right(counts, at_s, key=lambda count: count[0])
    if place == 0:
        return 0.0
    if place == len(counts):
        return counts[-1][1]
    (then_s, before), (next_s, after) = counts[place - 1], counts[place]
    return before + (after - before) * (at_s - then_s) / (next_s - then_s)


def _run_engine(title: str, attachment: Attachment, ranks: list[RankConfig]) -> _Run:
    run = _Run(title)

    def work(stop: Stop) -> None:
        events: _Events = queue.Queue()
        with contextlib.ExitStack() as stack:
            processes = [stack.enter_context(_rank_process(events, config)) for config in ranks]
            said = _Ranks()
            attached = 0
            while attached < WORLD:
                number, event = _next(events, stop)
                if event["event"] == "decoded":
                    said.take(number, event)
                    continue
                if event["event"] != "attached":
                    raise FailedError(f"a rank of the demo could not attach: {event.get('why')}")
                run.simulated = bool(event["simulated"])
                attached += 1
            _serve(run, attachment, processes, said, events, stop)

    shielded(work)  # Ctrl-C while a process or thread starts would leave it behind
    return run


def _serve(
    run: _Run,
    attachment: Attachment,
    processes: list[subprocess.Popen[str]],
    ranks: _Ranks,
    events: _Events,
    stop: Stop,
) -> None:
    """Have the ranks begin, and watch until each has come to an end, and a little longer."""
    board = BoardReader(board_path(attachment), generation=attachment.lease_id)
    _take_events(ranks, events, time.monotonic() + 2 * _UNDISTURBED_S, stop)
    gate = Gate(WORLD, board, deadline_s=_LONGEST_S, grows=True, on_degraded=lambda _: None)
    ranks.begin_s = time.monotonic()
    for process in processes:
        pipe = cast("IO[str]", process.stdin)
        with contextlib.suppress(OSError):  # it has ended, as its own lines say
            pipe.write("go\n")
            pipe.flush()
    seen = [(0.0, 0)]
    decided_s: float | None = None
    deadline_s = ranks.begin_s + _LONGEST_S
    while len(ranks.ended) < WORLD or decided_s is None or (gate.is_open and not _is_whole(gate)):
        if time.monotonic() > deadline_s:
            raise FailedError(f"a rank of the demo said nothing for {_LONGEST_S:.0f} s")
        _take_events(ranks, events, time.monotonic() + _SAMPLE_S / 2, stop)
        now_s = time.monotonic() - ranks.begin_s
        usable = min(gate.usable_bytes, _slice_bytes(attachment)) * WORLD
        seen.append((now_s, usable))
        if decided_s is None and gate.state != "Closed":
            decided_s, run.opened_with_bytes = now_s, usable
        if run.whole_after_s is None and _is_whole(gate):
            run.whole_after_s = now_s
        if len(ranks.ended) == WORLD and any("lost" in m.what for m in ranks.moments):
            break
    end_s = time.monotonic()
    _take_events(ranks, events, end_s + _AFTER_S, stop)
    gate.close()
    board.close()
    run.state, run.why, run.opened_after_s = gate.state, gate.why, gate.opened_after_s
    _conclude(run, ranks, seen, decided_s or 0.0, end_s)


def _is_whole(gate: Gate) -> bool:
    return gate.usable_bytes >= ALL


def _slice_bytes(attachment: Attachment) -> int:
    """Return a rank's part: whole pages of the region, the same number for each rank."""
    page = max(attachment.page_bytes, 2 * MIB)
    return attachment.size_bytes // WORLD // page * page


def _conclude(
    run: _Run, ranks: _Ranks, seen: Sequence[tuple[float, int]], decided_s: float, end_s: float
) -> None:
    """Note what came of it."""
    begin_s = ranks.begin_s
    run.start_blocked_s = ranks.blocked_s
    run.pace = ranks.pace(begin_s, end_s)
    run.served_before = round(ranks.decoded(begin_s, begin_s + decided_s))
    run.served_after = round(ranks.decoded(begin_s + decided_s, end_s + _AFTER_S))
    run.samples = [
        _Sample(at_s, usable, ranks.pace(begin_s + at_s - _SAMPLE_S, begin_s + at_s))
        for at_s, usable in seen
    ]
    moments = [
        _Moment(0.0, "engine", "decodes from GPU memory alone; ranks begin to register"),
        *ranks.moments,
    ]
    if run.state == "Open":
        first = f"gate open: the host tier is used, {format_bytes(run.opened_with_bytes)} by now"
        moments.append(_Moment(decided_s, "engine", first))
        if run.whole_after_s is not None:
            moments.append(_Moment(run.whole_after_s, "engine", "all of the host tier is used"))
    else:
        moments.append(_Moment(decided_s, "engine", f"gate stays closed: {run.why}"))
    run.moments = sorted(moments, key=lambda moment: moment.at_s)


def _take_events(ranks: _Ranks, events: _Events, until_s: float, stop: Stop) -> None:
    """Take what ranks say until then."""
    while (left_s := until_s - time.monotonic()) > 0:
        if stop.is_set():
            raise Stopped
        with contextlib.suppress(queue.Empty):
            ranks.take(*events.get(timeout=min(left_s, _STOP_WITHIN_S)))


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
    end_s = run.samples[-1].at_s
    tier = [sample.usable_bytes / size_bytes for sample in run.samples]
    pace = [sample.pace for sample in run.samples]
    usable = format_bytes(run.samples[-1].usable_bytes)
    say(f"host tier    {_picture(tier)}  {usable} after {end_s:.2f} s")
    say(f"decode pace  {_picture(pace)}  {100 * run.pace:.0f} % of undisturbed")
    blocked = ", ".join(format_seconds(blocked_s) for blocked_s in sorted(run.start_blocked_s))
    say(f"start() blocked its thread for {blocked}.")
    if run.simulated:
        simulated = (
            f"Simulated: the driver's calls, by {DELAY_S_PER_GIB:g} s per GiB in which the rank's "
            "decode loop waits for its lock, since there is no CUDA driver here."
        )
        say(wrapped(simulated, begin="", then=""))
        say("Real: memory, processes, pace, turns, rank board and gate.")


def _picture(shares: Sequence[float]) -> str:
    """Return a line of bars, from left to right; each the mean of the samples of its time."""
    columns = min(_WIDTH, len(shares))
    bars = []
    for column in range(columns):
        part = shares[column * len(shares) // columns : (column + 1) * len(shares) // columns]
        share = min(1.0, max(0.0, sum(part) / len(part)))
        bars.append(" " if share == 0 else _BARS[round(share * (len(_BARS) - 1))])
    return "".join(bars).ljust(_WIDTH)


# --- a rank


EmitEvent = Callable[..., None]
"""Sends the demo what happens in this rank: an event's name, and facts by keyword."""


@dataclass(frozen=True, slots=True)
class RankConfig:
    """What a rank's process is given."""

    root: str
    pool: str
    lease_id: str
    rank: int
    troubles: dict[str, tuple[int, str]]
    """By the number of the call to register: the error's code and name."""


class _DemoDriver(Driver):
    """The real driver; calls fail on purpose."""

    def __init__(self, api: Any, troubles: dict[str, tuple[int, str]]) -> None:
        super().__init__(api)
        self._troubles = troubles
        self._calls = 0

    def register(self, address: int, size_bytes: int, flags: int) -> None:
        self._calls += 1
        if str(self._calls) in self._troubles:
            raise DriverError(*self._troubles[str(self._calls)], "cuMemHostRegister")
        self.do_register(address, size_bytes, flags)

    def do_register(self, address: int, size_bytes: int, flags: int) -> None:
        """Register for real."""
        super().register(address, size_bytes, flags)

    def launch(self) -> None:
        """Make a call that waits for the context as a step's launches do."""
        self._call("cuMemGetInfo")


class _SimulatedDriver(_DemoDriver):
    """Takes its time for each chunk, and registers nothing: there is no module to wrap."""

    def __init__(self, troubles: dict[str, tuple[int, str]]) -> None:
        self._troubles = troubles
        self._calls = 0
        self._lock = threading.Lock()

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

    def do_register(self, address: int, size_bytes: int, flags: int) -> None:  # noqa: ARG002
        with self._lock:
            time.sleep(DELAY_S_PER_GIB * size_bytes / GIB)

    def launch(self) -> None:
        with self._lock:
            pass

    def unregister(self, address: int) -> None:
        """Nothing is registered."""


def run_rank_process() -> None:
    """Play the config that the only argument holds; a line of input starts it, another ends it."""
    # A demo that is killed takes its ranks with it: the next demo gives back their memory.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    config = RankConfig(**json.loads(sys.argv[1]))
    logging.getLogger("hostprep.register").setLevel(logging.ERROR)  # the demo's table says it
    lock = threading.Lock()
    # Libraries may print; only events may go to the pipe.
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as pipe:
        os.dup2(2, 1)

        def emit(event: str, **facts: object) -> None:
            with lock:
                pipe.write(json.dumps({"event": event, "at_s": time.monotonic(), **facts}) + "\n")
                pipe.flush()

        try:
            _run_rank(config, emit)
        except HostprepError as error:
            emit("lost", why=str(error))


def _run_rank(config: RankConfig, emit: EmitEvent) -> None:
    driver, context = _cuda(config)
    with (
        join(config.pool, lease_id=config.lease_id, root=config.root) as attachment,
        contextlib.closing(
            RankBoard.open(
                board_path(attachment), generation=config.lease_id, world=WORLD, rank=config.rank
            )
        ) as board,
    ):
        size = _slice_bytes(attachment)
        registration = Registration(
            attachment,
            driver=driver,
            context=context,
            offset_bytes=config.rank * size,
            size_bytes=size,
            turnstile=Turnstile(config.root, engine=config.lease_id),
            board=board,
            grows=True,
        )
        with registration, _decoding(registration, driver, context, emit):
            simulated = isinstance(driver, _SimulatedDriver)
            emit("attached", size_bytes=size, simulated=simulated)
            if not sys.stdin.readline():  # the demo ended before the line above was carried out
                return
            begin_s = time.perf_counter()
            registration.start()
            blocked_s = time.perf_counter() - begin_s
            emit("started", blocked_s=blocked_s)
            _report(registration, emit)
            sys.stdin.readline()


@contextlib.contextmanager
def _decoding(
    registration: Registration, driver: _DemoDriver, context: int, emit: EmitEvent
) -> Iterator[None]:
    """Decode in a thread of its own while the block runs, and say how many steps were done."""
    stop = threading.Event()

    def decode() -> None:
        steps, said_s = 0, 0.0
        with driver.using(context):
            while not stop.is_set():
                registration.step()
                driver.launch()
                time.sleep(_STEP_S)
                steps += 1
                if (now_s := time.monotonic()) - said_s >= _SAMPLE_S:
                    said_s = now_s
                    emit("decoded", steps=steps)

    thread = threading.Thread(target=decode)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def _report(registration: Registration, emit: EmitEvent) -> None:
    """Say what becomes of the registration, until it has come to an end."""
    in_trouble = False
    while not registration.wait(_SAMPLE_S / 5):
        note = registration.progress.note
        if not in_trouble and "tried again" in note:
            in_trouble = True
            emit("trouble", why=note.rpartition("; ")[2])
        elif in_trouble and not note:
            in_trouble = False
            emit("back")
    if in_trouble:
        emit("back")
    progress, error = registration.progress, registration.error
    if error is not None:
        emit("failed", why=error.message, reason=error.reason)
        return
    emit(
        "ready",
        chunks=progress.chunks,
        longest_chunk_s=progress.longest_chunk_s,
        state=progress.state,
    )


def _cuda(config: RankConfig) -> tuple[_DemoDriver, int]:
    """Return the real driver with a context of this rank's device, or a simulated one."""
    try:
        devices = load_driver().device_count()
        api: Any = importlib.import_module("cuda.bindings.driver")
        device = api.cuDeviceGet(config.rank % devices)[1]
        code, context = api.cuDevicePrimaryCtxRetain(device)
        if int(code) == 0:
            return _DemoDriver(api, config.troubles), int(context)
    except HostprepError:
        pass
    return _SimulatedDriver(config.troubles), 1


if __name__ == "__main__":
    run_rank_process()
