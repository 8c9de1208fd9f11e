"""All checks, in the order in which their findings are told."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from hostprep.api.pool_spec import PoolSpec
from hostprep.node.doctor.finding import Check, Finding, worst_first
from hostprep.node.doctor.gpus import check_gpus
from hostprep.node.doctor.kernel import (
    check_base_pages,
    check_huge_page_sizes,
    check_kernel,
    check_shmem,
    check_swap,
    check_thp,
)
from hostprep.node.doctor.memory import (
    check_bad_memory,
    check_cma,
    check_fragmentation,
    check_huge_pages,
    check_movable,
    check_numa,
)
from hostprep.node.doctor.pools import check_page_tables, check_plan, check_pools
from hostprep.node.doctor.process import (
    check_cgroup,
    check_memlock,
    check_privileges,
    check_probes,
    check_root,
)
from hostprep.node.facts import Facts

__all__ = ["CHECKS", "diagnose"]

CHECKS: tuple[Check, ...] = (
    check_kernel,
    check_privileges,
    check_root,
    check_pools,
    check_cgroup,
    check_fragmentation,
    check_huge_page_sizes,
    check_huge_pages,
    check_movable,
    check_cma,
    check_numa,
    check_bad_memory,
    check_gpus,
    check_swap,
    check_thp,
    check_shmem,
    check_memlock,
    check_base_pages,
    check_page_tables,
    check_probes,
)


def diagnose(facts: Facts, specs: Sequence[PoolSpec] = ()) -> tuple[Finding, ...]:
    """Return what every check finds, and whether the pools could be had, worst first.

    Pure: opens no file. Raises BadInputError when two specs have one name.
    """
    return worst_first(_all(facts, specs))


def _all(facts: Facts, specs: Sequence[PoolSpec]) -> Iterator[Finding]:
    if specs:
        yield from check_plan(facts, specs)
    for check in CHECKS:
        yield from check(facts)
