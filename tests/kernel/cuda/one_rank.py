"""A rank of an engine, as a process of its own, for the tests of board and gate.

Arguments: board, run, world, rank, and what becomes of it: `ready`, `fail`, `hang` (never ready),
`again` (ready, and so on for ever: it writes all the time). Prints `joined` first; stays until its
standard input is closed.
"""

from __future__ import annotations

import sys

from hostprep.cuda.board import RankBoard
from hostprep.errors import HostprepError


def main(path: str, run: str, world: str, rank: str, fate: str) -> None:
    try:
        board = RankBoard.open(path, generation=run, world=int(world), rank=int(rank))
    except HostprepError as error:
        print(f"refused {error.reason}: {error}", flush=True)
        return
    print("joined", flush=True)
    board.initializing()
    if fate == "ready":
        board.ready()
    elif fate == "fail":
        board.failed("no memory to pin")
    number = 0
    while fate == "again":
        number += 1
        board.progress(number, number)
    sys.stdin.read()


if __name__ == "__main__":
    main(*sys.argv[1:])
