"""Ranks as processes of their own, and what a board says of them."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import hostprep
from hostprep.cuda.board import RankBoard
from tests.support.processes import wait_until

CHECKOUT = Path(hostprep.__file__).parents[1]
RANK = Path(__file__).with_name("one_rank.py")
HANG_S = 30.0


@contextlib.contextmanager
def a_rank(
    path: str, run: str, world: int, rank: int, fate: str = "hang", *, before: tuple[str, ...] = ()
) -> Iterator[subprocess.Popen[str]]:
    """Start a rank and wait until it has joined; killed afterwards."""
    process = subprocess.Popen(
        [*before, sys.executable, str(RANK), path, run, str(world), str(rank), fate],
        env={**os.environ, "PYTHONPATH": str(CHECKOUT)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == "joined\n"
        yield process
    finally:
        process.kill()
        process.wait()
        process.stdin.close()
        process.stdout.close()


def states(path: str) -> dict[int, tuple[str, bool]]:
    return {rank.rank: (rank.slot.state, rank.alive) for rank in RankBoard.look(path).ranks}


def leave_a_ready_run(path: str) -> None:
    """Leave what a run of two ranks leaves that were ready, and have ended."""
    with a_rank(path, "old", 2, 0, "ready"), a_rank(path, "old", 2, 1, "ready"):
        wait_until(
            lambda: all(state == "Ready" for state, _ in states(path).values()), timeout_s=HANG_S
        )
