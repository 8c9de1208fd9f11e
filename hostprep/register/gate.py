"""The gate, under its documented name: see `hostprep.cuda.gate`."""

from hostprep.cuda.gate import Gate, Report, Verdict, judge

__all__ = ["Gate", "Report", "Verdict", "judge"]
