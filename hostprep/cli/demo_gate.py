"""`hostprep demo --gate`: an engine of four ranks serves at once, and registers meanwhile."""

from __future__ import annotations

import contextlib
import json
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import IO, Any, cast

from hostprep.api.pool_resource import spec_from_options
from hostprep.cli.demo_rank import Part
from hostprep.cli.demo_root import turn
from hostprep.client.attach import Attachment, attach
from hostprep.console import print_table, say
from hostprep.cuda.board import board_path
from hostprep.cuda.board_view import BoardReader
from hostprep.cuda.gate import Gate
from hostprep.errors import FailedError
from hostprep.node.apply.service import Node
from hostprep.units import format_bytes, format_seconds

__all__ = ["DELAY_S_PER_GIB", "WORLD", "run_gate_demo"]

WORLD = 4
DELAY_S_PER_GIB = 2.0
"""Of a simulated registration: some 20 times what drivers take for resident memory (0.03 to 0.1 s
per GB, docs/register.md), so that there is something to see."""
_POOL = "demo"
_FAILING_RANK = 2
_STEP_S = 0.01
_AFTER_STEPS = 20
"""Served after the gate is decided, to show that it goes on."""
_LONGEST_S = 300.0


@dataclass(frozen=True, slots=True)
class _Moment:
    at_s: float
    who: str
    what: str


@dataclass
class _Scene:
    """One run of the engine, as it is told afterwards."""

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


def run_gate_demo(node: Node, size_bytes: int, *, quiet: bool) -> dict[str, Any]:
    """Prepare memory and play the engine twice; return what happened. Raises HostprepError."""
    spec = spec_from_options(name=_POOL, size=str(size_bytes), regions="Single")
    scenes = []
    for title, failing in (
        ("All ranks register", None),
        ("Rank 2 fails, on purpose", _FAILING_RANK),
    ):
        with turn():
            node.prepare([spec])  # before the second run: scrubs, as the agent does
        with attach(_POOL, root=node.root) as attachment:
            size_bytes = attachment.size_bytes
            scenes.append(_play(title, node.root, attachment, failing))
        if not quiet:
            _show(scenes[-1], size_bytes)
    given = {"size_bytes": size_bytes, "world": WORLD, "delay_s_per_gib": DELAY_S_PER_GIB}
    return {**given, "runs": [asdict(scene) for scene in scenes]}


def _play(title: str, root: str, attachment: Attachment, failing: int | None) -> _Scene:
    scene = _Scene(title)
    told: queue.Queue[tuple[int, dict[str, Any]]] = queue.Queue()
    with contextlib.ExitStack() as held:
        ranks = [
            held.enter_context(_rank(told, root, attachment.lease_id, number, failing))
            for number in range(WORLD)
        ]
        for _ in ranks:
            _, fact = _next(told)
            if fact["event"] != "attached":
                raise FailedError(f"a rank of the demo could not attach: {fact.get('why')}")
            scene.simulated = bool(fact["simulated"])
        _serve(scene, attachment, ranks, told)
    return scene


def _serve(
    scene: _Scene,
    attachment: Attachment,
    ranks: list[subprocess.Popen[str]],
    told: queue.Queue[tuple[int, dict[str, Any]]],
) -> None:
    """Serve step by step, from before the ranks begin until after the gate is decided."""
    board = BoardReader(board_path(attachment), generation=attachment.lease_id)
    gate = Gate(WORLD, board, deadline_s=_LONGEST_S, on_degraded=lambda _: None)
    begin_s = time.monotonic()
    moments = [_Moment(0.0, "engine", "serves from GPU memory alone; ranks begin to register")]
    for rank in ranks:
        _say_to(rank)
    while gate.state == "Closed":
        time.sleep(_STEP_S)  # a step of the engine
        scene.served_before += 1
    decided_s = time.monotonic() - begin_s
    scene.state, scene.why, scene.opened_after_s = gate.state, gate.why, gate.opened_after_s
    for _ in range(_AFTER_STEPS):
        time.sleep(_STEP_S)
        scene.served_after += 1
    moments += list(_of_ranks(scene, told, begin_s))
    board.close()
    words = "gate open: the host tier joins" if gate.is_open else f"gate stays closed: {scene.why}"
    moments.append(_Moment(decided_s, "engine", words))
    until = f"served {scene.served_before} steps before that, and goes on serving"
    moments.append(_Moment(decided_s, "engine", until))
    scene.moments = sorted(moments, key=lambda moment: moment.at_s)


def _of_ranks(
    scene: _Scene, told: queue.Queue[tuple[int, dict[str, Any]]], begin_s: float
) -> Iterator[_Moment]:
    """Yield what the ranks told, until each has come to an end."""
    ended = 0
    while ended < WORLD:
        number, fact = _next(told)
        event = fact["event"]
        at_s = fact["at_s"] - begin_s
        if event == "started":
            scene.start_blocked_s.append(fact["blocked_s"])
            continue
        ended += 1
        if event == "ready":
            longest = format_seconds(fact["longest_chunk_s"])
            what = f"ready: {fact['chunks']} chunks, the longest took {longest}"
        elif event == "failed":
            what = f"failed ({fact['reason']}), and has taken back what it had registered"
        else:
            what = f"ended: {fact['why']}"
        yield _Moment(at_s, f"rank {number}", what)


@contextlib.contextmanager
def _rank(
    told: queue.Queue[tuple[int, dict[str, Any]]],
    root: str,
    lease_id: str,
    number: int,
    failing: int | None,
) -> Iterator[subprocess.Popen[str]]:
    """Have a rank's process, whose lines arrive in the queue; ended at the end."""
    part = Part(root, _POOL, lease_id, number, WORLD, DELAY_S_PER_GIB, fails=number == failing)
    command = [sys.executable, "-m", "hostprep.cli.demo_rank", json.dumps(asdict(part))]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:

        def read() -> None:
            for line in cast("IO[str]", process.stdout):
                try:
                    fact = json.loads(line)
                    told.put((number, {"event": fact["event"], **fact}))
                except (ValueError, TypeError, KeyError):  # some library's, before its main began
                    print(line, end="", file=sys.stderr)
            told.put((number, {"event": "lost", "at_s": time.monotonic(), "why": "it ended"}))

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


def _say_to(rank: subprocess.Popen[str]) -> None:
    pipe = cast("IO[str]", rank.stdin)
    with contextlib.suppress(OSError):  # it has ended, which its own lines tell
        pipe.write("go\n")
        pipe.flush()


def _next(told: queue.Queue[tuple[int, dict[str, Any]]]) -> tuple[int, dict[str, Any]]:
    try:
        return told.get(timeout=_LONGEST_S)
    except queue.Empty as error:
        raise FailedError(f"a rank of the demo said nothing for {_LONGEST_S:.0f} s") from error


def _show(scene: _Scene, size_bytes: int) -> None:
    how = f"{WORLD} ranks, each registers its quarter of {format_bytes(size_bytes)}"
    rows = [(f"{moment.at_s:.2f} s", moment.who, moment.what) for moment in scene.moments]
    print_table(f"\n{scene.title}: {how}", ("TIME", "WHO", ""), rows)
    blocked = ", ".join(format_seconds(blocked_s) for blocked_s in sorted(scene.start_blocked_s))
    say(f"start() blocked its thread for {blocked}.")
    if scene.simulated:
        say(
            f"Simulated: the driver's calls, by {DELAY_S_PER_GIB:g} s per GiB, since there is no "
            "CUDA driver here.\nReal: memory, processes, turns, rank board and gate."
        )
