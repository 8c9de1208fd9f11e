"""From pool specs and facts to actions: pure functions, no file opened, no clock read."""

from hostprep.node.plan.planner import plan

__all__ = ["plan"]
