"""`hostprep demo`: the main job on this machine, today's cold start beside an attach."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import click

from hostprep.api.pool_resource import spec_from_options
from hostprep.api.pool_spec import PoolSpec
from hostprep.backing import GIB, MIB
from hostprep.cli.demo_gate import WORLD, run_gate_demo
from hostprep.cli.options import output_option, progress_option
from hostprep.cli.prepare import show_plan
from hostprep.cli.progress import showing
from hostprep.console import print_json, print_table, say, warn
from hostprep.errors import BadInputError, BusyError, FailedError, HostprepError
from hostprep.linux.files import closing_fd, from_os_error, open_folder
from hostprep.linux.locks import hold_own_lock, try_lock
from hostprep.linux.processes import sees_all_processes
from hostprep.node.apply.root import clear_removed
from hostprep.node.apply.service import Node
from hostprep.node.facts import Facts
from hostprep.node.observe.pools import observe_pools
from hostprep.units import format_bytes, format_rate, format_seconds, parse_quantity

_POOL = "demo"
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


@click.command(short_help="Do the main job here, attach beside a cold start.")
@click.option("--size", help="How much; a fifth of what is free, at most 4Gi, if not given.")
@click.option("--gate", is_flag=True, help="Instead: four ranks register behind their gate.")
@progress_option
@output_option
def demo(size: str | None, progress: str, output: str, *, gate: bool) -> None:
    """Prepare memory here, attach to it from another process, and compare with a cold start.

    Gives everything back at the end. With --gate an engine of four ranks decodes while they
    register and its host tier grows, then again with a rank that is short of memory for a while,
    and with one that fails; at most 1Gi if no size is given.
    """
    quiet = output == "json"
    with _demo_node() as node:
        if gate:
            spec = _pool_spec(_gate_size(node, size))
            document = run_gate_demo(node.root, _POOL, lambda: _prepare(node, spec), quiet=quiet)
        else:
            document = _run(node, size, progress, quiet=quiet)
    if quiet:
        print_json(document)
    elif gate:
        say("\nAll of it was given back.")
    else:
        _show(document)


def _run(node: Node, size: str | None, progress: str, *, quiet: bool) -> dict[str, Any]:
    """Compare the two starts; return what they took, for programs."""
    with _turn():
        spec = _pool_spec(size or _default_size(node.facts()))
        wanted = node.plan([spec])
        if not quiet:
            show_plan(wanted)
        begin_s = time.monotonic()
        with showing(progress) as shown:
            outcome = node.prepare([spec], progress=shown)
        prepare_s = time.monotonic() - begin_s
    warn("demo: attaching, and starting cold, in turns, twice each")
    command = ("-m", "hostprep", "attach", _POOL, "--root", node.root, "-o", "json")
    attach = _child(*command)
    cold = _child("-c", _COLD, str(attach["size_bytes"]))
    # The second runs count: the first ones also pay for this machine's own surprises, such as
    # memory that a hypervisor hands out only when it is first touched. In between, prepare does
    # what the agent does all the time: it scrubs what the last owner left.
    _prepare(node, spec)
    attach = _child(*command)
    cold = _child("-c", _COLD, str(attach["size_bytes"]))
    return {
        "size_bytes": attach["size_bytes"],
        "backing": outcome.plan.pools[0].backing_words,
        "passed_over": outcome.plan.pools[0].passed_over,
        "prepare_s": prepare_s,
        "cold_s": cold["cold_s"],
        "attach_s": attach["attach_s"],
        "ratio": cold["cold_s"] / attach["attach_s"],
    }


def _pool_spec(size: str | int) -> PoolSpec:
    return spec_from_options(name=_POOL, size=str(size), regions="Single")


def _prepare(node: Node, spec: PoolSpec) -> None:
    with _turn():
        # In a container with its own PID namespace nobody can judge whether the last owner is
        # gone, so nothing is scrubbed there: the memory is made again.
        if not sees_all_processes() and observe_pools(node.root):
            node.release([spec.name], force=True)
        node.prepare([spec])


def _gate_size(node: Node, size: str | None) -> int:
    """Return four equal slices of whole pages. Raises BadInputError."""
    slices = WORLD * 2 * MIB
    wanted = parse_quantity(size) if size else min(GIB, _default_size(node.facts()))
    if wanted < slices:
        raise BadInputError(
            f"{format_bytes(wanted)} are not enough for {WORLD} ranks",
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


def _show(document: dict[str, Any]) -> None:
    size, cold_s = document["size_bytes"], document["cold_s"]
    rows = [
        ("today: allocate, zero, fault", cold_s),
        ("hostprep: attach", document["attach_s"]),
    ]
    print_table(
        f"\nAn engine starts: {format_bytes(size)} of host memory, every page present",
        ("", "TIME", "RATE", ""),
        [
            (
                name,
                format_seconds(took_s),
                # Attaching moves no bytes: a rate would say nothing.
                format_rate(size / took_s) if took_s == cold_s else "",
                "█" * max(1, round(_BAR_CHARS * took_s / cold_s)),
            )
            for name, took_s in rows
        ],
    )
    say(
        f"\n{document['ratio']:.0f} times faster, by the second run of each. "
        "All of it was given back."
    )


_BAR_CHARS = 24
"""The whole line has 80."""
_PREFIX = "hostprep-demo"
_SAY_AFTER_S = 0.5
_PREPARE_TIMEOUT_S = 600.0
_GIVE_BACK_TIMEOUT_S = 60.0
_USERS_TIMEOUT_S = 10.0
"""A killed process lets go of its memory within seconds, however much it had."""
_USERS_PAUSE_S = 0.1

_Handler = Callable[[int, FrameType | None], Any] | signal.Handlers


@contextlib.contextmanager
def _demo_node() -> Iterator[Node]:
    """Yield the machine with a new root, from which everything is given back at the end.

    Also at the end by SIGTERM or SIGHUP, which are KeyboardInterrupt here. What killed demos left
    is given back before.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(_handling(signal.default_int_handler, signal.SIGTERM, signal.SIGHUP))
        with _turn():
            _clear_leftovers()
            folder = _make_folder()
            lock = stack.enter_context(closing_fd(open_folder(folder)))
            try_lock(lock, exclusive=True)
            stack.callback(_give_back_undisturbed, folder)
        yield Node(_root_in(folder))


@contextlib.contextmanager
def _turn(timeout_s: float = _PREPARE_TIMEOUT_S) -> Iterator[None]:
    """Be the user's only demo that takes huge pages or gives them back. Raises BusyError."""

    def busy() -> BusyError:
        return BusyError(
            "another demo prepares its memory, or gives it back",
            reason="AlreadyRunning",
            remedy="wait for it to end",
        )

    path = f"{_parent()}/.{_PREFIX}-{os.geteuid()}.lock"
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(hold_own_lock(path, timeout_s=_SAY_AFTER_S, busy=busy))
        except BusyError:
            warn(f"demo: waits: {busy().message}")
            stack.enter_context(hold_own_lock(path, timeout_s=timeout_s, busy=busy))
        yield


def _parent() -> str:
    """Return the folder of all demos' folders."""
    return os.path.realpath("/run" if os.geteuid() == 0 else "/dev/shm")  # noqa: S108


def _root_in(folder: str) -> str:
    """Return the root in a demo's folder: another one, since a root may be mounted over."""
    return f"{folder}/root"


def _make_folder() -> str:
    try:
        return tempfile.mkdtemp(prefix=f"{_PREFIX}-{os.getpid()}-", dir=_parent())
    except OSError as error:
        raise from_os_error(error, f"create a folder in {_parent()}") from error


def _clear_leftovers() -> None:
    """Give back what killed demos left: their locks are free. What fails is a warning."""
    for name in os.listdir(_parent()):
        if not name.startswith(f"{_PREFIX}-"):
            continue
        folder = f"{_parent()}/{name}"
        try:
            if os.lstat(folder).st_uid != os.geteuid():  # which need not be open to us
                continue
            with closing_fd(open_folder(folder)) as lock:
                if os.fstat(lock).st_uid == os.geteuid() and try_lock(lock, exclusive=True):
                    _give_back(folder)
        except (HostprepError, OSError) as error:
            warn(f"demo: what is left at {folder} cannot be cleared away: {error}")


def _give_back_undisturbed(folder: str) -> None:
    """Give everything back, whoever presses Ctrl-C a second time."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(_handling(signal.SIG_IGN, signal.SIGINT, signal.SIGTERM, signal.SIGHUP))
        with contextlib.suppress(BusyError):  # giving back out of turn costs another demo time
            stack.enter_context(_turn(_GIVE_BACK_TIMEOUT_S))
        _give_back(folder)


def _give_back(folder: str) -> None:
    """Give everything back; what a process still uses, such as one just killed, once it ends."""
    deadline_s = time.monotonic() + _USERS_TIMEOUT_S
    root = _root_in(folder)
    while True:
        if os.path.lexists(root):
            _release_all(root)
        # A demo may have been killed before it marked its root, or while it removed that.
        with contextlib.suppress(OSError):
            os.rmdir(root)
        clear_removed(root)
        try:
            os.rmdir(folder)
        except FileNotFoundError:
            return
        except OSError as error:
            if time.monotonic() > deadline_s:
                raise from_os_error(error, f"remove {folder}") from error
            time.sleep(_USERS_PAUSE_S)
        else:
            return


def _release_all(root: str) -> None:
    node = Node(root)
    pools = [pool.name for pool in observe_pools(root)]
    if pools:
        node.release(pools, force=True)
    else:  # only what is beside the pools, and what a killed run was making
        node.clear_if_empty(wait_timeout_s=_GIVE_BACK_TIMEOUT_S)


@contextlib.contextmanager
def _handling(handler: _Handler, *numbers: signal.Signals) -> Iterator[None]:
    """Handle signals so while the block runs; one that is ignored (by nohup, say) stays so."""
    before = [(number, signal.getsignal(number)) for number in numbers]
    before = [(number, former) for number, former in before if former is not signal.SIG_IGN]
    for number, _ in before:
        signal.signal(number, handler)
    try:
        yield
    finally:
        for number, former in before:
            signal.signal(number, former)
