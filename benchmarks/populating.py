"""How long our own prepare takes to populate, seen from its progress."""

from __future__ import annotations

import time

from benchmarks.machine import release_all
from hostprep.api.pool_spec import PoolSpec
from hostprep.node.apply.runner import ProgressReporter
from hostprep.node.apply.service import Node
from hostprep.node.plan.actions import Action, CreateRegion


class _Populating(ProgressReporter):
    """Wall time of the regions' creation: from the first one's begin to the last one's end.

    That is more than rivals do: the file is checked, given its access and marked clean as well.
    """

    def __init__(self) -> None:
        self.begin_s: float | None = None
        self.end_s = 0.0

    def begin(self, action: Action) -> None:
        if isinstance(action, CreateRegion) and self.begin_s is None:
            self.begin_s = time.perf_counter()

    def advance(self, action: Action, size_bytes: int) -> None:
        pass

    def end(self, action: Action, *, took_s: float) -> None:  # noqa: ARG002 - a Progress
        if isinstance(action, CreateRegion):
            self.end_s = time.perf_counter()


def populate_s(node: Node, spec: PoolSpec) -> float:
    """Prepare the pool, release it, and return the seconds that populating took."""
    progress = _Populating()
    try:
        node.prepare([spec], progress=progress)
    finally:
        release_all(node)
    return progress.end_s - (progress.begin_s or 0.0)


def thread_count(node: Node, spec: PoolSpec) -> int:
    """Return the threads that our plan uses for a region, for rivals to have as many."""
    return max(a.threads for a in node.plan([spec]).actions if isinstance(a, CreateRegion))
