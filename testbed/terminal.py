"""A person's terminal on the console of a virtual machine."""

from __future__ import annotations

import os
import select
import shutil
import socket
import sys
import termios
import tty
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hostprep.errors import NotReadyError

__all__ = ["LEAVE", "open_console", "split_at_leave"]

LEAVE = b"\x1d"
"""Ctrl-], which leaves, as with telnet; everything else, Ctrl-C too, is for the guest."""
_CHUNK_BYTES = 1 << 14


def open_console(path: Path) -> None:
    """Connect the terminal to the shell behind a socket until Ctrl-] or the machine's end.

    What is piped in is typed as it is, and its end leaves. Raises NotReadyError where nobody
    listens.
    """
    with socket.socket(socket.AF_UNIX) as console:
        try:
            console.connect(str(path))
        except (FileNotFoundError, ConnectionRefusedError) as error:
            raise NotReadyError(
                "there is no virtual node to enter", remedy="start one with make cluster NODE=1"
            ) from error
        with _raw_terminal() as interactive:
            if interactive:
                size = shutil.get_terminal_size()
                # The console has no way to tell its size; a space keeps it out of the history.
                text = f" stty rows {size.lines} columns {size.columns}; clear\r"
                console.sendall(text.encode())
            _connect(console)


def split_at_leave(data: bytes) -> tuple[bytes, bool]:
    """What was typed before Ctrl-], and whether that came."""
    before, found, _ = data.partition(LEAVE)
    return before, bool(found)


def _connect(console: socket.socket) -> None:
    keys, screen = sys.stdin.fileno(), sys.stdout.fileno()
    while True:
        ready = select.select([keys, console], [], [])[0]
        if console in ready:
            shown = console.recv(_CHUNK_BYTES)
            if not shown:
                return
            os.write(screen, shown)
        if keys in ready:
            typed, leave = split_at_leave(os.read(keys, _CHUNK_BYTES) or LEAVE)
            console.sendall(typed)
            if leave:
                return


@contextmanager
def _raw_terminal() -> Iterator[bool]:
    """Every key goes through at once, as typed; yields whether there is a terminal at all."""
    if not sys.stdin.isatty():
        yield False
        return
    fd = sys.stdin.fileno()
    before = termios.tcgetattr(fd)
    try:
        tty.setraw(fd)
        yield True
    finally:
        termios.tcsetattr(fd, termios.TCSADRAIN, before)
        print(flush=True)
