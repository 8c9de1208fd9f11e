"""What on this node stands in the way of prepared memory, worst first, with its remedy."""

from __future__ import annotations

from collections.abc import Sequence

from hostprep.api.pool_spec import PoolSpec
from hostprep.node.doctor.finding import Check, Finding, Severity, worst_first
from hostprep.node.doctor.gpus import check_gpus
from hostprep.node.doctor.memory import (
    check_bad_memory,
    check_base_pages,
    check_cma,
    check_fragmentation,
    check_huge_page_sizes,
    check_huge_pages,
    check_movable,
    check_numa,
    check_shmem,
    check_swap,
    check_thp,
)
from hostprep.node.doctor.node import (
    check_cgroup,
    check_kernel,
    check_memlock,
    check_page_tables,
    check_plan,
    check_pools,
    check_privileges,
    check_probes,
    check_root,
)
from hostprep.node.facts import Facts

__all__ = ["CHECKS", "Finding", "Severity", "diagnose"]

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
    findings = list(check_plan(facts, specs)) if specs else []
    for check in CHECKS:
        findings += check(facts)
    return worst_first(findings)
