"""Burst to ready: from the start of a process to its first token, today's engine beside ours.

python -m benchmarks.burst                          # anywhere: vLLM's CPU build, simulated driver
python -m benchmarks.burst --real --size 256Gi -- vllm serve MODEL     # on a machine with a GPU
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier, BrokenBarrierError
from typing import Any

from benchmarks.burst.lane import watch
from benchmarks.burst.scene import (
    BASE_PAGE_NS,
    HUGE_PAGE_NS,
    POOL,
    Lane,
    real_lanes,
    simulated_lanes,
)
from benchmarks.burst.show import draw, print_run
from benchmarks.lanes import lanes_parser, made_here, recorded, show
from benchmarks.machine import BenchmarkError, own_node
from hostprep.api.pool_resource import spec_from_options
from hostprep.backing import MIB
from hostprep.errors import HostprepError
from hostprep.node.apply.service import Node
from hostprep.units import parse_quantity
from testbed.machine import machine_lock

_LEAST_BYTES = 64 * MIB


def main() -> int:
    """Return 0 where it was measured, 2 where it cannot run here."""
    options = _options()
    try:
        run = recorded(options.source, least_lanes=2) if options.source else _measured(options)
    except (BenchmarkError, BrokenBarrierError, HostprepError) as error:
        print(f"benchmarks: burst: {error}", file=sys.stderr)
        return 2
    show(options, run, draw=draw, print_run=print_run)
    return 0


def _options() -> argparse.Namespace:
    parser = lanes_parser("burst", __doc__)
    parser.add_argument("--size", type=_size, default=None, help="of the host tier (2Gi)")
    parser.add_argument(
        "--stands-for",
        type=_size,
        default=None,
        metavar="SIZE",
        help="simulated: registering takes as long as for this much (512Gi)",
    )
    parser.add_argument(
        "--together",
        action="store_true",
        help="simulated: both at the same time, so that what else this machine does hits both",
    )
    parser.add_argument("--tail", type=float, default=15.0, help="seconds more, once all is in use")
    parser.add_argument("--limit", type=float, default=1200.0, help="seconds; then it is given up")
    parser.add_argument("--real", action="store_true", help="a GPU's driver, and your own vLLM")
    parser.add_argument("serve", nargs="*", metavar="-- vllm serve ...", help="with --real")
    options = parser.parse_args()
    if options.real != bool(options.serve):
        parser.error("--real goes with a command, as in: --real -- vllm serve MODEL")
    if options.real and (options.size is None or options.stands_for is not None):
        parser.error("--real needs --size, and stands for itself")
    if options.real and options.together:
        parser.error("--together is for the simulation: two engines do not share a GPU")
    options.size = options.size or parse_quantity("2Gi")
    options.stands_for = options.stands_for or parse_quantity("512Gi")
    return options


def _size(text: str) -> int:
    try:
        size_bytes = parse_quantity(text)
    except HostprepError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    if size_bytes < _LEAST_BYTES:
        raise argparse.ArgumentTypeError("at least 64Mi")
    return size_bytes // (2 * MIB) * 2 * MIB


def _measured(options: argparse.Namespace) -> dict[str, Any]:
    scale = options.stands_for / options.size
    _touch(options.size)
    with own_node() as node, tempfile.TemporaryDirectory(prefix="hostprep-burst-") as name:
        folder = Path(name)
        if options.real:
            today, prepared = real_lanes(folder, node.root, options.size, options.serve)
        else:
            today, prepared = simulated_lanes(folder, node.root, options.size, scale)
        lanes = [] if options.together else [_watch(today, folder, options)]
        with machine_lock():
            prepare_s = _prepare(node, options)
            if options.together:
                lanes = _together([today, prepared], folder, options)
            else:
                as_long_s = lanes[0]["end_s"] - options.tail
                lanes.append(_watch(prepared, folder, options, as_long_s))
            node.release([POOL], force=True)
    return _document(options, lanes, prepare_s)


def _together(lanes: list[Lane], folder: Path, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Watch all at the same time, each until all of them are in use."""
    all_in_use = Barrier(len(lanes), timeout=options.limit)
    with ThreadPoolExecutor(len(lanes)) as pool:
        watched = [pool.submit(_watch, lane, folder, options, in_use=all_in_use) for lane in lanes]
    return [each.result() for each in watched]


def _watch(
    lane: Lane,
    folder: Path,
    options: argparse.Namespace,
    as_long_s: float = 0.0,
    *,
    in_use: Barrier | None = None,
) -> dict[str, Any]:
    """Watch one until its host tier is in use, for `as_long_s` at least, and the tail."""
    print(f"burst: {lane.name}", file=sys.stderr, flush=True)

    def hold(now_s: float) -> None:
        if in_use:
            in_use.wait()
        time.sleep(max(0.0, as_long_s - now_s) + options.tail)

    try:
        return watch(lane, folder / f"log-{lane.name}", hold=hold, limit_s=options.limit)
    except BaseException:
        if in_use:
            in_use.abort()
        raise


def _prepare(node: Node, options: argparse.Namespace) -> float:
    """Prepare the pool, as at the node's boot; return the seconds that it took."""
    spec = spec_from_options(name=POOL, size=str(options.size), backings=options.backing, regions=1)
    begin_s = time.perf_counter()
    node.prepare([spec])
    return time.perf_counter() - begin_s


def _touch(size_bytes: int) -> None:
    """Touch as much fresh memory once: what a hypervisor hands out at first touch is there then."""
    with tempfile.TemporaryFile(dir="/dev/shm") as file:
        block = bytes(64 * MIB)
        for _ in range(size_bytes // len(block)):
            file.write(block)


def _document(
    options: argparse.Namespace, lanes: list[dict[str, Any]], prepare_s: float
) -> dict[str, Any]:
    simulated = {
        "stands_for_bytes": options.stands_for,
        "base_page_ns": BASE_PAGE_NS,
        "huge_page_ns": HUGE_PAGE_NS,
        "scale": options.stands_for / options.size,
    }
    return {
        **made_here(),
        "simulated": None if options.real else simulated,
        "size_bytes": options.size,
        "backing": options.backing,
        "together": options.together,
        "prepare_s": prepare_s,
        "lanes": lanes,
    }


if __name__ == "__main__":
    sys.exit(main())
