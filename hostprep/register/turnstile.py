"""Turns with the driver, under the name that engines import: see `hostprep.cuda.turnstile`."""

from hostprep.cuda.turnstile import PATIENCE_S, Turnstile, patience_for

__all__ = ["PATIENCE_S", "Turnstile", "patience_for"]
