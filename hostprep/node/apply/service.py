"""Prepare, release and reconcile: observe, plan, apply; plan again where a backing ran short."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace

from hostprep.api.pool_spec import PoolSpec, PoolState
from hostprep.backing import Backing
from hostprep.cuda.turnstile_files import make_turnstiles, remove_turnstiles
from hostprep.errors import BadInputError, BusyError, HostprepError, NotReadyError
from hostprep.linux import selinux
from hostprep.linux.threads import Stopped
from hostprep.node.apply.cgroups import host_cgroup, remove_host_cgroup
from hostprep.node.apply.exclusive import exclusive
from hostprep.node.apply.folder import (
    mount_shared_folder,
    remove_put_aside,
    unmount_shared_folder,
)
from hostprep.node.apply.held import check_no_readers, clear_held
from hostprep.node.apply.hugepages import replay_ledger
from hostprep.node.apply.limits import check_limits
from hostprep.node.apply.publish import publish_zipapp, unused_versions
from hostprep.node.apply.regions import mark_damaged
from hostprep.node.apply.root import grow_root, remove_root
from hostprep.node.apply.runner import (
    OnProgress,
    ProgressReporter,
    ProgressTracker,
    Runner,
    roll_back,
)
from hostprep.node.facts import Facts
from hostprep.node.ledger import LedgerWriter, read_ledger
from hostprep.node.observe import observe
from hostprep.node.observe.host import HostRoot
from hostprep.node.observe.pools import missing_pool, observe_pools, pool_error, pool_names
from hostprep.node.plan import plan
from hostprep.node.plan.actions import (
    Action,
    AdoptRegion,
    CreateRegion,
    Plan,
    PoolPlan,
    ScrubRegion,
    Shortfall,
    ShortfallError,
    Unmet,
)
from hostprep.paths import TURNSTILE, PoolPaths, canonical_root, check_pool_name
from hostprep.zipapp import STABLE_NAME


@dataclass(frozen=True, slots=True)
class ApplyResult:
    """The plan that was carried out, and why earlier ones of the same run were given up."""

    plan: Plan
    shortfalls: tuple[str, ...] = ()


@dataclass
class Node:
    """This machine, and the root folder of its pools."""

    root: str
    cgroup_return_failed: str = ""
    """Why this process could not leave the host-level cgroup again: it runs outside of its own
    cgroup's limits, and should end. Empty where it did."""

    def __post_init__(self) -> None:
        self.root = canonical_root(self.root)

    def facts(self, specs: Sequence[PoolSpec] = ()) -> Facts:
        """Observe everything. Raises BadInputError for a root that cannot be.

        With `specs`, which are to be carried out, their limits are noted beside what is kept.
        """
        pools = observe_pools(self.root, limits=kept_limits(specs))
        return observe(host=HostRoot(), root=self.root, pools=pools)

    def plan(self, specs: Sequence[PoolSpec]) -> Plan:
        """Return what prepare would do; changes nothing."""
        return plan(specs, self.facts())

    def prepare(
        self,
        specs: Sequence[PoolSpec],
        *,
        progress: ProgressReporter | None = None,
        wait_timeout_s: float = 600.0,
        on_wait: Callable[[str], None] = lambda _: None,
    ) -> ApplyResult:
        """Make the node hold what the specs say, adopting what is right already.

        Raises BadInputError where that can never be, NotReadyError where it cannot be now (both
        with nothing changed), and whatever a step met; running it again goes on from there.
        """
        wanted = self.plan(specs)
        check_met(wanted, specs)
        check_limits(wanted.actions)
        with exclusive(self.root, wait_timeout_s=wait_timeout_s, on_wait=on_wait):
            result = self._apply(specs, progress or ProgressReporter())
            self.publish_shared_files()
        return result

    def release(
        self,
        names: Sequence[str],
        *,
        force: bool = False,
        progress: ProgressReporter | None = None,
        wait_timeout_s: float = 600.0,
        on_wait: Callable[[str], None] = lambda _: None,
    ) -> ApplyResult:
        """Give the pools' memory and huge pages back, exactly what was taken.

        Raises BadInputError for what names no pool, NotReadyError for one that is not there,
        BusyError while one is leased (unless `force`): nothing is released then.
        """
        check_limits(())
        for name in names:
            check_pool_name(name)
        known = pool_names(self.root)
        for name in names:
            if name not in known:
                raise missing_pool(
                    self.root, name, remedy="see `hostprep status`", closed_remedy="run it as root"
                )
        specs = [
            PoolSpec(name=name, state=PoolState.ABSENT, size_bytes=1, force=force) for name in names
        ]
        with exclusive(self.root, wait_timeout_s=wait_timeout_s, on_wait=on_wait):
            result = self._apply(specs, progress or ProgressReporter())
        self.clear_if_empty(wait_timeout_s=wait_timeout_s)
        return result

    def publish_shared_files(self) -> None:
        """Publish the files beside the pools that engines share. Call it while holding the root."""
        publish_zipapp(self.root)
        turnstile = f"{self.root}/{TURNSTILE}"
        with contextlib.suppress(OSError, HostprepError):  # without the right, a plain folder
            mount_shared_folder(turnstile)
        with contextlib.suppress(OSError, HostprepError):  # engines register without them too
            make_turnstiles(self.root)
        selinux.share_tree(self.root)

    def clear_if_empty(self, *, wait_timeout_s: float) -> None:
        """Remove what killed runs put aside, and the shared files once there is no pool.

        Call it without holding the root: a root with something put aside is not removed. Who is at
        work below it when the time is over does the same at its end.
        """
        remove_put_aside(self.root)
        if not os.path.lexists(self.root) or pool_names(self.root):
            return
        with (
            contextlib.suppress(BusyError),
            exclusive(self.root, wait_timeout_s=wait_timeout_s, on_wait=lambda _: None),
        ):
            if pool_names(self.root):
                return
            remove_host_cgroup(self.facts())
            with contextlib.suppress(OSError, HostprepError):
                unmount_shared_folder(f"{self.root}/{TURNSTILE}")
            remove_turnstiles(self.root)
            with unused_versions(self.root) as versions:
                remove_root(self.root, (STABLE_NAME, *versions))

    def _apply(self, specs: Sequence[PoolSpec], progress: ProgressReporter) -> ApplyResult:
        shortfalls: list[Shortfall] = []
        failures = self.replay_ledgers()
        for spec in specs:
            if spec.name in failures:
                raise failures[spec.name]
        while True:
            facts = self.facts(specs)
            wanted = plan(specs, facts, shortfalls=shortfalls)
            check_met(wanted, specs)
            short = self.carry_out(wanted, facts, specs, progress=progress)
            if short is None:
                return ApplyResult(wanted, tuple(found.why for found in shortfalls))
            shortfalls.append(short)

    def carry_out(
        self,
        wanted: Plan,
        facts: Facts,
        specs: Sequence[PoolSpec],
        *,
        progress: ProgressReporter,
        stop: threading.Event | None = None,
    ) -> Shortfall | None:
        """Carry out a plan. Call it while holding the root, after `replay_ledgers`.

        Returns the backing that ran short, rolled back: plan again without it. Raises Stopped,
        HostprepError.
        """
        check_limits(wanted.actions)
        check_no_readers(self.root, wanted.actions)
        grow_root(self.root, regions=_count_regions(wanted, facts))
        runner = Runner(self.root, facts, specs, progress, stop or threading.Event())

        def note_return_failed(why: str) -> None:
            self.cgroup_return_failed = why

        try:
            with contextlib.ExitStack() as stack:
                if wanted.expected_bytes_to_populate > 0:
                    stack.enter_context(host_cgroup(facts, on_return_failed=note_return_failed))
                runner.run(wanted)
        except ShortfallError as error:
            roll_back(PoolPaths(self.root, error.short.pool), error.short)
            return _with_surplus(error.short, facts)
        return None

    def replay_ledgers(self) -> dict[str, HostprepError]:
        """Account for changes during which earlier runs were killed; mark damaged regions.

        Returns the errors of pools where that failed: nothing else is to be done to them.
        """
        failures: dict[str, HostprepError] = {}
        for pool in observe_pools(self.root):
            paths = PoolPaths(self.root, pool.name)
            try:
                mark_damaged(paths, pool)
                clear_held(paths)
                ledger = read_ledger(paths)
                if ledger is not None:
                    with contextlib.suppress(FileNotFoundError):
                        replay_ledger(LedgerWriter(paths, ledger))
            except Exception as error:  # it is that pool's
                failures[pool.name] = pool_error(pool.name, error)
        return failures


def kept_limits(specs: Iterable[PoolSpec]) -> dict[str, float | None]:
    """Return for how many seconds each pool that is to be present keeps contents."""
    return {spec.name: spec.max_kept_s for spec in specs if spec.state is PoolState.PRESENT}


def _with_surplus(short: Shortfall, facts: Facts) -> Shortfall:
    """Return a shortfall whose reason names surplus pages, if the node had some before."""
    surplus = sum(
        pool.surplus
        for node in facts.nodes
        for pool in node.huge_pages
        if pool.page_bytes == short.backing.page_bytes and short.node_id in (None, node.node_id)
    )
    if not surplus or not short.backing.is_hugetlb:
        return short
    why = (
        f"{short.why}; others use {surplus} surplus pages there (nr_overcommit_hugepages), and"
        " pages that are added make up for those first"
    )
    return replace(short, why=why)


def _count_regions(wanted: Plan, facts: Facts) -> int:
    added = sum(isinstance(action, CreateRegion) for action in wanted.actions)
    return added + sum(len(pool.regions) for pool in facts.pools)


def check_met(wanted: Plan, specs: Sequence[PoolSpec]) -> None:
    """Raise why a plan cannot be carried out as a whole; nothing is done in part.

    BadInputError where it can never be met, BusyError where leases are in the way of a release,
    NotReadyError where the node cannot give that much now.
    """
    absent = {spec.name for spec in specs if spec.state is PoolState.ABSENT}
    for pool in wanted.pools:
        if pool.unmet is not None:
            raise unmet_error(pool, pool.unmet)
        if pool.blocked and pool.name in absent:
            raise BusyError(
                f"pool {pool.name} is leased: {', '.join(pool.blocked)}",
                reason="Leased",
                remedy="end its users (see `hostprep status`), or give --force",
            )


def unmet_error(pool: PoolPlan, unmet: Unmet) -> HostprepError:
    """Return why the pool cannot be had: BadInputError where never, else NotReadyError."""
    kind = BadInputError if unmet.never else NotReadyError
    return kind(f"pool {pool.name}: {unmet.why}", reason=unmet.reason, remedy=unmet.remedy)


@dataclass(frozen=True, slots=True, kw_only=True)
class AppliedPool:
    """The result for one pool: its plan, and the error that ended it, if any."""

    plan: PoolPlan
    error: HostprepError | None = None
    steps: tuple[tuple[str, float], ...] = ()
    """Seconds by kind of step; empty where nothing was changed."""
    regions: tuple[str, ...] = ()
    """Names that the plan kept or made; known where something was changed."""
    populated: tuple[tuple[Backing, int], ...] = ()
    """Bytes made resident, by backing; those of a failed attempt too."""
    upkeep_s: float = 0.0
    """Seconds that scrubs took, and making damaged regions again; those that failed too."""


def pending_actions(wanted: Plan, pool: str) -> tuple[Action, ...]:
    """Return a plan's actions for a pool; none where it only adopts."""
    actions = tuple(action for action in wanted.actions if action.pool == pool)
    return () if all(isinstance(action, AdoptRegion) for action in actions) else actions


@dataclass(kw_only=True)
class Reconciler:
    """Brings many pools to what their specs ask for, one by one, with a new plan for each.

    All specs are planned together, since they share memory by priority; a pool that cannot be met
    or fails does not hold up the others. Absent pools are released, unless leased.
    """

    node: Node
    specs: Sequence[PoolSpec]
    leave_dirty: Collection[str] = ()
    """Pools whose regions the next claim scrubs: here only those that were kept too long."""
    resting: Collection[str] = ()
    """Pools of which no region is scrubbed for now."""
    held: Collection[str] = ()
    """Pools that take part in the plan and are not changed."""
    stop: threading.Event = field(default_factory=threading.Event)
    on_progress: OnProgress = lambda _pool, _done, _total: None
    on_pool: Callable[[AppliedPool], None] = lambda _: None
    wait_timeout_s: float = 2.0
    thorough: bool = False
    """Also clear away what killed runs left in pools that need no other change."""
    scrubbing: set[tuple[str, str]] = field(default_factory=set)
    """(pool, region) being zeroed at this moment, and locked for that by this process."""
    _shortfalls: list[Shortfall] = field(default_factory=list)

    def plan(self, facts: Facts) -> Plan:
        """Return the plan for all pools, less scrubbing what shall stay dirty."""
        wanted = plan(self.specs, facts, shortfalls=self._shortfalls)
        return replace(
            wanted,
            actions=tuple(
                action
                for action in wanted.actions
                if not (isinstance(action, ScrubRegion) and self._leaves_dirty(action))
            ),
        )

    def _leaves_dirty(self, action: ScrubRegion) -> bool:
        if action.pool in self.resting:
            return True
        return action.pool in self.leave_dirty and not action.why

    def run(self) -> None:
        """Bring every pool that is not held to its spec, and report each one's result.

        Raises BusyError while another hostprep is at work below the root, Stopped, and
        HostprepError for what concerns all pools.
        """
        with exclusive(self.node.root, wait_timeout_s=self.wait_timeout_s, on_wait=lambda _: None):
            failures = self.node.replay_ledgers()
            if any(spec.state is PoolState.PRESENT for spec in self.specs):
                # Before the pools: engines of the first one do not wait for the last one.
                self.node.publish_shared_files()
            left = [spec.name for spec in self.specs if spec.name not in self.held]
            while left:
                wanted = self.plan(self.node.facts())
                name = next(pool.name for pool in wanted.pools if pool.name in left)
                left.remove(name)
                if name in failures:
                    pool = next(pool for pool in wanted.pools if pool.name == name)
                    self.on_pool(AppliedPool(plan=pool, error=failures[name]))
                else:
                    self.on_pool(self._reconcile_pool(name))
        self.node.clear_if_empty(wait_timeout_s=self.wait_timeout_s)

    def _reconcile_pool(self, name: str) -> AppliedPool:
        """Carry out one pool's part, planning again where a backing turns out short."""
        tracker = ProgressTracker(name, self.on_progress, self.scrubbing)
        rebuilds = False
        while True:
            facts = self.node.facts()
            before = facts.pool(name)
            rebuilds = rebuilds or bool(before and any(r.damage for r in before.regions))
            wanted = self.plan(facts)
            pool = next(pool for pool in wanted.pools if pool.name == name)
            actions = pending_actions(wanted, name)
            if not actions and self.thorough:
                actions = tuple(action for action in wanted.actions if action.pool == name)
            if not actions:
                return AppliedPool(
                    plan=pool, error=self._short_error(pool), populated=tracker.populated
                )
            tracker.expect(actions)
            part = Plan(actions=actions, pools=(pool,))
            try:
                short = self.node.carry_out(
                    part, facts, self.specs, progress=tracker, stop=self.stop
                )
            except Stopped:
                raise
            except Exception as error:  # whatever it is, it is that pool's
                failed = pool_error(name, error)
                return AppliedPool(
                    plan=pool,
                    error=failed,
                    populated=tracker.populated,
                    upkeep_s=tracker.upkeep_s(rebuilds=rebuilds),
                )
            if short is None:
                held = {a.region for a in actions if isinstance(a, AdoptRegion | CreateRegion)}
                return AppliedPool(
                    plan=pool,
                    steps=tracker.steps,
                    regions=tuple(sorted(held)),
                    populated=tracker.populated,
                    upkeep_s=tracker.upkeep_s(rebuilds=rebuilds),
                )
            self._shortfalls.append(short)

    def _short_error(self, pool: PoolPlan) -> HostprepError | None:
        """Return the failure of a pool that was tried and ran short of everything it may have.

        Only trying shows it: the next plan takes the same pages for free again.
        """
        was_tried = any(short.pool == pool.name for short in self._shortfalls)
        return unmet_error(pool, pool.unmet) if was_tried and pool.unmet else None
