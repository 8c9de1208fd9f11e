"""What the agent reported last, beside its desired state: `hostprep status` shows it on the node.

Only what a person waits for is kept there: a pool's phase, why, and the regions whose leases are in
the way. The API server has the rest.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from dataclasses import dataclass

from hostprep.api.node_resource import NodeStatus, PoolStatus
from hostprep.errors import HostprepError
from hostprep.linux.files import atomic_write, remove_file

FILE_NAME = "status.json"
_MAX_BYTES = 4 << 20


@dataclass
class LastStatus:
    """Keeps the file up to date. A disk that is full or read-only is no reason to stop."""

    folder: str
    _written: NodeStatus | None = None

    def save(self, status: NodeStatus) -> None:
        """Write what people wait for, if that has changed."""
        brief = _brief(status)
        if brief == self._written:
            return
        data = json.dumps(brief.to_json(), indent=1).encode()
        if _works(lambda: atomic_write(f"{self.folder}/{FILE_NAME}", data, mode=0o600)):
            self._written = brief

    def forget(self) -> None:
        """Remove it: there is no instruction any more that the phases would answer."""
        if _works(lambda: remove_file(f"{self.folder}/{FILE_NAME}")):
            self._written = None


def read_last_status(folder: str, *, boot_id: str) -> NodeStatus | None:
    """Return what an agent reported last in this boot; None without it, or without permission."""
    try:
        with open(f"{folder}/{FILE_NAME}", "rb") as file:
            status = NodeStatus.from_json(json.loads(file.read(_MAX_BYTES)))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
    return status if status.boot_id == boot_id else None


def _brief(status: NodeStatus) -> NodeStatus:
    pools = tuple(
        PoolStatus(
            name=pool.name,
            uid=pool.uid,
            generation=pool.generation,
            phase=pool.phase,
            reason=pool.reason,
            message=pool.message,
            blocked=pool.blocked,
        )
        for pool in status.pools
    )
    return NodeStatus(boot_id=status.boot_id, pools=pools)


def _works(write: Callable[[], object]) -> bool:
    with contextlib.suppress(HostprepError, OSError):
        write()
        return True
    return False
