"""What on this node stands in the way of prepared memory, worst first, with its remedy."""

from hostprep.node.doctor.diagnosis import CHECKS, diagnose
from hostprep.node.doctor.finding import Finding, Severity

__all__ = ["CHECKS", "Finding", "Severity", "diagnose"]
