"""Prepare and release: observe, plan, apply, and plan again where a backing ran short."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from hostprep.api.pool_spec import PoolSpec, PoolState
from hostprep.cuda.turnstile_folders import make_turnstiles, remove_turnstiles
from hostprep.errors import BadInputError, BusyError, HostprepError, NotReadyError
from hostprep.linux.files import atomic_write
from hostprep.node.apply.cgroups import host_cgroup, remove_host_cgroup
from hostprep.node.apply.errors import ShortfallError
from hostprep.node.apply.exclusive import exclusive, remove_root
from hostprep.node.apply.hugepages import HugePageControl
from hostprep.node.apply.progress import NoProgress, Progress
from hostprep.node.apply.publish import publish_zipapp, unused_versions
from hostprep.node.apply.regions import mark_damaged
from hostprep.node.apply.rollback import roll_back
from hostprep.node.apply.runner import Runner
from hostprep.node.facts import Facts
from hostprep.node.ledger import Recorder, read_record
from hostprep.node.observe import observe
from hostprep.node.observe.host import HostRoot
from hostprep.node.observe.pools import observe_pools
from hostprep.node.plan import plan
from hostprep.node.plan.actions import Plan, PoolPlan, Shortfall, Unmet
from hostprep.paths import PoolPaths, canonical_root, check_pool_name
from hostprep.zipapp import STABLE_NAME

__all__ = ["Node", "Outcome", "check_met", "unmet_error"]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What was planned last, and what stood in the way of earlier plans."""

    plan: Plan
    shortfalls: tuple[str, ...] = ()


@dataclass
class Node:
    """This machine, and the folder in which its pools live."""

    root: str
    host: HostRoot = field(default_factory=lambda: HostRoot("/"))
    huge_pages: HugePageControl = field(default_factory=HugePageControl)
    write_handoff: Callable[..., None] = atomic_write
    stranded: str = ""
    """Why this process is left in the host-level cgroup, outside of its own one's limits: it should
    end. Empty where it is not."""

    def __post_init__(self) -> None:
        self.root = canonical_root(self.root)

    def facts(self) -> Facts:
        """Observe everything. Raises BadInputError for a root that cannot be."""
        return observe(host=self.host, root=self.root, pools=observe_pools(self.root))

    def plan(self, specs: Sequence[PoolSpec]) -> Plan:
        """Return what prepare would do; changes nothing."""
        return plan(specs, self.facts())

    def prepare(
        self,
        specs: Sequence[PoolSpec],
        *,
        progress: Progress | None = None,
        wait_timeout_s: float = 600.0,
        on_wait: Callable[[str], None] = lambda _: None,
    ) -> Outcome:
        """Make the node hold what the specs say, adopting what is right already.

        Raises BadInputError where that can never be, NotReadyError where it cannot be now (both
        with nothing changed), and whatever a step met; running it again goes on from there.
        """
        check_met(self.plan(specs), specs)
        with exclusive(self.root, wait_timeout_s=wait_timeout_s, on_wait=on_wait):
            outcome = self._apply(specs, progress or NoProgress())
            self.furnish()
        return outcome

    def release(
        self,
        names: Sequence[str],
        *,
        force: bool = False,
        progress: Progress | None = None,
        wait_timeout_s: float = 600.0,
        on_wait: Callable[[str], None] = lambda _: None,
    ) -> Outcome:
        """Give the pools' memory and huge pages back, exactly what was taken.

        Raises BadInputError for what names no pool, NotReadyError for one that is not there,
        BusyError while one is leased (unless `force`): nothing is released then.
        """
        for name in names:
            check_pool_name(name)
        known = {pool.name for pool in observe_pools(self.root)}
        for name in names:
            if name not in known:
                raise NotReadyError(
                    f"there is no pool {name} below {self.root}",
                    reason="NotPrepared",
                    remedy="see `hostprep status`",
                )
        specs = [
            PoolSpec(name=name, state=PoolState.ABSENT, size_bytes=1, force=force) for name in names
        ]
        with exclusive(self.root, wait_timeout_s=wait_timeout_s, on_wait=on_wait):
            outcome = self._apply(specs, progress or NoProgress())
            self.clear_if_empty()
        return outcome

    def furnish(self) -> None:
        """Have what engines find beside the pools; while holding the root."""
        publish_zipapp(self.root)
        with contextlib.suppress(OSError, HostprepError):  # engines register without it too
            make_turnstiles(self.root)

    def clear_if_empty(self) -> None:
        """Remove what is left beside the pools once there is none; while holding the root."""
        if not observe_pools(self.root):
            remove_host_cgroup(self.facts())
            remove_turnstiles(self.root)
            with unused_versions(self.root) as versions:
                remove_root(self.root, (STABLE_NAME, *versions))

    def _apply(self, specs: Sequence[PoolSpec], progress: Progress) -> Outcome:
        shortfalls: list[Shortfall] = []
        self.settle()
        while True:
            facts = self.facts()
            wanted = plan(specs, facts, shortfalls=shortfalls)
            check_met(wanted, specs)
            short = self.carry_out(wanted, facts, specs, progress=progress)
            if short is None:
                return Outcome(wanted, tuple(found.why for found in shortfalls))
            shortfalls.append(short)

    def carry_out(
        self,
        wanted: Plan,
        facts: Facts,
        specs: Sequence[PoolSpec],
        *,
        progress: Progress,
        stop: threading.Event | None = None,
    ) -> Shortfall | None:
        """Carry out a plan; while holding the root, after `settle`.

        Returns what ran short, rolled back: plan again without it. Raises Stopped,
        HostprepError.
        """
        runner = Runner(
            self.root,
            facts,
            specs,
            progress=progress,
            huge_pages=self.huge_pages,
            write_handoff=self.write_handoff,
            stop=stop or threading.Event(),
        )
        populates = wanted.expected_bytes_to_populate > 0
        try:
            with contextlib.ExitStack() as stack:
                if populates:
                    stack.enter_context(host_cgroup(facts, on_stranded=self._strand))
                runner.run(wanted)
        except ShortfallError as error:
            roll_back(PoolPaths(self.root, error.short.pool), error.short, self.huge_pages)
            return error.short
        return None

    def _strand(self, why: str) -> None:
        self.stranded = why

    def settle(self) -> None:
        """Finish the accounts of changes during which earlier runs were killed; note damage."""
        for pool in observe_pools(self.root):
            paths = PoolPaths(self.root, pool.name)
            mark_damaged(paths, pool)
            record = read_record(paths)
            if record is not None and record.pending is not None:
                with contextlib.suppress(FileNotFoundError):
                    self.huge_pages.settle(Recorder(paths, record))


def check_met(wanted: Plan, specs: Sequence[PoolSpec]) -> None:
    """Raise what stands in the way of a plan; nothing is done in part.

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
