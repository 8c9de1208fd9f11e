"""Beside a store service that starts: mounts the regions of its lease as soon as it answers.

`python3 -m hostprep.engines.mooncake.mounting PORT [NAME SIZE_BYTES]...`, started by
`hostprep exec --engine mooncake`. The service holds the leases, not this process.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from hostprep.engines.beside import let_go_of_leases, say, until_it_answers
from hostprep.engines.mooncake.rest import Service
from hostprep.errors import HostprepError
from hostprep.units import format_bytes

__all__ = ["main"]


def main(arguments: Sequence[str]) -> int:
    """Run as above. Returns the exit code."""
    parent = os.getppid()
    let_go_of_leases()
    port, *rest = arguments
    try:
        service = Service(int(port))
        until_it_answers(service.check, parent)
        for name, size in zip(rest[::2], rest[1::2]):
            service.mount(name, int(size))
            say(f"{name}, {format_bytes(int(size))}, is part of Mooncake's pool")
    except HostprepError as error:
        say(f"{error}; the store goes on without this memory")
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
