"""What runs below the root while it is attacked: by root, by engines, by the agent's worker."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import pkgutil
import select
import signal
import sys
import tempfile
import time
import traceback
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import hostprep
from benchmarks.hostile_files.processes import CRASHED, Outcome, User
from hostprep.__main__ import main as run_main
from hostprep.agent import worker as agent_worker
from hostprep.agent.desired import DesiredState, Source, entry_key, instruction_of
from hostprep.agent.messages import (
    DesiredPool,
    Done,
    Message,
    Observation,
    PoolDone,
    PoolResult,
    ReconcileRequest,
    ReconcileResult,
    decode,
    encode,
)
from hostprep.agent.status import NodeContext, node_status
from hostprep.api.node_resource import NodeStatus, PoolEntry
from hostprep.api.pool_spec import PoolSpec
from hostprep.cuda.turnstile import Turnstile
from hostprep.node.apply.exclusive import AgentLock
from hostprep.paths import PoolPaths

ATTACKED = "attacked"
BYSTANDER = "bystander"
GID = 54321
BYSTANDER_GID = 54322
REGIONS = 2
REGION_MIB = 8
ATTACKER = User(1000, GID)
NEIGHBOUR = User(1002, GID)
"""Another engine of the attacked pool, which means no harm."""
BYSTANDERS_ENGINE = User(2000, BYSTANDER_GID)
PATTERNS = {ATTACKED: b"attacked's bytes", BYSTANDER: b"bystander's bytes"}
DIRTY = 7
"""Exit code of a claim that met another owner's bytes."""

_SHOWN_CONTROLS = "\n"


@dataclass(frozen=True)
class Operation:
    """One operation; `must_work` where no attack on the other pool may make it fail."""

    name: str
    work: Callable[[], int]
    user: User | None = None
    must_work: bool = False
    is_json: bool = False
    may_get_sigbus: bool = False
    """An engine of the attacked pool: whoever may write a region may cut it short under others."""


def load_all_modules() -> None:
    """Import what the operations import late: their users may not be able to read it."""
    for package in ("cli", "client", "cuda", "engines", "linux", "node"):
        module = importlib.import_module(f"hostprep.{package}")
        for found in pkgutil.iter_modules(module.__path__):
            if (package, found.name) == ("cli", "agent"):
                continue  # seconds of the API server's client, which nothing here needs
            with contextlib.suppress(ImportError):  # an engine's plugin, of libraries not here
                importlib.import_module(f"hostprep.{package}.{found.name}")
    for name in ("rich.console", "rich.table", "rich.text", "encodings.idna", "logging"):
        importlib.import_module(name)


def operations(root: str, pools_file: str, backing: str) -> list[Operation]:
    """Return everything that may be run at any time while the attacker moves."""
    command = _Commands(root)
    both = ("-f", pools_file)
    bystander = _prepare_arguments(BYSTANDER, BYSTANDER_GID, "Base")
    attacked = _prepare_arguments(ATTACKED, GID, backing)
    quiet = ("--progress", "none", "--wait", "10")
    return [
        command("status"),
        command("status", "-o", "json"),
        command("status", BYSTANDER, "-o", "json", must_work=True),
        command("status", user=BYSTANDERS_ENGINE),
        command("verify"),
        command("verify", "-o", "json"),
        command("verify", BYSTANDER, "--pages", must_work=True),
        command("verify", ATTACKED, "--pages", "-o", "json"),
        command("doctor"),
        command("doctor", *both, "-o", "json"),
        command("plan", *both, "-o", "json"),
        command("plan", *bystander, must_work=True),
        command("prepare", *both, *quiet),
        command("prepare", *both, *quiet, "-o", "json"),
        command("prepare", *bystander, *quiet, must_work=True),
        command("prepare", *attacked, *quiet),
        command("release", ATTACKED, *quiet),
        command("release", ATTACKED, "--force", *quiet),
        command("wait", BYSTANDER, "--wait", "5", user=BYSTANDERS_ENGINE, must_work=True),
        command("wait", ATTACKED, "--wait", "0.1", user=NEIGHBOUR, may_get_sigbus=True),
        command("attach", BYSTANDER, must_work=True),
        command("attach", ATTACKED, "-o", "json"),
        command("attach", ATTACKED, "-o", "json", user=NEIGHBOUR, may_get_sigbus=True),
        command("exec", BYSTANDER, "--", "/bin/true", must_work=True),
        command("exec", ATTACKED, "--link", "/tmp/{pool}-{lease}", "--", "/bin/true"),
        Operation("claim bystander", _claim(root, BYSTANDER), must_work=True),
        Operation("claim attacked", _claim(root, ATTACKED), may_get_sigbus=True),
        Operation("claim attacked", _claim(root, ATTACKED), user=NEIGHBOUR, may_get_sigbus=True),
        Operation("take a turn", _take_turn(root), user=BYSTANDERS_ENGINE, must_work=True),
        Operation("agent's lock", _agent_lock(root), must_work=True),
    ]


def bystander_claim(root: str) -> Operation:
    """Return a claim by the bystander's engine, which cannot scrub: the agent has to have done."""
    return Operation(
        "engine claims bystander", _claim(root, BYSTANDER), BYSTANDERS_ENGINE, must_work=True
    )


def bystander_again(root: str) -> list[Operation]:
    """Return a release of the bystander and its preparation again."""
    command = _Commands(root)
    arguments = _prepare_arguments(BYSTANDER, BYSTANDER_GID, "Base")
    quiet = ("--progress", "none", "--wait", "10")
    return [
        command("release", BYSTANDER, *quiet, must_work=True),
        command("prepare", *arguments, *quiet, must_work=True),
    ]


def prepare(root: str, pool: str, backing: str) -> Operation:
    """Return the first preparation of a pool."""
    gid = GID if pool == ATTACKED else BYSTANDER_GID
    arguments = _prepare_arguments(pool, gid, backing)
    return _Commands(root)("prepare", *arguments, "--progress", "none", must_work=True)


def release_attacked(root: str) -> Operation:
    """Return the forced release of the attacked pool after the attack."""
    return _Commands(root)("release", ATTACKED, "--force", "--progress", "none", must_work=True)


def hold_bystander(root: str, ready_fd: int, end_fd: int) -> int:
    """Lease a region of the bystander until told to end; then its bytes must be its own still."""
    with hostprep.attach(BYSTANDER, root=root) as memory:
        pattern = PATTERNS[BYSTANDER] * (1 << 16)
        memory.buffer[: len(pattern)] = pattern
        os.write(ready_fd, b"+")
        os.read(end_fd, 1)
        same = bytes(memory.buffer[: len(pattern)]) == pattern
        zero = not bytes(memory.buffer[len(pattern) :]).strip(b"\0")
        return 0 if same and zero else DIRTY


class _Commands:
    """Makes operations of the command line, run in the forked child's own interpreter."""

    def __init__(self, root: str) -> None:
        self._root = root

    def __call__(
        self,
        *arguments: str,
        user: User | None = None,
        must_work: bool = False,
        may_get_sigbus: bool = False,
    ) -> Operation:
        line = ["hostprep", arguments[0], "--root", self._root, *arguments[1:]]
        words = [word for word in arguments if word in _SHOWN_WORDS]
        words += ["JSON"] if "json" in arguments else []
        words += ["both"] if "-f" in arguments else []

        def run() -> int:
            sys.argv = line
            return run_main()

        return Operation(
            " ".join(words) + (" (engine)" if user else ""),
            run,
            user,
            must_work=must_work,
            is_json="json" in arguments,
            may_get_sigbus=may_get_sigbus,
        )


_SHOWN_WORDS = {
    *("status", "verify", "doctor", "plan", "prepare", "release", "wait", "attach", "exec"),
    *(ATTACKED, BYSTANDER, "--force", "--pages"),
}


def _prepare_arguments(pool: str, gid: int, backing: str) -> tuple[str, ...]:
    size = f"{REGIONS * REGION_MIB}Mi"
    return (
        *(pool, "--size", size, "--regions", str(REGIONS)),
        *("--backing", backing, "--gid", str(gid)),
    )


def _claim(root: str, pool: str) -> Callable[[], int]:
    """Return a claim that reads all bytes and writes its pool's pattern.

    Within the attacked pool a forged mark may hand out that pool's own old bytes; those of another
    pool never.
    """

    def claim() -> int:
        try:
            with hostprep.attach(pool, root=root) as memory:
                data = bytes(memory.buffer)
                pattern = PATTERNS[pool]
                memory.buffer[: 2 * len(pattern)] = 2 * pattern
        except hostprep.HostprepError as error:
            print(f"hostprep: {error}", file=sys.stderr)
            return error.exit_code
        foreign = PATTERNS[BYSTANDER] in data if pool == ATTACKED else bool(data.strip(b"\0"))
        if foreign:
            print(f"met {data.strip(bytes(1))[:32]!r}", file=sys.stderr)
        return DIRTY if foreign else 0

    return claim


def _take_turn(root: str) -> Callable[[], int]:
    def take_turn() -> int:
        for key in ("node", "GPU-1"):
            with Turnstile(root, key, patience_s=0.5, say=lambda _: None).turn():
                pass
        return 0

    return take_turn


def _agent_lock(root: str) -> Callable[[], int]:
    def hold() -> int:
        lock = AgentLock(root)
        try:
            lock.hold()
        except hostprep.HostprepError as error:
            print(f"hostprep: {error}", file=sys.stderr)
            return error.exit_code
        finally:
            lock.close()
        return 0

    return hold


# --- the agent


class Agent:
    """A real worker of the agent, in a forked child, through all rounds; and the status of it."""

    def __init__(self, root: str, host: str, limit_s: float) -> None:
        self._root = root
        self._host = host
        self._limit_s = limit_s
        self._number = 0
        self._status = NodeStatus()
        self._start()

    def _start(self) -> None:
        requests, self._requests = os.pipe()
        self._answers, answers = os.pipe()
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the worker
        self._said_bytes = 0
        self._pending = b""
        self._pid = os.fork()
        if self._pid == 0:
            code = CRASHED
            try:
                for fd, to in ((requests, 0), (answers, 1), (self._stderr.fileno(), 2)):
                    os.dup2(fd, to)
                # Started again in the middle of a round it has pipes of others, whose end they
                # wait for.
                os.closerange(3, 1 << 16)
                sys.stdin, sys.stdout, sys.stderr = (
                    os.fdopen(fd, mode, encoding="utf-8", closefd=False)
                    for fd, mode in ((0, "r"), (1, "w"), (2, "w"))
                )
                code = agent_worker.main(["--root", self._root, "--host", self._host])
            except SystemExit:
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(code)
        os.close(requests)
        os.close(answers)

    def round(self, specs: Sequence[PoolSpec]) -> Iterator[str]:
        """Do a round with all its work; yield what is wrong with it."""
        entries = tuple(
            PoolEntry(name=spec.name, uid=spec.name, generation=1, absent=False, policy={})
            for spec in specs
        )
        pools = tuple(
            DesiredPool(spec=spec, key=entry_key(entry))
            for spec, entry in zip(specs, entries, strict=True)
        )
        self._number += 1
        request = encode(ReconcileRequest(number=self._number, pools=pools))
        try:
            os.write(self._requests, request)
            messages = list(self._until_idle())
        except (EOFError, BrokenPipeError):
            yield "the worker ended: " + self._said()[-3000:]
            self.close()
            self._start()
            return
        except TimeoutError:
            yield f"the worker did not answer within {self._limit_s:.0f} s: " + self._said()
            self.close()
            self._start()
            return
        if said := self._said():
            yield f"the worker said: {said[-3000:]}"
        yield from _problems(messages)
        yield from self._status_problems(messages, entries)

    def close(self) -> None:
        """End the worker."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self._pid, 0)
        for fd in (self._requests, self._answers):
            os.close(fd)
        self._stderr.close()

    def _until_idle(self) -> Iterator[Message]:
        deadline_s = time.monotonic() + self._limit_s
        while True:
            line, found, rest = self._pending.partition(b"\n")
            if not found:
                left_s = max(0.0, deadline_s - time.monotonic())
                if not select.select([self._answers], [], [], left_s)[0]:
                    raise TimeoutError
                data = os.read(self._answers, 1 << 20)
                if not data:
                    raise EOFError
                self._pending += data
                continue
            self._pending = rest
            message = decode(line)
            yield message
            if isinstance(message, Done) or (
                isinstance(message, ReconcileResult) and not message.busy
            ):
                return

    def _said(self) -> str:
        data = os.pread(self._stderr.fileno(), 1 << 20, self._said_bytes)
        self._said_bytes += len(data)
        return data.decode("utf-8", "replace")

    def _status_problems(
        self, messages: Sequence[Message], entries: tuple[PoolEntry, ...]
    ) -> Iterator[str]:
        """Yield what the API server would not take, or what a terminal would obey."""
        desired = DesiredState(
            source=Source.LIVE, uid="u", generation=1, boot_id="b", entries=entries
        )
        context = NodeContext(
            desired=desired,
            instruction=instruction_of(desired),
            observation=_observation(messages),
            results=_results(messages),
        )
        self._status = node_status(context, self._status, now_s=time.time())
        try:
            json.dumps(self._status.to_json(), allow_nan=False)
        except ValueError as error:
            yield f"status: {error}"
        yield from (f"status: {what}" for what in odd_texts(self._status.to_json()))


def _observation(messages: Sequence[Message]) -> Observation:
    return next(
        message.observation
        for message in reversed(messages)
        if isinstance(message, PoolDone | ReconcileResult)
    )


def _results(messages: Sequence[Message]) -> dict[str, PoolResult]:
    last: dict[str, PoolResult] = {}
    for message in messages:
        if isinstance(message, ReconcileResult):
            last |= {result.name: result for result in message.results}
        elif isinstance(message, PoolDone):
            last[message.result.name] = message.result
    return last


def _problems(messages: Sequence[Message]) -> Iterator[str]:
    """Yield what an attack on the other pool must not do to the node and the bystander."""
    last = messages[-1]
    if isinstance(last, Done) and last.error is not None:
        yield f"the whole round failed: {last.error.reason}: {last.error.message}"
    result = _results(messages).get(BYSTANDER)
    if result is None:
        yield "nothing was said of the bystander"
    elif failure := result.error or result.unmet:
        yield f"the bystander: {failure.reason}: {failure.message}"
    pool = _observation(messages).pool(BYSTANDER)
    if pool is None or pool.failure or not pool.published:
        yield f"the bystander is not published: {pool and pool.failure}"
    else:
        for region in pool.regions:
            if region.state not in ("Free", "Leased"):
                yield f"the bystander's {region.name} is {region.state}: {region.message}"


# --- what is shown


def output_problems(operation: Operation, outcome: Outcome) -> Iterator[str]:
    """Yield what is wrong with what was printed."""
    for text in (outcome.out, outcome.err):
        odd = {char for char in text if _is_control(char)}
        if odd:
            yield f"prints control characters {sorted(odd)!a}: {ascii(text)[:300]}"
    if not operation.is_json or outcome.code == CRASHED or outcome.code < 0:
        return
    try:
        document = json.loads(outcome.out, parse_constant=_refuse)
    except ValueError as error:
        yield f"its JSON is none: {error}: {ascii(outcome.out)[:300]}"
        return
    for what in odd_texts(document):
        yield f"in its JSON: {what}"
    if operation.name.startswith("status") and "pools" in document:
        names = {pool["name"] for pool in document["pools"]}
        if BYSTANDER not in names:
            yield "the bystander is not shown"


def odd_texts(document: Any) -> Iterator[str]:
    """Yield each text of a JSON document that holds what does not belong into one."""
    left = [document]
    while left:
        value = left.pop()
        if isinstance(value, dict):
            left += [*value.keys(), *value.values()]
        elif isinstance(value, list | tuple):
            left += value
        elif isinstance(value, str) and any(_is_control(char) for char in value):
            yield f"a text with control characters or surrogates: {ascii(value)[:200]}"


def _is_control(char: str) -> bool:
    return unicodedata.category(char) in ("Cc", "Cs") and char not in _SHOWN_CONTROLS


def _refuse(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")


def pools_yaml(backing: str) -> str:
    """Return both pools as resources."""
    template = (
        "apiVersion: hostprep.dev/v1alpha1\nkind: HostMemoryPool\nmetadata: {{name: {name}}}\n"
        "spec:\n  size: {size}Mi\n  backings: [{backing}]\n  regions: {regions}\n"
        "  access: {{gid: {gid}}}\n"
    )
    size = REGIONS * REGION_MIB
    pools = ((ATTACKED, GID, backing), (BYSTANDER, BYSTANDER_GID, "Base"))
    return "---\n".join(
        template.format(name=name, size=size, backing=kind, regions=REGIONS, gid=gid)
        for name, gid, kind in pools
    )


def attackable(root: str) -> list[str]:
    """Return the folders of the attacked pool that hold files, and the turnstile."""
    paths = PoolPaths(root, ATTACKED)
    return [paths.folder, paths.state, paths.tickets, paths.links, f"{root}/turnstile"]


def targets(root: str) -> list[str]:
    """Return the files of the attacked pool that somebody reads, whether or not they are there."""
    paths = PoolPaths(root, ATTACKED)
    regions = [f"node0-{index}" for index in range(REGIONS)]
    beside = (paths.users_lock, paths.sidecar, paths.clean_mark, paths.bad_mark, paths.board)
    return [
        *(path(region) for path in beside for region in regions),
        *(paths.state_of(region) for region in regions),
        *(f"{paths.mem}/{region}" for region in regions),
        *(paths.claim_lock, paths.ledger, paths.boot_ledger, paths.handoff, paths.tickets),
        *(f"{paths.tickets}/{number}" for number in (1, 2)),
    ]
