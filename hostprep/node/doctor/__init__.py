"""What on this node stands in the way of prepared memory, worst first, with its remedy."""

from __future__ import annotations

from hostprep.node.doctor.checks import CHECKS, diagnose
from hostprep.node.doctor.finding import Finding, Severity, worst_first

__all__ = ["CHECKS", "Finding", "Severity", "diagnose", "worst_first"]
