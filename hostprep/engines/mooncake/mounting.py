"""Beside a store service that starts: mounts the regions of its lease as soon as it answers.

`python3 -m hostprep.engines.mooncake.mounting PORT [NAME SIZE_BYTES]...`, started by
`hostprep exec --engine mooncake`. The service holds the leases, not this process.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from hostprep.engines.beside import hand_over
from hostprep.engines.mooncake.rest import Service

__all__ = ["main"]


def main(arguments: Sequence[str]) -> int:
    """Run as above. Returns the exit code."""
    port, *regions = arguments
    service = Service(int(port))
    return hand_over(
        service.check,
        service.mount,
        regions,
        into="Mooncake's pool",
        without="the store goes on without this memory",
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
