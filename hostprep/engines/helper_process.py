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
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import hostprep
from hostprep.errors import BadInputError, FailedError, HostprepError, NotReadyError
from hostprep.units import format_bytes

_ENGINE = "HOSTPREP_BESIDE"
"""The variable with the engine's process id: it may have ended before this process begins."""
_PAUSE_S = 0.2


@dataclass(frozen=True)
class _Interface:
    """How an engine takes memory while it runs."""

    connect: Callable[[str], tuple[Callable[[], None], Callable[[str, int], object]]]
    """Makes two functions of an address, or raises BadInputError.

    One raises NotReadyError until the engine answers, the other adds a name and a size in bytes.
    """
    joined: str
    """What the regions become a part of."""
    fallback: str
    """What happens where they do not."""


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
    interface = _INTERFACES.get(arguments[0]) if arguments else None
    if interface is None:
        report(f"the first argument is one of {', '.join(_INTERFACES)}")
        return BadInputError.exit_code
    try:
        address, regions = _parse(arguments[1:])
        check, add = interface.connect(address)  # imports what it needs, while the zipapp is locked
        _close_inherited_leases()
        engine = _engine_pid()
        _wait_until_ready(check, engine)
        for name, size_bytes in regions:
            _check_alive(engine)
            add(name, size_bytes)
            report(f"{name}, {format_bytes(size_bytes)}, is part of {interface.joined}")
    except HostprepError as error:
        report(f"{error}; {interface.fallback}")
        return error.exit_code
    return 0


def report(line: str) -> None:
    """Write a line for people to standard error."""
    sys.stderr.write(f"hostprep: {line}\n")
    sys.stderr.flush()


def _connect_lmcache(url: str) -> tuple[Callable[[], None], Callable[[str, int], object]]:
    from hostprep.engines.lmcache.server import Server

    server = Server(url)
    return server.check, server.add


def _connect_mooncake(port: str) -> tuple[Callable[[], None], Callable[[str, int], object]]:
    from hostprep.engines.mooncake.rest import Service

    if not (port.isdecimal() and 0 < int(port) < 1 << 16):
        raise BadInputError(
            f"{port!r} is no port of a Mooncake store's service",
            reason="BadPort",
            remedy="give the number of its --port",
        )
    service = Service(int(port))
    return service.check, service.mount


_INTERFACES = {
    "lmcache": _Interface(
        _connect_lmcache, "the server's L1", "the server goes on without further regions"
    ),
    "mooncake": _Interface(
        _connect_mooncake, "Mooncake's pool", "the store goes on without this memory"
    ),
}


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


def _wait_until_ready(check: Callable[[], None], engine: int) -> None:
    """Return once `check` no longer raises NotReadyError. Raises FailedError for a dead engine."""
    while True:
        _check_alive(engine)
        try:
            check()
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
