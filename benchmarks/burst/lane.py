"""One engine from the start of its process until its host tier is in use, and what it served."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.burst.load import Load, Tally, get
from benchmarks.burst.scene import Lane
from benchmarks.machine import BenchmarkError
from hostprep.cuda.board import RankBoard
from hostprep.errors import HostprepError

_PAUSE_S = 0.2
_STORED = "vllm:kv_offload_store_bytes_total"
_END_S = 60.0


class Watched:
    """What is seen of one engine; moments are seconds from the start of its process."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.healthy_s: float | None = None
        self.host_tier_s: float | None = None
        self.steps: list[dict[str, Any]] = []
        self._registers_from_s: float | None = None

    def look(self, lane: Lane, now_s: float) -> None:
        """Ask the server and the board once."""
        self._look_at_boards(lane.boards(), now_s)
        with contextlib.suppress(OSError):
            if self.healthy_s is None:
                get(lane.port, "/health")
                self.healthy_s = now_s
            elif self.host_tier_s is None and stored_bytes(get(lane.port, "/metrics")) > 0:
                self.host_tier_s = now_s

    def _look_at_boards(self, boards: Sequence[Path], now_s: float) -> None:
        for path in boards:
            try:
                states = {rank.slot.state for rank in RankBoard.look(str(path)).ranks}
            except HostprepError:
                continue  # no rank has come yet
            if self._registers_from_s is None and "Initializing" in states:
                self._registers_from_s = now_s
            if self._registers_from_s is not None and states == {"Ready"} and not self.steps:
                step = {"name": "register", "begin_s": self._registers_from_s, "end_s": now_s}
                self.steps.append(step)
            if "Failed" in states:
                raise BenchmarkError(f"{self.name}: a rank could not register")


def watch(
    lane: Lane, log: Path, *, hold: Callable[[float], None], limit_s: float
) -> dict[str, Any]:
    """Run the engine until its host tier is in use, and until `hold` returns; return what was seen.

    `hold` is told the moment, and keeps it serving. Raises BenchmarkError where it ends by itself,
    or does not come so far within `limit_s`.
    """
    seen, load = Watched(lane.name), Load(lane.port)
    load_average = os.getloadavg()[0]
    begin_s = time.monotonic()
    with log.open("wb") as output:
        process = subprocess.Popen(
            lane.command, stdout=output, stderr=output, env=lane.environment, start_new_session=True
        )
        load.start()
        try:
            _until_in_use(process, seen, lane, log, begin_s=begin_s, limit_s=limit_s)
            hold(time.monotonic() - begin_s)
            load.stop()
            end_s = time.monotonic() - begin_s
        finally:
            _end(process)
    return _told(lane, seen, load.tally, begin_s) | {
        "end_s": end_s,
        "load_average_before": round(load_average, 1),
        "load_average_after": round(os.getloadavg()[0], 1),
    }


def _told(lane: Lane, seen: Watched, tally: Tally, begin_s: float) -> dict[str, Any]:
    if lane.steps.exists():
        for line in lane.steps.read_text("ascii").splitlines():
            step = json.loads(line)
            step |= {key: step[key] - begin_s for key in ("begin_s", "end_s")}
            seen.steps.append(step)
    tokens = [moment - begin_s for moment in sorted(tally.tokens_at_s)]
    return {
        "name": lane.name,
        "healthy_s": seen.healthy_s,
        "first_token_s": tokens[0] if tokens else None,
        "host_tier_s": seen.host_tier_s,
        "steps": seen.steps,
        "tokens_s": [round(moment, 2) for moment in tokens],
        "completed": tally.completed,
        "turned_away": tally.turned_away,
    }


def _until_in_use(
    process: subprocess.Popen[bytes],
    seen: Watched,
    lane: Lane,
    log: Path,
    *,
    begin_s: float,
    limit_s: float,
) -> None:
    while seen.host_tier_s is None:
        now_s = time.monotonic() - begin_s
        if process.poll() is not None or now_s > limit_s:
            last = log.read_text("utf-8", "replace")[-4000:]
            raise BenchmarkError(f"{lane.name}: no host tier after {now_s:.0f} s:\n{last}")
        seen.look(lane, now_s)
        time.sleep(_PAUSE_S)


def _end(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait(_END_S)


def stored_bytes(metrics: str) -> float:
    """Return how much the engine has put into its host tier, from its own metrics."""
    lines = metrics.splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(_STORED))
