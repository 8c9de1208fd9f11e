"""The pace of registering, under the name that engines import: see `hostprep.cuda.pace`."""

from hostprep.cuda.pace import DUTY_CYCLE, LEAST_DUTY_CYCLE, Pace

__all__ = ["DUTY_CYCLE", "LEAST_DUTY_CYCLE", "Pace"]
