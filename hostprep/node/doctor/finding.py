"""A finding of the doctor, with its remedy."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

NOTHING_TO_DO = "nothing to do"


class Severity(StrEnum):
    """How much a finding stands in the way, worst first."""

    ERROR = "error"
    """Memory cannot be prepared, or not as asked for."""
    WARNING = "warning"
    """It can, but slower, in fewer ways, or at others' cost."""
    INFO = "info"
    """Worth knowing."""
    OK = "ok"
    """Checked and fine."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing about this node. `check` is the stable name of the check that found it."""

    severity: Severity
    check: str
    what: str
    remedy: str
    """A command or a setting where there is one."""

    def __str__(self) -> str:
        head = f"{self.severity:<7}  {self.check}: {self.what}"
        return head if self.remedy == NOTHING_TO_DO else f"{head}\n         -> {self.remedy}"


_ORDER = tuple(Severity)


def all_well(check: str, what: str) -> Finding:
    """Return the finding of a check that found nothing wrong."""
    return Finding(Severity.OK, check, what, NOTHING_TO_DO)


def worst_first(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """Sort by severity; within one, the order of the checks stands."""
    return tuple(sorted(findings, key=lambda finding: _ORDER.index(finding.severity)))
