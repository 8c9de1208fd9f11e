"""A real agent process beside a test: started, asked, stopped, and never left behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from testbed.processes import wait_for


def _command(root: str, state_dir: Path, options: tuple[str, ...]) -> list[str]:
    return [
        *(sys.executable, "-m", "hostprep", "agent", "--root", root),
        *("--state-dir", str(state_dir), "--listen", "127.0.0.1:0", "--log-format", "json"),
        *options,
    ]


def _environment(kubeconfig: Path | None) -> dict[str, str]:
    environ = {"PATH": os.environ["PATH"], "HOME": "/nonexistent"}
    return environ | ({"KUBECONFIG": str(kubeconfig)} if kubeconfig else {})


def run_agent(
    root: str,
    state_dir: Path,
    *options: str,
    kubeconfig: Path | None = None,
    timeout_s: float = 60,
) -> subprocess.CompletedProcess[str]:
    """Run an agent to its end."""
    return subprocess.run(
        _command(root, state_dir, options),
        capture_output=True,
        text=True,
        check=False,
        timeout=timeout_s,
        env=_environment(kubeconfig),
    )


class AgentProcess:
    """One agent of one node."""

    def __init__(
        self,
        node: str,
        root: str,
        state_dir: Path,
        kubeconfig: Path | None,
        *options: str,
        interval_s: float = 0.3,
    ) -> None:
        """Start it, verifying every `interval_s`; wait until its port is open."""
        self._log = state_dir.parent / f"agent-{node[:32]}-{time.monotonic_ns()}.log"
        options = ("--node-name", node, "--verify-interval", str(interval_s), *options)
        with open(self._log, "wb") as log:
            self._process = subprocess.Popen(
                _command(root, state_dir, ("--allow-cgroup-v1", *options)),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=_environment(kubeconfig),
            )
        try:
            wait_for(self._has_started, 60, why="the agent did not start")
        except BaseException:
            self.close()
            raise

    def _has_started(self) -> bool:
        if self._process.poll() is not None:
            raise AssertionError(f"the agent ended:\n{self._log.read_text()}")
        return any("port" in line for line in self.log())

    @property
    def _url(self) -> str:
        """Its address: of the process that works, or that stands by for another one."""
        port = [line["port"] for line in self.log() if "port" in line][-1]
        return f"http://127.0.0.1:{port}"

    @property
    def pid(self) -> int:
        """The agent's process id."""
        return self._process.pid

    @property
    def worker_pid(self) -> int:
        """The present worker's process id."""
        return int([line for line in self.log() if line["event"] == "worker_started"][-1]["pid"])

    def log(self) -> list[dict[str, Any]]:
        """Everything it logged so far."""
        lines = self._log.read_text().splitlines()
        return [json.loads(line) for line in lines if line.startswith("{")]

    def saw(self, event: str) -> bool:
        """Whether that event is in its log."""
        return any(line["event"] == event for line in self.log())

    def log_text(self) -> str:
        """Its log as it is, with whatever is no JSON."""
        return self._log.read_text()

    def get(self, path: str) -> tuple[int, str]:
        """Return HTTP status and text of a page of its server."""
        try:
            with urllib.request.urlopen(self._url + path, timeout=5) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()

    def metric(self, name: str, **labels: str) -> float:
        """Return the sum of a metric's samples that have these labels."""
        return sum(
            sample.value
            for family in text_string_to_metric_families(self.get("/metrics")[1])
            for sample in family.samples
            if sample.name == name and labels.items() <= sample.labels.items()
        )

    def wait(self, timeout_s: float = 15) -> int:
        """Wait until it has ended by itself; return the exit code."""
        return self._process.wait(timeout_s)

    def stop(self, number: int = signal.SIGTERM, *, timeout_s: float = 15) -> int:
        """Signal it and wait for its end; return the exit code."""
        if self._process.poll() is None:
            self._process.send_signal(number)
        return self._process.wait(timeout_s)

    def close(self) -> None:
        """End it if it still runs."""
        if self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(15)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
