"""The worker: a process of its own that observes, plans and applies, told by JSON lines.

`python -m hostprep.agent.worker --root /run/hostprep` reads requests from standard input and
answers on standard output; docs/agent.md has the protocol. It needs the standard library only,
holds nothing that matters, and may be killed at any time: the next one adopts what it left.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import FrameType
from typing import BinaryIO

from hostprep.agent.bad_pages import mark_bad_regions
from hostprep.agent.looking import Seen, look
from hostprep.agent.messages import (
    Done,
    Failure,
    Message,
    Outcome,
    PoolDone,
    Progress,
    Round,
    RoundDone,
    decode,
    encode,
)
from hostprep.client.claim import claim_lock
from hostprep.client.tickets import has_waiters
from hostprep.errors import BusyError, HostprepError
from hostprep.linux.threads import Stopped
from hostprep.node.apply.service import Node, PoolResult, Reconciler, pending_actions
from hostprep.node.boot import BootUnit, sync_boot_unit
from hostprep.node.plan.actions import Action, AdoptRegion, Plan, ScrubRegion
from hostprep.paths import PoolPaths

__all__ = ["Worker", "main"]

_TELL_EVERY_S = 0.5


@dataclass
class Worker:
    """Answers rounds at once, and does what is to be done in a thread of its own."""

    node: Node
    output: BinaryIO
    host: str | None = None
    """The node's root folder, where it is not the one that `boot.install` finds."""
    state: str | None = None
    """The agent's state folder; None remembers nothing of the boot scripts."""
    _stop: threading.Event = field(default_factory=threading.Event)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _thread: threading.Thread | None = None
    _job: tuple[Round, Reconciler] | None = None
    """What the thread works at; None once it has nothing left to say."""
    _thorough: bool = True
    """Until what earlier workers left was looked after once."""
    _told_s: float = 0.0
    _walked_bytes: int = 0
    """HardwareCorrupted as of the last walk over all pages: of more, some may be ours."""

    def round(self, request: Round) -> None:
        """Look, say what was found, and begin whatever is to be done."""
        job = self._job
        seen = look(self.node.root, scrubbing=frozenset(job[1].scrubbing) if job else ())
        boot = self._keep_boot_unit(request)
        if job is not None:
            if request.wanted != job[0].wanted:
                self._stop.set()
            self._say(RoundDone(request.number, seen.look, (), busy=True, boot=boot))
            return
        reconciler = self._reconciler(request, seen)
        wanted = reconciler.plan(seen.facts)
        free = [pool.name for pool in wanted.pools if pool.name not in reconciler.held]
        work = {name: pending_actions(wanted, name) for name in free}
        reconciler.thorough = self._thorough and bool(seen.facts.pools) and bool(free)
        begins = reconciler.thorough or any(work.values()) or self._must_walk(seen)
        outcomes = tuple(_outcomes(request, seen, wanted, work))
        self._say(RoundDone(request.number, seen.look, outcomes, begins, boot))
        if begins:
            self._begin(request, reconciler, seen)

    def finish(self) -> None:
        """Stop after the pieces in flight; nothing is released."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()

    def _begin(self, request: Round, reconciler: Reconciler, seen: Seen) -> None:
        self._stop.clear()
        self._job = (request, reconciler)
        self._thread = threading.Thread(target=self._work, args=(reconciler, seen))
        self._thread.start()

    def _must_walk(self, seen: Seen) -> bool:
        """Whether the kernel found more bad memory: only a walk tells whether it is in a region."""
        return bool(seen.facts.pools) and self._corrupted(seen) != self._walked_bytes

    def _corrupted(self, seen: Seen) -> int:
        return seen.facts.memory.corrupted_bytes

    def _keep_boot_unit(self, request: Round) -> BootUnit:
        wanted = [one.spec for one in request.wanted if one.at_boot]
        others = [one.spec.name for one in request.wanted if not one.at_boot]
        return sync_boot_unit(wanted, others, root=self.node.root, host=self.host, state=self.state)

    def _reconciler(self, request: Round, seen: Seen) -> Reconciler:
        keys = {one.spec.name: one.key for one in request.wanted}
        return Reconciler(
            node=self.node,
            specs=[one.spec for one in request.wanted if one.spec.name not in seen.unseen],
            leave_dirty={
                one.spec.name
                for one in request.wanted
                # A pod cannot scrub by itself: it waits, and then it is done here.
                if one.leave_dirty and not _is_waited_for(PoolPaths(self.node.root, one.spec.name))
            },
            held=frozenset(request.held),
            stop=self._stop,
            on_progress=self._tell,
            on_pool=lambda outcome: self._pool_done(outcome, keys[outcome.plan.name]),
        )

    def _work(self, reconciler: Reconciler, seen: Seen) -> None:
        done = Done()
        try:
            failure = self._walk(seen) if self._must_walk(seen) else None
            reconciler.run()
            self._thorough = False
            done = Done(error=failure)
        except Stopped:
            done = Done(stopped=True)
        except HostprepError as error:
            done = Done(error=_failure(error))
        except Exception as error:  # one bad job must not end the process that looks
            sys.excepthook(type(error), error, error.__traceback__)
            done = Done(error=Failure("Unexpected", f"{type(error).__name__}: {error}"))
        self._job = None
        self._say(done)
        if self.node.cgroup_return_failed:
            self._give_way(self.node.cgroup_return_failed)

    def _give_way(self, why: str) -> None:
        """End this process, as SIGTERM would: the agent starts another one in its own cgroup."""
        sys.stderr.write(f"worker {os.getpid()} ends: {why}\n")
        main = threading.main_thread().ident
        assert main is not None  # noqa: S101 - it runs
        signal.pthread_kill(main, signal.SIGTERM)

    def _walk(self, seen: Seen) -> Failure | None:
        """Mark what went bad. What could not be looked at or marked is walked again next time."""
        failures = mark_bad_regions(self.node.root, stop=self._stop)
        if not failures:
            self._walked_bytes = self._corrupted(seen)
            return None
        return Failure("NotMarked", "; ".join(f"{pool}: {why}" for pool, why in failures))

    def _pool_done(self, outcome: PoolResult, key: str) -> None:
        seen = look(self.node.root)
        populated = tuple((str(backing), size) for backing, size in outcome.populated)
        self._say(PoolDone(_outcome(outcome, key), seen.look, populated))

    def _tell(self, pool: str, done_bytes: int, total_bytes: int) -> None:
        now_s = time.monotonic()
        if now_s - self._told_s >= _TELL_EVERY_S:
            self._told_s = now_s
            self._say(Progress(pool, done_bytes, total_bytes))

    def _say(self, message: Message) -> None:
        with self._lock, contextlib.suppress(BrokenPipeError):
            self.output.write(encode(message))
            self.output.flush()


def _is_waited_for(paths: PoolPaths) -> bool:
    try:
        with claim_lock(paths):
            return has_waiters(paths)
    except HostprepError:
        return False  # there is no such pool yet


def _outcomes(
    request: Round, seen: Seen, wanted: Plan, work: Mapping[str, Sequence[Action]]
) -> Iterator[Outcome]:
    """Yield where each pool stands before any work; nothing new of those that are held."""
    pools = {pool.name: pool for pool in wanted.pools}
    for one in request.wanted:
        name = one.spec.name
        unseen = seen.look.pool(name)
        if unseen is not None and unseen.failure:
            failure = Failure("CannotLook", f"pool {name} {unseen.failure}")
            yield Outcome(name=name, key=one.key, error=failure)
        elif name in work:
            quiet = AdoptRegion | ScrubRegion
            pending = any(not isinstance(action, quiet) for action in work[name])
            yield replace(_outcome(PoolResult(plan=pools[name]), one.key), pending=pending)


def _outcome(outcome: PoolResult, key: str) -> Outcome:
    pool = outcome.plan
    unmet = pool.unmet
    passed_over = [f"passed over {over.backing}: {over.why}" for over in pool.passed_over]
    return Outcome(
        name=pool.name,
        key=key,
        wanted_bytes=pool.wanted_bytes,
        planned_bytes=pool.planned_bytes,
        regions=outcome.regions,
        backing=pool.backing_words,
        unmet=Failure(unmet.reason, f"{unmet.why}; {unmet.remedy}") if unmet else None,
        error=_failure(outcome.error) if outcome.error else None,
        blocked=pool.blocked,
        notes=(*passed_over, *pool.notes),
        steps=outcome.steps,
    )


def _failure(error: HostprepError) -> Failure:
    return Failure(error.reason, str(error), waits=isinstance(error, BusyError))


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve requests until standard input ends or SIGTERM comes. Returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m hostprep.agent.worker")
    parser.add_argument("--root", required=True)
    parser.add_argument("--state-dir", help="the agent's state folder")
    parser.add_argument("--host", help="the node's root folder, instead of looking for it")
    options = parser.parse_args(arguments)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, _end)
    # Whatever else is printed in this process must not mix with the messages.
    output = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    gc.freeze()
    worker = Worker(Node(options.root), output, options.host, options.state_dir)
    try:
        for line in sys.stdin.buffer:
            request = decode(line)
            if isinstance(request, Round):
                worker.round(request)
    finally:
        worker.finish()
    return 0


def _end(_signal: int, _frame: FrameType | None) -> None:
    raise SystemExit(0)


if __name__ == "__main__":
    sys.exit(main())
