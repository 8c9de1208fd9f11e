"""Which pools have a script on the node, remembered where the node's files cannot be reached.

An agent that runs without hostPID sees neither the scripts nor the unit that an earlier one wrote
with it, and they reserve pages at every boot. The record is written after the scripts, from what
stands on the node: each round that reaches the node puts it right.
"""

from __future__ import annotations

import os
from collections.abc import Collection

from hostprep.errors import HostprepError
from hostprep.linux.files import atomic_write, closing_fd, open_state_file, read_limited

__all__ = ["FILE_NAME", "read_record", "write_record"]

FILE_NAME = "boot-scripts"
"""In the agent's state folder, which outlives the boot: one pool a line."""
_MAX_BYTES = 1 << 20


def read_record(folder: str | None) -> frozenset[str]:
    """Return the pools whose scripts stood on the node when it was last reached; none if unknown.

    `folder` is the agent's state folder, or None where there is none.
    """
    if folder is None:
        return frozenset()
    try:
        with closing_fd(open_state_file(f"{folder}/{FILE_NAME}", os.O_RDONLY)) as fd:
            return frozenset(read_limited(fd, _MAX_BYTES).decode("utf-8", "replace").split())
    except (HostprepError, OSError):
        return frozenset()


def write_record(folder: str | None, pools: Collection[str]) -> None:
    """Write down which pools have a script; nothing where that is known already.

    A disk that is full or read-only is no failure of the boot unit: the next round tries again.
    """
    if folder is None or read_record(folder) == frozenset(pools):
        return
    text = "".join(f"{name}\n" for name in sorted(pools))
    try:
        atomic_write(f"{folder}/{FILE_NAME}", text.encode(), mode=0o600)
    except HostprepError:
        return
