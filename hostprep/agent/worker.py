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
from hostprep.apply.reconcile import PoolOutcome, Reconciler, work_of
from hostprep.apply.service import Node
from hostprep.errors import BusyError, HostprepError
from hostprep.kernel.parallel import Stopped
from hostprep.plan.actions import Action, AdoptRegion, Plan, ScrubRegion

__all__ = ["Worker", "main"]

_TELL_EVERY_S = 0.5


@dataclass
class Worker:
    """Answers rounds at once, and does what is to be done in a thread of its own."""

    node: Node
    output: BinaryIO
    _stop: threading.Event = field(default_factory=threading.Event)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _thread: threading.Thread | None = None
    _job: tuple[Round, Reconciler] | None = None
    """What the thread works at; None once it has nothing left to say."""
    _thorough: bool = True
    """Until what earlier workers left was looked after once."""
    _told_s: float = 0.0

    def round(self, request: Round) -> None:
        """Look, say what was found, and begin whatever is to be done."""
        job = self._job
        seen = look(self.node.root, scrubbing=frozenset(job[1].scrubbing) if job else ())
        if job is not None:
            if request.wanted != job[0].wanted:
                self._stop.set()
            self._say(RoundDone(request.number, seen.look, (), busy=True))
            return
        reconciler = self._reconciler(request, seen)
        wanted = reconciler.plan(seen.facts)
        free = [pool.name for pool in wanted.pools if pool.name not in reconciler.held]
        work = {name: work_of(wanted, name) for name in free}
        reconciler.thorough = self._thorough and bool(seen.facts.pools) and bool(free)
        begins = reconciler.thorough or any(work.values())
        outcomes = tuple(_outcomes(request, seen, wanted, work))
        self._say(RoundDone(request.number, seen.look, outcomes, begins))
        if begins:
            self._begin(request, reconciler)

    def finish(self) -> None:
        """Stop after the pieces in flight; nothing is released."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()

    def _begin(self, request: Round, reconciler: Reconciler) -> None:
        self._stop.clear()
        self._job = (request, reconciler)
        self._thread = threading.Thread(target=self._work, args=(reconciler,))
        self._thread.start()

    def _reconciler(self, request: Round, seen: Seen) -> Reconciler:
        keys = {one.spec.name: one.key for one in request.wanted}
        return Reconciler(
            node=self.node,
            specs=[one.spec for one in request.wanted if one.spec.name not in seen.unseen],
            leave_dirty={one.spec.name for one in request.wanted if one.leave_dirty},
            held=frozenset(request.held),
            stop=self._stop,
            tell=self._tell,
            on_pool=lambda outcome: self._pool_done(outcome, keys[outcome.plan.name]),
        )

    def _work(self, reconciler: Reconciler) -> None:
        done = Done()
        try:
            reconciler.run()
            self._thorough = False
        except Stopped:
            done = Done(stopped=True)
        except HostprepError as error:
            done = Done(error=_failure(error))
        except Exception as error:  # one bad job must not end the process that looks
            sys.excepthook(type(error), error, error.__traceback__)
            done = Done(error=Failure("Unexpected", f"{type(error).__name__}: {error}"))
        self._job = None
        self._say(done)

    def _pool_done(self, outcome: PoolOutcome, key: str) -> None:
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
            yield replace(_outcome(PoolOutcome(plan=pools[name]), one.key), pending=pending)


def _outcome(outcome: PoolOutcome, key: str) -> Outcome:
    pool = outcome.plan
    unmet = pool.unmet
    passed_over = [f"passed over {over.backing}: {over.why}" for over in pool.passed_over]
    return Outcome(
        name=pool.name,
        key=key,
        wanted_bytes=pool.wanted_bytes,
        planned_bytes=pool.planned_bytes,
        regions=outcome.regions,
        backing=str(pool.backing or ""),
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
    root = parser.parse_args(arguments).root
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, _end)
    # Whatever else is printed in this process must not mix with the messages.
    output = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    gc.freeze()
    worker = Worker(Node(root), output)
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
