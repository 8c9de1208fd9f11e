"""Run tiers one after the other, and say how long each took.

    python scripts/run_tiers.py [--keep-going] lint unit kernel cluster

What later tiers need is built meanwhile, with the lowest priority and a log of its own; a build
that fails is repeated by its tier, which then shows why. The first tier that fails ends the run,
unless it is to keep going: on CI, where one run is to show all that fails.
"""

# ruff: noqa: INP001, T201  scripts are no package, and print
from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

_TARGETS = {
    "lint": "lint",
    "unit": "unit",
    "kernel": "kernel",
    "cluster": "cluster-tests",
    "engines": "engines-tests",
    "node": "node-tests",
}
_BUILDS: dict[str, tuple[str, ...]] = {
    "cluster": (),
    "engines": ("--engines",),
    "node": ("--node",),
}
"""The tiers that need something built, and what `python -m testbed build` is told."""
_PATIENCE_S = 1.0
"""A build that takes longer than this is worth a line."""


@dataclass(frozen=True, slots=True)
class _Timing:
    tier: str
    build_s: float
    """How long the tier waited for its build."""
    run_s: float
    passed: bool


class _Builds(threading.Thread):
    """Builds, one after the other, while tests run that do not need them."""

    def __init__(self, tiers: Sequence[str]) -> None:
        super().__init__(daemon=True)
        self._events = {tier: threading.Event() for tier in tiers if tier in _BUILDS}
        self._process: subprocess.Popen[bytes] | None = None
        self._is_closed = False
        self._lock = threading.Lock()
        folder = tempfile.mkdtemp(prefix="hostprep-builds-")
        self._log = Path(folder, "log")

    def run(self) -> None:
        with open(self._log, "wb") as log:
            for tier, event in self._events.items():
                with self._lock:
                    if self._is_closed:
                        return
                    build = (sys.executable, "-m", "testbed", "build", *_BUILDS[tier])
                    self._process = subprocess.Popen(
                        ["nice", "-n", "19", *build],
                        stdin=subprocess.DEVNULL,
                        stdout=log,
                        stderr=log,
                        start_new_session=True,
                    )
                self._process.wait()
                event.set()

    def wait(self, tier: str) -> float:
        """Wait for what the tier needs; return the seconds."""
        event = self._events.get(tier)
        if event is None or event.wait(_PATIENCE_S):
            return 0.0
        began_s = time.monotonic()
        print(f"waiting for the build of tier {tier}; its log: {self._log}", flush=True)
        event.wait()
        return time.monotonic() - began_s

    def close(self) -> None:
        """End a build that no tier needs any more."""
        with self._lock:
            self._is_closed = True
            if self._process is not None and self._process.poll() is None:
                os.killpg(self._process.pid, signal.SIGTERM)


def _run(tier: str, builds: _Builds) -> _Timing:
    build_s = builds.wait(tier)
    print(f"\n== {tier}", flush=True)
    began_s = time.monotonic()
    # Ctrl-C reaches make and the tests as well: they end in order, and we wait for that.
    before = signal.signal(signal.SIGINT, lambda *_: None)
    try:
        done = subprocess.run(["make", "--no-print-directory", _TARGETS[tier]], check=False)
    finally:
        signal.signal(signal.SIGINT, before)
    return _Timing(tier, build_s, time.monotonic() - began_s, done.returncode == 0)


def _table(timings: Sequence[_Timing], names: Sequence[str]) -> str:
    total_s = sum(timing.build_s + timing.run_s for timing in timings) or 1.0
    lines = [f"{'tier':10} {'':8} {'seconds':>8} {'share':>6}"]
    for timing in timings:
        said = "passed" if timing.passed else "FAILED"
        seconds = timing.build_s + timing.run_s
        waited = f"  {timing.build_s:.0f} s of it for its build" if timing.build_s else ""
        share = f"{100 * seconds / total_s:.0f} %"
        lines.append(f"{timing.tier:10} {said:8} {seconds:8.0f} {share:>6}{waited}")
    lines += [f"{name:10} not run" for name in names[len(timings) :]]
    return "\n".join([*lines, f"{'all':10} {'':8} {total_s:8.0f}"])


def main(arguments: Sequence[str]) -> int:
    """Run these tiers; 0 if all passed."""
    keeps_going = "--keep-going" in arguments
    names = [name for name in arguments if name != "--keep-going"]
    unknown = [name for name in names if name not in _TARGETS]
    if unknown or not names:
        print(f"tiers are {', '.join(_TARGETS)}; not {', '.join(unknown) or 'nothing'}")
        return 2
    builds = _Builds(names)
    builds.start()
    timings: list[_Timing] = []
    try:
        for name in names:
            timings.append(_run(name, builds))
            if not timings[-1].passed and not keeps_going:
                break
    except KeyboardInterrupt:
        print("interrupted")
    finally:
        builds.close()
        print(f"\n{_table(timings, names)}", flush=True)
    return 0 if sum(timing.passed for timing in timings) == len(names) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
