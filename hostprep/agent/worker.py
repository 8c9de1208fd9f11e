"""The worker: a process of its own that observes, plans and applies, driven by JSON lines.

`python -m hostprep.agent.worker --root /run/hostprep` reads requests from standard input and
answers on standard output; docs/agent.md has the protocol. It needs the standard library only,
holds no state that matters, and may be killed at any time: the next one adopts what it left.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import FrameType
from typing import BinaryIO

from hostprep.agent.messages import (
    Done,
    Failure,
    Message,
    PoolDone,
    PoolResult,
    Progress,
    ReconcileRequest,
    ReconcileResult,
    decode,
    encode,
)
from hostprep.agent.scrub_pace import PAUSES, ScrubPace
from hostprep.agent.verification import Verification, mark_bad_regions, verify_node
from hostprep.api.pool_spec import PoolState
from hostprep.client.claim import claim_lock_briefly, has_waiters
from hostprep.errors import BusyError, HostprepError
from hostprep.linux import selinux
from hostprep.linux.threads import Stopped
from hostprep.node.apply.service import (
    AppliedPool,
    Node,
    Reconciler,
    kept_limits,
    pending_actions,
)
from hostprep.node.boot import BootUnit, sync_boot_unit
from hostprep.node.plan.actions import Action, AdoptRegion, Plan, ScrubRegion
from hostprep.paths import PoolPaths

_PROGRESS_EVERY_S = 0.5


@dataclass
class Worker:
    """Answers requests at once, and applies the plan in a thread of its own."""

    node: Node
    output: BinaryIO
    host: str | None = None
    """The node's root folder, where it is not the one that `boot.install` finds."""
    state: str | None = None
    """The agent's state folder; None remembers nothing of the boot scripts."""
    _stop: threading.Event = field(default_factory=threading.Event)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _thread: threading.Thread | None = None
    _job: tuple[ReconcileRequest, Reconciler] | None = None
    """What the thread works at; None once its last message but `Done` is sent."""
    _thorough: bool = True
    """Until what earlier workers left was taken care of once."""
    _progress_s: float = 0.0
    """When progress was last reported."""
    _pace: ScrubPace = field(default_factory=ScrubPace)
    _walked_bytes: int = 0
    """HardwareCorrupted as of the last walk over all pages: of more, some may be ours."""

    def reconcile(self, request: ReconcileRequest) -> None:
        """Verify the node, answer, and begin whatever is to be done."""
        job = self._job
        selinux.share_tree(self.node.root)  # what engines made since
        found = verify_node(
            self.node.root,
            scrubbing=frozenset(job[1].scrubbing) if job else (),
            limits=kept_limits([pool.spec for pool in request.pools]),
        )
        boot = self._sync_boot_unit(request)
        if job is not None:
            if request.pools != job[0].pools:
                self._stop.set()
            self._send(ReconcileResult(request.number, found.observation, (), busy=True, boot=boot))
            return
        resting = self._resting(request)
        reconciler = self._reconciler(request, found, resting)
        plan = reconciler.plan(found.facts)
        free = [pool.name for pool in plan.pools if pool.name not in reconciler.held]
        work = {name: pending_actions(plan, name) for name in free}
        reconciler.thorough = self._thorough and bool(found.facts.pools) and bool(free)
        begins = reconciler.thorough or any(work.values()) or self._must_walk(found)
        results = tuple(_results(request, found, plan, work, resting))
        self._send(ReconcileResult(request.number, found.observation, results, begins, boot))
        if begins:
            self._begin(request, reconciler, found)

    def _begin(
        self, request: ReconcileRequest, reconciler: Reconciler, found: Verification
    ) -> None:
        """Do the work in a thread; where none can be had, say so: the agent asks again later."""
        self._stop.clear()
        self._job = (request, reconciler)
        thread = threading.Thread(target=self._work, args=(reconciler, found))
        try:
            thread.start()
        except (RuntimeError, MemoryError) as error:  # pids.max of the Pod or of the node
            self._job = None
            self._send(
                Done(
                    error=Failure(
                        "NoThread",
                        f"no thread can be started on this node: {error}; end processes there, or"
                        " raise kubelet's podPidsLimit or kernel.threads-max",
                    )
                )
            )
        else:
            self._thread = thread

    def finish(self) -> None:
        """Stop after the pieces in flight; nothing is released."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()

    def _sync_boot_unit(self, request: ReconcileRequest) -> BootUnit:
        at_boot = [pool.spec for pool in request.pools if pool.at_boot]
        others = [pool.spec.name for pool in request.pools if not pool.at_boot]
        return sync_boot_unit(
            at_boot, others, root=self.node.root, host=self.host, state=self.state
        )

    def _reconciler(
        self, request: ReconcileRequest, found: Verification, resting: set[str]
    ) -> Reconciler:
        keys = {pool.spec.name: pool.key for pool in request.pools}
        return Reconciler(
            node=self.node,
            specs=[p.spec for p in request.pools if p.spec.name not in found.failed_pools],
            leave_dirty={
                pool.spec.name
                for pool in request.pools
                # A waiting pod cannot scrub by itself: it is done here.
                if pool.leave_dirty and not _has_waiters(PoolPaths(self.node.root, pool.spec.name))
            },
            resting=resting,
            held=frozenset(request.held) | _damaged(request, found, resting),
            stop=self._stop,
            on_progress=self._report_progress,
            on_pool=lambda applied: self._pool_done(applied, keys[applied.plan.name]),
        )

    def _resting(self, request: ReconcileRequest) -> set[str]:
        now_s = time.monotonic()
        names = (pool.spec.name for pool in request.pools)
        return {name for name in names if self._pace.rests(name, now_s=now_s)}

    # --- in the thread

    def _work(self, reconciler: Reconciler, found: Verification) -> None:
        done = Done()
        try:
            failure = self._walk(found) if self._must_walk(found) else None
            reconciler.run()
            self._thorough = False
            done = Done(error=failure)
        except Stopped:
            done = Done(stopped=True)
        except HostprepError as error:
            done = Done(error=_failure(error))
        except Exception as error:  # one bad job must not end the process that observes
            sys.excepthook(type(error), error, error.__traceback__)
            done = Done(error=Failure("Unexpected", f"{type(error).__name__}: {error}"))
        self._job = None
        self._send(done)
        if self.node.cgroup_return_failed:
            self._terminate(self.node.cgroup_return_failed)

    def _must_walk(self, found: Verification) -> bool:
        """Whether the kernel found more bad memory: only a walk shows if a region has some."""
        return bool(found.facts.pools) and found.facts.memory.corrupted_bytes != self._walked_bytes

    def _walk(self, found: Verification) -> Failure | None:
        """Mark bad regions. What could not be read or marked is walked again next time."""
        failures = mark_bad_regions(self.node.root, stop=self._stop)
        if not failures:
            self._walked_bytes = found.facts.memory.corrupted_bytes
            return None
        return Failure("NotMarked", "; ".join(f"{pool}: {why}" for pool, why in failures))

    def _pool_done(self, applied: AppliedPool, key: str) -> None:
        self._pace.count(applied.plan.name, applied.upkeep_s, now_s=time.monotonic())
        observation = verify_node(self.node.root).observation
        populated = tuple((str(backing), size) for backing, size in applied.populated)
        self._send(PoolDone(_result(applied, key), observation, populated))

    def _report_progress(self, pool: str, done_bytes: int, total_bytes: int) -> None:
        now_s = time.monotonic()
        if now_s - self._progress_s >= _PROGRESS_EVERY_S:
            self._progress_s = now_s
            self._send(Progress(pool, done_bytes, total_bytes))

    def _terminate(self, why: str) -> None:
        """End this process, as SIGTERM would: the agent starts another one in its own cgroup."""
        sys.stderr.write(f"worker {os.getpid()} ends: {why}\n")
        main = threading.main_thread().ident
        assert main is not None  # noqa: S101 - it runs
        signal.pthread_kill(main, signal.SIGTERM)

    def _send(self, message: Message) -> None:
        with self._lock, contextlib.suppress(BrokenPipeError):
            self.output.write(encode(message))
            self.output.flush()


def _damaged(request: ReconcileRequest, found: Verification, resting: set[str]) -> set[str]:
    """Return resting pools with a damaged region: making it again costs as much as a scrub."""
    present = {p.spec.name for p in request.pools if p.spec.state is PoolState.PRESENT}
    return {
        pool.name
        for pool in found.facts.pools
        if pool.name in present & resting and any(region.damage for region in pool.regions)
    }


def _has_waiters(paths: PoolPaths) -> bool:
    try:
        with claim_lock_briefly(paths):
            return has_waiters(paths)
    except HostprepError:
        return False  # there is no such pool yet, or its lock is held


def _results(
    request: ReconcileRequest,
    found: Verification,
    plan: Plan,
    work: Mapping[str, Sequence[Action]],
    resting: Collection[str],
) -> Iterator[PoolResult]:
    """Yield where each pool stands before any work; nothing new of those that are held."""
    plans = {pool.name: pool for pool in plan.pools}
    for desired in request.pools:
        name = desired.spec.name
        pool = found.observation.pool(name)
        if pool is not None and pool.failure:
            failure = Failure("CannotLook", f"pool {name} {pool.failure}")
            yield PoolResult(name=name, key=desired.key, error=failure)
        elif name in work:
            quiet = AdoptRegion | ScrubRegion
            pending = any(not isinstance(action, quiet) for action in work[name])
            result = _result(AppliedPool(plan=plans[name]), desired.key)
            notes = (*result.notes, PAUSES) if name in resting else result.notes
            yield replace(result, pending=pending, notes=notes)


def _result(applied: AppliedPool, key: str) -> PoolResult:
    pool = applied.plan
    unmet = pool.unmet
    passed_over = [f"passed over {over.backing}: {over.why}" for over in pool.passed_over]
    return PoolResult(
        name=pool.name,
        key=key,
        wanted_bytes=pool.wanted_bytes,
        planned_bytes=pool.planned_bytes,
        regions=applied.regions,
        backing=pool.backing_words,
        unmet=Failure(unmet.reason, f"{unmet.why}; {unmet.remedy}") if unmet else None,
        error=_failure(applied.error) if applied.error else None,
        blocked=pool.blocked,
        notes=(*passed_over, *pool.notes),
        steps=applied.steps,
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
    signal.signal(signal.SIGTERM, _exit)
    # Whatever else is printed in this process must not mix with the messages.
    output = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    worker = Worker(Node(options.root), output, options.host, options.state_dir)
    try:
        for line in sys.stdin.buffer:
            request = decode(line)
            if isinstance(request, ReconcileRequest):
                worker.reconcile(request)
    finally:
        worker.finish()
    return 0


def _exit(_signal: int, _frame: FrameType | None) -> None:
    raise SystemExit(0)


if __name__ == "__main__":
    sys.exit(main())
