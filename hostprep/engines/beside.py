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
from hostprep.errors import FailedError, NotReadyError

__all__ = ["beside", "let_go_of_leases", "say", "until_it_answers"]

_PAUSE_S = 0.2


def beside(module: str, arguments: Sequence[str], command: Sequence[str]) -> tuple[str, ...]:
    """Return a command that starts `python3 -m MODULE ARGUMENTS` and becomes `command`.

    The engine has the process id that its parent knows, and all signals reach it alone.
    """
    home = os.path.dirname(os.path.dirname(os.path.abspath(hostprep.__file__)))
    words = [sys.executable, "-m", module, *arguments]
    quoted = " ".join(shlex.quote(word) for word in words)
    script = f'PYTHONPATH={shlex.quote(home)} {quoted} & exec "$@"'
    return ("/bin/sh", "-c", script, "hostprep", *command)


def let_go_of_leases() -> None:
    """Close what was inherited: the engine holds the leases, and this process must not."""
    # Not os.closerange up to the limit: that may be a thousand million in a container.
    for name in os.listdir("/proc/self/fd"):
        if int(name) > sys.stderr.fileno():
            with contextlib.suppress(OSError):
                os.close(int(name))


def until_it_answers(check: Callable[[], None], parent: int) -> None:
    """Return once `check` raises NotReadyError no more.

    Raises FailedError when the engine, whose process id is `parent`, ends before.
    """
    while True:
        try:
            check()
        except NotReadyError as error:
            if os.getppid() != parent:
                raise FailedError("the engine ended before it answered") from error
            time.sleep(_PAUSE_S)
        else:
            return


def say(line: str) -> None:
    """Tell people, on standard error."""
    sys.stderr.write(f"hostprep: {line}\n")
    sys.stderr.flush()
