"""A real Prometheus beside a cluster of the testbed, asked over its HTTP API; and promtool."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlencode
from urllib.request import urlopen

import pytest
import yaml

from hostprep.errors import NotReadyError
from testbed.binaries import find
from testbed.control_plane import ControlPlane
from testbed.processes import free_port, wait_for


@dataclass(frozen=True, slots=True)
class Target:
    """What is scraped: host:port, the job, and labels as service discovery would give them."""

    job: str
    address: str
    labels: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Sample:
    """One element of an instant vector."""

    labels: Mapping[str, str]
    value: float


def program(name: str) -> str:
    """The path of prometheus or promtool; the test is skipped where it is missing."""
    try:
        return str(find(name))
    except NotReadyError as error:
        pytest.skip(str(error))


def promtool(
    *arguments: str, cwd: Path | None = None, timeout_s: float = 120
) -> subprocess.CompletedProcess[str]:
    """Run promtool to its end."""
    return subprocess.run(
        [program("promtool"), *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=timeout_s,
        cwd=cwd,
    )


def free_address() -> str:
    """A loopback address whose port nobody has right now."""
    return f"127.0.0.1:{free_port()}"


class Prometheus:
    """Scrapes and evaluates every second; dies with its cluster."""

    def __init__(
        self, cluster: ControlPlane, targets: Sequence[Target], rule_files: Sequence[Path]
    ) -> None:
        """Start it and wait until it answers."""
        self._address = free_address()
        folder = cluster.folder / "prometheus"
        folder.mkdir()
        config = folder / "prometheus.yaml"
        config.write_text(yaml.safe_dump(_configuration(targets, rule_files)), encoding="utf-8")
        self.process = cluster.spawn(
            "prometheus",
            [
                program("prometheus"),
                f"--config.file={config}",
                f"--storage.tsdb.path={folder / 'data'}",
                f"--web.listen-address={self._address}",
                "--log.level=warn",
            ],
        )
        wait_for(lambda: self.query("vector(1)"), 30, why=f"no answer:\n{self.process.tail()}")

    def query(self, expr: str) -> list[Sample]:
        """Return the instant vector that the expression yields now; raises OSError if refused."""
        result = self._get("query", query=expr)["result"]
        return [Sample(item["metric"], float(item["value"][1])) for item in result]

    def value(self, expr: str) -> float:
        """Return the only value; raises AssertionError when there is not exactly one."""
        samples = self.query(expr)
        assert len(samples) == 1, f"{expr}: {samples}"
        return samples[0].value

    def rules(self) -> list[dict[str, Any]]:
        """Every rule with its health, and alerts with their state."""
        return [rule for group in self._get("rules")["groups"] for rule in group["rules"]]

    def _get(self, what: str, **parameters: str) -> dict[str, Any]:
        url = f"http://{self._address}/api/v1/{what}?{urlencode(parameters)}"
        with urlopen(url, timeout=10) as answer:
            document = json.load(answer)
        data: dict[str, Any] = document["data"]
        return data


def _configuration(targets: Sequence[Target], rule_files: Sequence[Path]) -> dict[str, Any]:
    jobs: dict[str, list[dict[str, Any]]] = {}
    for target in targets:
        entry = {"targets": [target.address], "labels": dict(target.labels)}
        jobs.setdefault(target.job, []).append(entry)
    return {
        "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
        "rule_files": [str(path) for path in rule_files],
        "scrape_configs": [
            {"job_name": job, "static_configs": entries} for job, entries in jobs.items()
        ],
    }
