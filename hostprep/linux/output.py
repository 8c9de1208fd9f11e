"""Standard streams that are closed, full or read by nobody: an exit code and a line each."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import sys
from collections.abc import Callable

_CLOSED_PIPE_CODE = 141
"""What a shell shows for a program that SIGPIPE ended (128 + 13)."""

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


def with_output(run: Callable[[], int]) -> int:
    """Run a command line, and write what it printed. Returns its exit code.

    Where standard output cannot be written, one line on standard error says so, exit code 1; 141
    and no line where it is a pipe that nobody reads any more (`| head`); 2 where it is closed.
    """
    _open_missing()
    stdout = sys.stdout
    if stdout is None:
        # Its number would be the next file's that is opened: a region, say, that we print into.
        sys.stderr.write("hostprep: standard output is closed; redirect it, as by >/dev/null\n")
        return 2
    is_process_output = stdout is sys.__stdout__
    if not is_process_output:
        return run()
    output = _Output(1, "w", closefd=False)
    sys.stdout = io.TextIOWrapper(
        io.BufferedWriter(output),
        encoding=stdout.encoding,
        errors=stdout.errors,
        line_buffering=stdout.isatty(),
    )
    try:
        code = run()
    except SystemExit as ended:
        if not isinstance(ended.code, int):
            raise
        code = ended.code
    except OSError:
        if output.error is None:
            raise
    with contextlib.suppress(OSError):
        sys.stdout.flush()
    if output.error is None:
        return code
    # What is left in the buffer would fail again when the interpreter ends.
    os.dup2(os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC), 1)
    if output.error.errno == errno.EPIPE:
        return _CLOSED_PIPE_CODE
    sys.stderr.write(f"hostprep: cannot write standard output: {output.error.strerror}\n")
    return 1


class _Output(io.FileIO):
    """Remembers what failed: a library may make an exit code of it, or drop the data."""

    error: OSError | None = None

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except OSError as error:
            self.error = error
            raise


def _open_missing() -> None:
    """Give /dev/null to standard input and error where they are closed."""
    for fd in (0, 2):
        try:
            os.fstat(fd)
        except OSError:
            null = os.open(os.devnull, os.O_RDWR)
            if null != fd:  # a lower one is closed, too
                os.dup2(null, fd)
                os.close(null)
    if sys.stderr is None:
        sys.stderr = open(2, "w", closefd=False)  # noqa: SIM115 - for as long as we run
