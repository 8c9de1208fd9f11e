"""Limits of the process (setrlimit(2)) that the work would run into half way.

`su` and `sudo` hand them on from whoever called: a file that grows beyond RLIMIT_FSIZE fails with
EFBIG, for root too, and under RLIMIT_AS any allocation may fail, a thread's stack as well.
"""

from __future__ import annotations

import resource
from collections.abc import Sequence

from hostprep.errors import BadInputError
from hostprep.node.plan.actions import Action, CreateRegion, ScrubRegion
from hostprep.units import format_bytes

_SMALL_FILES_BYTES = 16 << 20
"""More than the largest file beside the regions: handoff, ledger, zipapp."""
_OWN_BYTES = 1 << 30
"""Address space for the interpreter, and for its threads with their stacks."""


def check_limits(actions: Sequence[Action]) -> None:
    """Raise BadInputError where a limit of this process does not leave room for the actions."""
    created = [action for action in actions if isinstance(action, CreateRegion)]
    scrubbed = [action.expected_bytes for action in actions if isinstance(action, ScrubRegion)]
    largest: dict[object, int] = {}
    for action in created:  # one at a time on each node, all nodes at once
        largest[action.placement] = max(largest.get(action.placement, 0), action.size_bytes)
    file_bytes = max((_SMALL_FILES_BYTES, *largest.values()))
    _check(resource.RLIMIT_FSIZE, file_bytes, "RLIMIT_FSIZE, files", "-f")
    if created or scrubbed:
        mapped_bytes = max(sum(largest.values()), *scrubbed, 0)
        _check(resource.RLIMIT_AS, mapped_bytes + _OWN_BYTES, "RLIMIT_AS, address space", "-v")


def _check(limit: int, needed_bytes: int, name: str, option: str) -> None:
    soft_bytes, _ = resource.getrlimit(limit)
    if soft_bytes == resource.RLIM_INFINITY or soft_bytes >= needed_bytes:
        return
    raise BadInputError(
        f"this process is limited to {format_bytes(soft_bytes)} ({name}),"
        f" {format_bytes(needed_bytes)} are needed",
        reason="Limited",
        remedy=f"run `ulimit {option} unlimited` in this shell first",
    )
