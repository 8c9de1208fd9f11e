"""A small process of ours beside an engine that starts: it hands over memory, and ends.

For engines that take memory only after they have started, by their own HTTP interface.
`python3 -m hostprep.engines.helper_process ENGINE ADDRESS [NAME SIZE_BYTES]...`, started by
`hostprep exec --engine ENGINE`. The engine holds the leases, not this process.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import sys
import time
from collections.abc import Sequence

import hostprep
from hostprep.errors import BadInputError, FailedError, HostprepError, NotReadyError
from hostprep.units import format_bytes

TYPE_CHECKING = False
if TYPE_CHECKING:
    from hostprep.engines.lmcache.server import Server
    from hostprep.engines.mooncake.segments import Service

_ENGINE = "HOSTPREP_BESIDE"
"""The variable with the engine's process id: it may have ended before this process begins."""
_PAUSE_S = 0.2
_RESULTS = {
    "lmcache": ("the server's L1", "the server goes on without further regions"),
    "mooncake": ("Mooncake's pool", "the store goes on without this memory"),
}
"""By engine: what the regions become a part of, and what happens where they do not."""


def start_beside(engine: str, arguments: Sequence[str], command: Sequence[str]) -> tuple[str, ...]:
    """Return a command that starts this module for `engine` and becomes `command`.

    `arguments`: the engine's address, then a name and a size in bytes for each region. The engine
    keeps the process id that its parent knows, and it alone gets all signals.
    """
    home = os.path.dirname(os.path.abspath(hostprep.__path__[0]))
    words = [sys.executable, "-m", "hostprep.engines.helper_process", engine, *arguments]
    quoted = " ".join(shlex.quote(word) for word in words)
    script = f'PYTHONPATH={shlex.quote(home)} {_ENGINE}=$$ {quoted} & exec "$@"'
    return ("/bin/sh", "-c", script, "hostprep", *command)


def main(arguments: Sequence[str]) -> int:
    """Give the engine its regions as soon as it answers. Returns the exit code."""
    engine = arguments[0] if arguments else ""
    if engine not in _RESULTS:
        report(f"the first argument is one of {', '.join(_RESULTS)}")
        return BadInputError.exit_code
    joined, fallback = _RESULTS[engine]
    try:
        address, regions = _parse(arguments[1:])
        server = _server_of(engine, address)  # imports what it needs, while the zipapp is locked
        _close_inherited_leases()
        pid = _engine_pid()
        _wait_until_ready(server, pid)
        for name, size_bytes in regions:
            _check_alive(pid)
            server.add(name, size_bytes)
            report(f"{name}, {format_bytes(size_bytes)}, is part of {joined}")
    except HostprepError as error:
        report(f"{error}; {fallback}")
        return error.exit_code
    return 0


def report(line: str) -> None:
    """Write a line for people to standard error."""
    sys.stderr.write(f"hostprep: {line}\n")
    sys.stderr.flush()


def _server_of(engine: str, address: str) -> Server | Service:
    """Return the client for an engine's interface. Raises BadInputError for a bad address."""
    if engine == "mooncake":
        from hostprep.engines.mooncake.segments import Service

        return Service(address)
    from hostprep.engines.lmcache.server import Server

    return Server(address)


def _parse(arguments: Sequence[str]) -> tuple[str, list[tuple[str, int]]]:
    """Return the address, and names and sizes. Raises BadInputError."""
    names, sizes = arguments[1::2], arguments[2::2]
    if len(names) != len(sizes) or not arguments or not all(size.isdecimal() for size in sizes):
        raise BadInputError(
            "an engine's address is needed, and a size in bytes for each region",
            reason="BadCommand",
            remedy="leave this to `hostprep exec --engine`, which starts it",
        )
    return arguments[0], [(name, int(size)) for name, size in zip(names, sizes)]


def _engine_pid() -> int:
    """Return the engine's process id. Raises FailedError where the environment lacks it."""
    pid = os.environ.get(_ENGINE, "")
    if not pid.isdecimal():
        raise FailedError(
            f"{_ENGINE} does not say which process the engine is",
            reason="NoEngine",
            remedy="leave this to `hostprep exec --engine`, which starts it beside the engine",
        )
    return int(pid)


def _close_inherited_leases() -> None:
    """Close what was inherited: the engine holds the leases, and this process must not."""
    # Not os.closerange up to the limit: that may be a thousand million in a container.
    for name in os.listdir("/proc/self/fd"):
        if int(name) > sys.stderr.fileno():
            with contextlib.suppress(OSError):
                os.close(int(name))


def _wait_until_ready(server: Server | Service, engine: int) -> None:
    """Return once the server answers. Raises FailedError where the engine has ended."""
    while True:
        _check_alive(engine)
        try:
            server.check()
        except NotReadyError:
            time.sleep(_PAUSE_S)
        else:
            return


def _check_alive(engine: int) -> None:
    """Raise FailedError once the engine has ended: whatever answers now has no lease."""
    if os.getppid() != engine:
        raise FailedError("the engine ended before it had its memory")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
