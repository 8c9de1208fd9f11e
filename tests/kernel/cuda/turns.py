"""Real processes that take turns, and what the tests look at."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import hostprep
from hostprep.cuda.turnstile import Turnstile
from hostprep.paths import TURNSTILE
from tests.support.processes import wait_until

CHECKOUT = Path(hostprep.__file__).parents[1]
WORKER = Path(__file__).with_name("taking_turns.py")
HANG_S = 30.0


class Turns:
    """What the workers wrote down."""

    def __init__(self, log: Path) -> None:
        self.events = [
            tuple(line.split(" ", 1)) for line in log.read_text().splitlines() if " " in line
        ]

    def count(self, what: str) -> int:
        return sum(event == what for event, _ in self.events)

    def most_at_once(self) -> int:
        at_work = most = 0
        for event, _ in self.events:
            at_work += {"begin": 1, "end": -1}.get(event, 0)
            most = max(most, at_work)
        return most

    def most_engines_at_once(self) -> int:
        at_work: dict[str, int] = {}
        most = 0
        for event, name in self.events:
            engine = name.partition("/")[0]
            at_work[engine] = at_work.get(engine, 0) + {"begin": 1, "end": -1}.get(event, 0)
            most = max(most, sum(count > 0 for count in at_work.values()))
        return most

    def longest_wait(self) -> int:
        """Return how many turns of others anybody saw begin between asking and his own."""
        waiting: dict[str, int] = {}
        longest = 0
        for event, name in self.events:
            if event == "ask":
                waiting[name] = 0
            elif event == "begin":
                longest = max(longest, waiting.pop(name))
                waiting = {other: seen + 1 for other, seen in waiting.items()}
        return longest


@contextlib.contextmanager
def workers(
    number: int, root: Path, *, turns: int, turn_s: float, width: int = 1, mutant: str = "none",
    engines: int = 0, before: tuple[str, ...] = (),
) -> Iterator[list[subprocess.Popen[bytes]]]:  # fmt: skip
    started = [
        subprocess.Popen(
            [*before, sys.executable, str(WORKER), str(root), str(root / "log"), str(turns),
             str(turn_s), str(width), mutant, f"engine-{rank % engines}" if engines else ""],
            env={**os.environ, "PYTHONPATH": str(CHECKOUT)},
        )
        for rank in range(number)
    ]  # fmt: skip
    try:
        yield started
    finally:
        for process in started:
            process.kill()
            process.wait()


def run_all(number: int, root: Path, **how: object) -> Turns:
    with workers(number, root, **how) as started:  # type: ignore[arg-type]
        for process in started:
            assert process.wait(HANG_S * 2) == 0
    return Turns(root / "log")


def a_turn(root: Path, *, timeout_s: float = HANG_S, **how: object) -> Turnstile:
    """Take one turn, or fail: nothing but a lock that is let go may end the wait."""
    turnstile = Turnstile(str(root), patience_s=1e9, **how)  # type: ignore[arg-type]
    with turnstile.turn(timeout_s):
        pass
    return turnstile


def entries(root: Path) -> set[str]:
    return set(os.listdir(root / TURNSTILE / "node"))


def wait_for(root: Path, what: str, number: int = 1) -> None:
    wait_until(
        lambda: (root / "log").exists() and Turns(root / "log").count(what) >= number,
        timeout_s=HANG_S,
    )
