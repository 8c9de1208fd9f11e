"""A program that is measured from outside: CPU seconds, memory without what is shared."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from typing import Self

_TICK_HZ = os.sysconf("SC_CLK_TCK")


class Program:
    """A Python module running as a process of its own, ended with the block."""

    def __init__(self, module: str, *arguments: str, log: str | None = None) -> None:
        self._command: Sequence[str] = (sys.executable, "-m", module, *arguments)
        self._log = log or os.devnull

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> None:
        """Start it, anew where it was stopped."""
        with open(self._log, "ab") as log:
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                bufsize=1,
            )

    def stop(self) -> None:
        """End it in order; by force after 20 s."""
        self._process.terminate()
        try:
            self._process.communicate(timeout=20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.communicate()

    def say(self, line: str) -> None:
        """Write a line to its standard input."""
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()

    def wait_for(self, word: str) -> None:
        """Wait until it prints a line that begins so. Raises RuntimeError where it ends first."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(word):
                return
        raise RuntimeError(f"{self._command[2]} ended with {self._process.wait()}: {self._log}")

    def cpu_s(self) -> float:
        """Return the CPU seconds it has used, in user and kernel mode."""
        with open(f"/proc/{self._process.pid}/stat", encoding="ascii") as file:
            fields = file.read().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / _TICK_HZ

    def rss_bytes(self) -> int:
        """Return its resident memory now."""
        return self._status("VmRSS")

    def peak_rss_bytes(self) -> int:
        """Return the most resident memory it ever had."""
        return self._status("VmHWM")

    def _status(self, field: str) -> int:
        with open(f"/proc/{self._process.pid}/status", encoding="ascii") as file:
            for line in file:
                if line.startswith(field + ":"):
                    return int(line.split()[1]) * 1024
        raise RuntimeError(f"no {field} of {self._process.pid}")
