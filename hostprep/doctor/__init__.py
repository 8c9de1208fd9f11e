"""What on this node stands in the way of prepared memory, worst first, with its remedy."""

from hostprep.doctor.diagnosis import CHECKS, diagnose
from hostprep.doctor.finding import Finding, Severity

__all__ = ["CHECKS", "Finding", "Severity", "diagnose"]
