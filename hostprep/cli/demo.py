"""`hostprep demo`: the main job on this machine, today's cold start beside an attach."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from dataclasses import dataclass
from typing import Any

import click

from hostprep.api.pool_resource import spec_from_options
from hostprep.backing import GIB, MIB
from hostprep.cli.demo_root import demo_node, turn
from hostprep.cli.options import output_option, progress_option
from hostprep.cli.plan import show_plan
from hostprep.cli.progress import showing
from hostprep.console import print_json, print_table, say, warn
from hostprep.errors import BadInputError, FailedError
from hostprep.node.apply.service import Node
from hostprep.node.facts import Facts
from hostprep.node.plan.actions import Plan
from hostprep.units import format_bytes, format_rate, format_seconds, parse_quantity

__all__ = ["demo"]

_POOL = "demo"
_RANKS = 4
_COLD = """
import ctypes, json, mmap, os, sys, time
size, piece = int(sys.argv[1]), 2 << 20
libc = ctypes.CDLL(None, use_errno=True)
begin = time.perf_counter()
fd = os.memfd_create("cold")
os.ftruncate(fd, size)
memory = mmap.mmap(fd, size)
address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
for offset in range(0, size, piece):
    left = ctypes.c_size_t(min(piece, size - offset))
    if libc.madvise(ctypes.c_void_p(address + offset), left, 23):
        sys.exit("madvise: " + os.strerror(ctypes.get_errno()))
print(json.dumps({"cold_s": time.perf_counter() - begin}))
"""
"""What engines do today (vLLM 0.33, SharedOffloadRegion): a fresh shared file, populated piece
by piece by one thread. Registering with CUDA comes on top of either way."""


@dataclass(frozen=True, slots=True)
class _Result:
    plan: Plan
    size_bytes: int
    prepare_s: float
    cold_s: float
    attach_s: float

    def document(self) -> dict[str, Any]:
        return {
            "size_bytes": self.size_bytes,
            "backing": self.plan.pools[0].backing_words,
            "passed_over": self.plan.pools[0].passed_over,
            "prepare_s": self.prepare_s,
            "cold_s": self.cold_s,
            "attach_s": self.attach_s,
            "ratio": self.cold_s / self.attach_s,
        }


@click.command(short_help="Do the main job here, attach beside a cold start.")
@click.option("--size", help="How much; a fifth of what is free, at most 4Gi, if not given.")
@click.option("--gate", is_flag=True, help="Instead: four ranks register behind their gate.")
@progress_option
@output_option
def demo(size: str | None, progress: str, output: str, *, gate: bool) -> None:
    """Prepare memory here, attach to it from another process, and compare with a cold start.

    Gives everything back at the end. With --gate an engine of four ranks serves while they
    register, and then again with one that fails; at most 1Gi if no size is given.
    """
    as_json = output == "json"
    if gate:
        from hostprep.cli.demo_gate import run_gate_demo

        with demo_node() as node:
            document = run_gate_demo(node, _gate_size(node, size), quiet=as_json)
        if as_json:
            print_json(document)
        else:
            say("\nAll of it was given back.")
        return
    with demo_node() as node:
        result = _run(node, size, progress, quiet=as_json)
    if as_json:
        print_json(result.document())
    else:
        _show(result)


def _run(node: Node, size: str | None, progress: str, *, quiet: bool) -> _Result:
    with turn():
        size_bytes = size or str(_default_size(node.facts()))
        spec = spec_from_options(name=_POOL, size=size_bytes, regions="Single")
        wanted = node.plan([spec])
        if not quiet:
            show_plan(wanted)
        begin_s = time.monotonic()
        with showing(progress) as shown:
            outcome = node.prepare([spec], progress=shown)
        prepare_s = time.monotonic() - begin_s
    warn("demo: attaching, and starting cold, in turns, twice each")
    command = ("-m", "hostprep", "attach", "--pool", _POOL, "--root", node.root, "-o", "json")
    attach = _child(*command)
    cold = _child("-c", _COLD, str(attach["size_bytes"]))
    # The second runs count: the first ones also pay for this machine's own surprises, such as
    # memory that a hypervisor hands out only when it is first touched. In between, prepare does
    # what the agent does all the time: it scrubs what the last owner left.
    with turn():
        node.prepare([spec])
    attach = _child(*command)
    cold = _child("-c", _COLD, str(attach["size_bytes"]))
    return _Result(
        outcome.plan, attach["size_bytes"], prepare_s, cold["cold_s"], attach["attach_s"]
    )


def _gate_size(node: Node, size: str | None) -> int:
    """Return four equal slices of whole pages. Raises BadInputError."""
    slices = _RANKS * 2 * MIB
    wanted = parse_quantity(size) if size else min(GIB, _default_size(node.facts()))
    if wanted < slices:
        raise BadInputError(
            f"{format_bytes(wanted)} are not enough for {_RANKS} ranks",
            remedy=f"give --size {format_bytes(slices)[:-1].replace(' ', '')} or more",
        )
    return wanted // slices * slices


def _default_size(facts: Facts) -> int:
    fifth = facts.memory.available_bytes // 5
    return max(64 * MIB, min(4 * GIB, fifth // (2 * MIB) * (2 * MIB)))


def _child(*arguments: str) -> dict[str, Any]:
    """Run another Python process, as an engine would be one. Raises FailedError."""
    done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise FailedError(f"the demo's second process failed: {done.stderr.strip()[-400:]}")
    document: dict[str, Any] = json.loads(done.stdout)
    return document


def _show(result: _Result) -> None:
    size = result.size_bytes
    rows = [
        ("today: allocate, zero, fault", result.cold_s),
        ("hostprep: attach", result.attach_s),
    ]
    print_table(
        f"\nAn engine starts: {format_bytes(size)} of host memory, every page present",
        ("", "TIME", "RATE", ""),
        [
            (
                name,
                format_seconds(took_s),
                format_rate(size / took_s),
                "█" * max(1, round(60 * took_s / result.cold_s)),
            )
            for name, took_s in rows
        ],
    )
    say(
        f"\n{result.cold_s / result.attach_s:.0f} times faster, by the second run of each. "
        "All of it was given back."
    )
