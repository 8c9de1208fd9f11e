"""Restart to hot: vLLM is filled, killed with -9 and started again; what it serves from then on.

python -m benchmarks.warm_restart         # today's vLLM, its file tier, and ours, in turns
python -m benchmarks.warm_restart --lanes kept --seconds 60
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.burst.load import get
from benchmarks.lanes import lanes_parser, made_here, recorded, show
from benchmarks.machine import BenchmarkError, own_node
from benchmarks.warm_restart.load import Answer, Load, as_json, ask, question
from benchmarks.warm_restart.scene import LANES, POOL, Lane, lanes
from benchmarks.warm_restart.show import draw, print_run
from hostprep.api.pool_resource import spec_from_options
from hostprep.errors import HostprepError
from hostprep.units import parse_quantity
from testbed.machine import machine_lock

_UP_S = 900.0
_END_S = 60.0
_SETTLE_S = 3.0
"""For the last stores of the filled engine to be complete before it is killed."""


def main() -> int:
    """Return 0 where it was measured, 2 where it cannot run here."""
    options = _options()
    try:
        run = recorded(options.source) if options.source else _measured(options)
    except (BenchmarkError, HostprepError) as error:
        print(f"benchmarks: warm_restart: {error}", file=sys.stderr)
        return 2
    show(options, run, draw=draw, print_run=print_run)
    return 0


def _options() -> argparse.Namespace:
    parser = lanes_parser("warm_restart", __doc__)
    parser.add_argument("--size", type=parse_quantity, default=parse_quantity("1Gi"))
    parser.add_argument("--documents", type=int, default=8, help="that the questions are about")
    parser.add_argument("--tokens", type=int, default=4096, help="of a document")
    parser.add_argument("--seconds", type=float, default=120.0, help="watched after it is up again")
    parser.add_argument("--lanes", nargs="+", choices=LANES, default=LANES)
    return parser.parse_args()


def _measured(options: argparse.Namespace) -> dict[str, Any]:
    from testbed.engines.vllm_server import without_queues

    with (
        own_node() as node,
        tempfile.TemporaryDirectory(prefix="hostprep-warm-") as name,
        without_queues(),  # of engines that are killed
    ):
        folder = Path(name)
        made = lanes(folder, node.root, options.size, tuple(options.lanes))
        with machine_lock():
            spec = spec_from_options(
                name=POOL, size=str(options.size), backings=options.backing, regions=1
            )
            node.prepare([spec])
            try:
                measured = [_lane(lane, folder, options) for lane in made]
            finally:
                node.release([POOL], force=True)
    return {
        **made_here(),
        "size_bytes": options.size,
        "documents": options.documents,
        "document_tokens": options.tokens,
        "seconds": options.seconds,
        "lanes": measured,
    }


def _lane(lane: Lane, folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Fill, kill, start again and watch one engine."""
    print(f"warm_restart: {lane.name}", file=sys.stderr, flush=True)
    load_average = os.getloadavg()[0]
    with _running(lane, folder / f"log-{lane.name}-1") as process:
        _wait_until_up(lane, process, folder / f"log-{lane.name}-1")
        begin_s = time.monotonic()
        filled = [
            ask(lane.port, question(document, document, options.tokens), document, begin_s)
            for document in range(options.documents)
        ]
        # A question again, while the engine lives: what a hit answers.
        for _ in range(2):
            live = _asked(lane, options, begin_s)
        time.sleep(_SETTLE_S)
    killed_s = time.monotonic()
    with _running(lane, folder / f"log-{lane.name}-2") as process:
        load = Load(lane.port, options.documents, options.tokens, killed_s)
        _wait_until_up(lane, process, folder / f"log-{lane.name}-2")
        up_s = time.monotonic() - killed_s
        time.sleep(options.seconds)
        load.stop()
        again = _asked(lane, options, killed_s)
    return {
        "name": lane.name,
        "up_s": up_s,
        "fill_waited_s": [answer.waited_s for answer in filled],
        "answers": as_json(load.answers),
        **_compared(live, again),
        "load_average_before": round(load_average, 1),
        "load_average_after": round(os.getloadavg()[0], 1),
    }


def _asked(lane: Lane, options: argparse.Namespace, begin_s: float) -> list[Answer]:
    """Ask one more question about each document, the same ones each time."""
    return [
        ask(lane.port, question(document, 500 + document, options.tokens), document, begin_s)
        for document in range(options.documents)
    ]


def _compared(live: list[Answer], again: list[Answer]) -> dict[str, int]:
    """Count hits after the restart that answered as those of the engine that was killed.

    Where as many tokens were cached: what is computed anew may be rounded differently.
    """
    pairs = [
        (before.tokens, after.tokens)
        for before, after in zip(live, again, strict=True)
        if before.cached_tokens == after.cached_tokens > 0
    ]
    return {
        "answers_compared": len(pairs),
        "answers_same": sum(before == after for before, after in pairs),
    }


@contextlib.contextmanager
def _running(lane: Lane, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Run the engine in a session of its own; it is killed with all its processes at the end."""
    with log.open("wb") as output:
        process = subprocess.Popen(
            lane.command, stdout=output, stderr=output, env=lane.environment, start_new_session=True
        )
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(_END_S)
        for left in Path("/dev/shm").glob(f"vllm_offload_warm-{lane.name}*"):
            left.unlink(missing_ok=True)


def _wait_until_up(lane: Lane, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline_s = time.monotonic() + _UP_S
    while True:
        with contextlib.suppress(OSError):
            get(lane.port, "/health")
            return
        if process.poll() is not None or time.monotonic() > deadline_s:
            last = log.read_text("utf-8", "replace")[-4000:]
            raise BenchmarkError(f"{lane.name}: it did not come up:\n{last}")
        time.sleep(0.2)


if __name__ == "__main__":
    sys.exit(main())
