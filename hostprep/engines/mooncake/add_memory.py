"""Beside a store service that starts: mounts the regions of its lease as soon as it answers.

`python3 -m hostprep.engines.mooncake.add_memory PORT [NAME SIZE_BYTES]...`, started by
`hostprep exec --engine mooncake`. The service holds the leases, not this process.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

from hostprep.engines.helper_process import hand_over
from hostprep.engines.mooncake.rest import Service
from hostprep.errors import BadInputError

__all__ = ["main"]


def main(arguments: Sequence[str]) -> int:
    """Run as above. Returns the exit code."""
    return hand_over(
        _reach,
        arguments,
        into="Mooncake's pool",
        without="the store goes on without this memory",
    )


def _reach(port: str) -> tuple[Callable[[], None], Callable[[str, int], object]]:
    if not (port.isdecimal() and 0 < int(port) < 1 << 16):
        raise BadInputError(
            f"{port!r} is no port of a Mooncake store's service",
            reason="BadPort",
            remedy="give the number of its --port",
        )
    service = Service(int(port))
    return service.check, service.mount


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
