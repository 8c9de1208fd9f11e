"""What the pools hold, and whether the ones asked for can be had."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from hostprep.api.pool_spec import PoolSpec
from hostprep.backing import GIB
from hostprep.node.doctor.finding import NOTHING_TO_DO, Finding, Severity, all_well
from hostprep.node.facts import Facts, PoolFacts
from hostprep.node.plan import plan
from hostprep.node.plan.actions import PoolPlan
from hostprep.node.plan.estimate import held_page_table_bytes
from hostprep.units import format_bytes

__all__ = ["check_page_tables", "check_plan", "check_pools"]

_COSTLY_PAGE_TABLES_BYTES = GIB


def check_pools(facts: Facts) -> Iterator[Finding]:
    """Compare what lies below the root folder with what the handoffs promise."""
    problems = [finding for pool in facts.pools for finding in _of_pool(facts, pool)]
    yield from problems
    if not problems:
        yield all_well("pools", f"pools held: {len(facts.pools)}, none of another boot")


def _of_pool(facts: Facts, pool: PoolFacts) -> Iterator[Finding]:
    again = f"hostprep prepare --name {pool.name}"
    if pool.boot_id not in (None, facts.kernel.boot_id):
        what = f"the handoff of {pool.name} is of another boot: its memory is gone"
        yield Finding(Severity.WARNING, "pools", what, f"{again} ... withdraws and renews it")
        return
    for region in pool.regions:
        if region.finished and region.damage is not None:
            what = f"{pool.name}/{region.name} is damaged: it {region.damage}"
            yield Finding(Severity.ERROR, "pools", what, f"{again} ... rebuilds it once released")
    if pool.regions and not pool.published:
        what = f"{pool.name} holds memory, and no valid handoff says so"
        yield Finding(Severity.WARNING, "pools", what, f"{again} ... completes it")


def check_page_tables(facts: Facts) -> Iterator[Finding]:
    """Reckon what every process pays that maps a pool of base pages: 8 bytes a page."""
    for pool in facts.pools:
        size = held_page_table_bytes(pool.regions, facts.memory.page_bytes)
        if size:
            yield _page_tables(facts, pool.name, size)


def _page_tables(facts: Facts, name: str, per_process_bytes: int) -> Finding:
    ranks = max(1, len(facts.gpus))
    what = (
        f"{name} is in base pages: each engine process pays {format_bytes(per_process_bytes)} "
        f"of page tables out of its own limit ({format_bytes(per_process_bytes * ranks)} with "
        f"{ranks} ranks)"
    )
    costly = per_process_bytes * ranks >= _COSTLY_PAGE_TABLES_BYTES
    remedy = "ask for HugeTLB2Mi first, or raise the engines' memory limits by that much"
    return Finding(Severity.WARNING if costly else Severity.INFO, "page-tables", what, remedy)


def check_plan(facts: Facts, specs: Sequence[PoolSpec]) -> Iterator[Finding]:
    """Whether the pools could be had here and now. Raises BadInputError for two of one name."""
    for pool in plan(specs, facts).pools:
        yield from _of_plan(facts, pool)


def _of_plan(facts: Facts, pool: PoolPlan) -> Iterator[Finding]:
    name = pool.name
    if pool.unmet is not None:
        what = f"{name} cannot be had: {pool.unmet.why}"
        yield Finding(Severity.ERROR, "plan", what, pool.unmet.remedy)
    for passed in pool.passed_over:
        what = f"{name}: {passed.backing} is passed over: {passed.why}"
        yield Finding(Severity.WARNING, "plan", what, passed.remedy)
    for note in pool.notes:
        yield Finding(Severity.INFO, "plan", f"{name}: {note}", NOTHING_TO_DO)
    if pool.blocked:
        what = f"{name}: {', '.join(pool.blocked)} should change and is leased"
        yield Finding(Severity.WARNING, "plan", what, "end its users: hostprep status")
    if pool.page_table_bytes_per_process:
        yield _page_tables(facts, name, pool.page_table_bytes_per_process)
    if pool.unmet is None and pool.backings:
        size = format_bytes(pool.planned_bytes)
        yield all_well("plan", f"{name}: {size} can be had in {pool.backing_words}")
