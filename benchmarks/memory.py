"""The agent's own memory: RssAnon of `hostprep prepare` at its highest."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

from benchmarks.machine import BenchmarkError, own_node, release_all
from benchmarks.measure import Below, Result, Sample, compare
from benchmarks.running import main
from hostprep.backing import GIB, MIB
from hostprep.node.apply.service import Node
from hostprep.units import format_bytes

_LIMIT_BYTES = 80 * MIB
_PAUSE_S = 0.001


def run(*, short: bool = False) -> list[Result]:
    """Sample a child's RssAnon while it prepares. Returns one row for each backing."""
    size_bytes = 64 * MIB if short else 8 * GIB
    with own_node() as node:
        return [
            _row(node, size_bytes, backing, rounds=1 if short else 3)
            for backing in ("HugeTLB2Mi", "Base")
        ]


def _row(node: Node, size_bytes: int, backing: str, *, rounds: int) -> Result:
    peaks = []
    for _ in range(rounds):
        peaks.append(float(_peak_bytes(node, size_bytes, backing)))
        release_all(node)
    return compare(
        "memory of prepare itself",
        Sample(tuple(peaks), "B"),
        f"what may be used while preparing {format_bytes(size_bytes)} of {backing}",
        Sample(tuple(float(_LIMIT_BYTES) for _ in peaks), "B"),
        reach=Below(_LIMIT_BYTES, "80 MiB"),
        judged=max(peaks),
    )


def _peak_bytes(node: Node, size_bytes: int, backing: str) -> int:
    command = [sys.executable, "-m", "hostprep", "prepare", "--root", node.root]
    command += ["--name", "bench", "--size", str(size_bytes), "--backing", backing]
    child = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    status = Path(f"/proc/{child.pid}/status")
    peak = 0
    while child.poll() is None:
        peak = max(peak, _rss_anon_bytes(status.read_text(encoding="ascii")))
        time.sleep(_PAUSE_S)
    _, message = child.communicate()
    if child.returncode != 0:
        raise BenchmarkError(f"hostprep prepare failed: {message.strip()}")
    return peak


def _rss_anon_bytes(status: str) -> int:
    """Return RssAnon of proc_pid_status(5); 0 for a process that has ended and was not reaped."""
    for line in status.splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    return 0


if __name__ == "__main__":
    main(run)
