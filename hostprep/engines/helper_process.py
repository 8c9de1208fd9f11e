"""Becoming an engine beside a small process of ours, which does its work and ends.

For engines that take memory only after they have started, by their own HTTP interface.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import sys
import time
from collections.abc import Callable, Sequence

import hostprep
from hostprep.errors import BadInputError, FailedError, HostprepError, NotReadyError
from hostprep.units import format_bytes

__all__ = ["beside", "hand_over", "say"]

_ENGINE = "HOSTPREP_BESIDE"
"""The variable that says which process is the engine: it may have ended before ours begins."""
_PAUSE_S = 0.2


def beside(module: str, arguments: Sequence[str], command: Sequence[str]) -> tuple[str, ...]:
    """Return a command that starts `python3 -m MODULE ARGUMENTS` and becomes `command`.

    The engine has the process id that its parent knows, and all signals reach it alone.
    """
    home = os.path.dirname(os.path.abspath(hostprep.__path__[0]))
    words = [sys.executable, "-m", module, *arguments]
    quoted = " ".join(shlex.quote(word) for word in words)
    script = f'PYTHONPATH={shlex.quote(home)} {_ENGINE}=$$ {quoted} & exec "$@"'
    return ("/bin/sh", "-c", script, "hostprep", *command)


def hand_over(
    reach: Callable[[str], tuple[Callable[[], None], Callable[[str, int], object]]],
    arguments: Sequence[str],
    *,
    into: str,
    without: str,
) -> int:
    """Give the engine its regions as soon as it answers: what a process that `beside` starts does.

    `arguments`: the engine's address, then names and sizes in turn. `reach` makes two functions of
    the address, or raises BadInputError: one raises NotReadyError until the engine answers, the
    other takes a name and a size in bytes. `into` and `without` say what the regions became a part
    of, or that the engine goes on without. Returns the exit code.
    """
    _let_go_of_leases()
    try:
        address, regions = _read(arguments)
        check, give = reach(address)
        engine = _engine()
        _until_it_answers(check, engine)
        for name, size_bytes in regions:
            _check_alive(engine)
            give(name, size_bytes)
            say(f"{name}, {format_bytes(size_bytes)}, is part of {into}")
    except HostprepError as error:
        say(f"{error}; {without}")
        return error.exit_code
    return 0


def say(line: str) -> None:
    """Tell people, on standard error."""
    sys.stderr.write(f"hostprep: {line}\n")
    sys.stderr.flush()


def _read(arguments: Sequence[str]) -> tuple[str, list[tuple[str, int]]]:
    """Return the address, and names and sizes. Raises BadInputError."""
    names, sizes = arguments[1::2], arguments[2::2]
    if len(names) != len(sizes) or not arguments or not all(size.isdecimal() for size in sizes):
        raise BadInputError(
            "an engine's address is needed, and a size in bytes for each region",
            reason="BadCommand",
            remedy="leave this to `hostprep exec --engine`, which starts it",
        )
    return arguments[0], [(name, int(size)) for name, size in zip(names, sizes)]


def _engine() -> int:
    """Return the engine's process id. Raises FailedError where nobody says it."""
    told = os.environ.get(_ENGINE, "")
    if not told.isdecimal():
        raise FailedError(
            f"{_ENGINE} does not say which process the engine is",
            reason="NoEngine",
            remedy="leave this to `hostprep exec --engine`, which starts it beside the engine",
        )
    return int(told)


def _let_go_of_leases() -> None:
    """Close what was inherited: the engine holds the leases, and this process must not."""
    # Not os.closerange up to the limit: that may be a thousand million in a container.
    for name in os.listdir("/proc/self/fd"):
        if int(name) > sys.stderr.fileno():
            with contextlib.suppress(OSError):
                os.close(int(name))


def _until_it_answers(check: Callable[[], None], engine: int) -> None:
    """Return once `check` raises NotReadyError no more. Raises FailedError for a dead engine."""
    while True:
        _check_alive(engine)
        try:
            check()
        except NotReadyError:
            time.sleep(_PAUSE_S)
        else:
            return


def _check_alive(engine: int) -> None:
    """Raise FailedError once the engine has ended: who answers then has no lease."""
    if os.getppid() != engine:
        raise FailedError("the engine ended before it had its memory")
