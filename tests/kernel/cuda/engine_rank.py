"""A rank of an engine that offloads, as a process of its own, for the seed's test plan.

Arguments: the scene's folder, run, world, rank, mode. It maps memory, starts registering, says
`serving` with what it knows of its registration, and then `ended` with the outcome. Stays until
its standard input is closed.
"""

from __future__ import annotations

import sys
from pathlib import Path

from hostprep.cuda.board import RankBoard
from hostprep.cuda.turnstile import Turnstile
from hostprep.errors import HostprepError
from hostprep.register import register
from testbed.standin.children import Scene
from tests.kernel.cuda.parts import ONE_MIB


def main(folder: str, run: str, world: str, rank: str, mode: str) -> None:
    scene = Scene(Path(folder))
    scene.context()
    board = RankBoard.open(f"{folder}/board", generation=run, world=int(world), rank=int(rank))
    try:
        registration = register(
            scene.attachment(4),
            mode=mode,
            board=board,
            turnstile=Turnstile(folder),
            policy=ONE_MIB,
        )
    except HostprepError as error:
        print(f"ended {error.reason}", flush=True)
    else:
        print(f"serving {registration.state}", flush=True)
        registration.wait()
        print(f"ended {registration.state}", flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main(*sys.argv[1:])
