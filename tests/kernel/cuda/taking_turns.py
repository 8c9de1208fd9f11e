"""A process that takes turns and writes down what happens, for the tests of the turnstile.

Arguments: root, log, how many turns, seconds a turn, width, what to take out of the turnstile, and
the process's engine. The log is appended to by all: `ask`, `begin` and `end` with a process's name,
in order; the name begins with the engine.
"""

from __future__ import annotations

import os
import sys
import time
from types import ModuleType

from hostprep.cuda import turnstile
from hostprep.cuda import turnstile_files as tickets
from hostprep.linux.locks import try_lock


def mutate(mutant: str) -> None:
    """Take one safety step out."""
    if mutant == "no-order":
        replace(turnstile, living_ahead=lambda *_, **__: ())
    elif mutant == "children-keep":
        replace(tickets, track_fd=lambda fd: fd, close_tracked=os.close)
    else:
        assert mutant == "none", mutant


def replace(module: ModuleType, **names: object) -> None:
    """Put other things in the place of a module's."""
    vars(module).update(names)


def main(*arguments: str) -> None:
    root, log, turns, turn_s, width, mutant, engine = arguments
    mutate(mutant)
    name = f"{engine}/{os.getpid()}-{os.stat('/proc/self/ns/pid').st_ino}"
    fd = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
    witness = os.open(f"{log}.witness", os.O_RDWR | os.O_CREAT, 0o666)

    def write(what: str) -> None:
        os.write(fd, f"{what} {name}\n".encode())

    draw = tickets.draw

    def draw_and_tell(folder: int, engine: bytes) -> tickets.QueueTicket:
        ticket = draw(folder, engine)
        write("ask")
        return ticket

    replace(turnstile, draw=draw_and_tell)
    ours = turnstile.Turnstile(
        root,
        width=int(width),
        patience_s=1e9,
        say=lambda text: write(f"say:{text[:60]!r}"),
        engine=engine,
    )
    for _ in range(int(turns)):
        with ours.turn():
            write("begin")
            is_alone = width == "1" and not engine
            own = os.open(f"{log}.witness", os.O_RDWR) if is_alone else os.dup(witness)
            if is_alone and not try_lock(own, exclusive=True):
                write("overlap")
            time.sleep(float(turn_s))
            os.close(own)
            write("end")


if __name__ == "__main__":
    main(*sys.argv[1:])
