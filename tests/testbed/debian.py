"""Prometheus and promtool, from the machine or from Debian's package."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

from hostprep.errors import FailedError
from tests.testbed.cache import Say

__all__ = ["PROMETHEUS", "find_prometheus", "install_prometheus"]

PROMETHEUS = ("promtool", "prometheus")


def find_prometheus() -> dict[str, Path]:
    """The two programs, by name, as far as they are on this machine."""
    found = {name: shutil.which(name) for name in PROMETHEUS}
    return {name: Path(path) for name, path in found.items() if path}


def install_prometheus(say: Say) -> dict[str, Path]:
    """Install the package with apt when they are missing; its service is not started.

    Raises FailedError where apt cannot do it.
    """
    found = find_prometheus()
    if len(found) == len(PROMETHEUS):
        return found
    remedy = "install Debian's package prometheus, or put prometheus and promtool on the PATH"
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        raise FailedError("there is no promtool and no prometheus", remedy=remedy)
    say("installing prometheus with apt, for promtool")
    command = ["apt-get", "install", "-y", "-qq", "--no-install-recommends", "prometheus"]
    # RUNLEVEL=1 makes the package's maintainer scripts leave the service alone.
    env = {**os.environ, "RUNLEVEL": "1", "DEBIAN_FRONTEND": "noninteractive"}
    done = _quietly(command, env)
    if done.returncode != 0:
        _quietly(["apt-get", "update", "-qq"], env)
        done = _quietly(command, env)
    found = find_prometheus()
    if done.returncode != 0 or len(found) < len(PROMETHEUS):
        raise FailedError(f"apt did not install prometheus: {done.stderr.strip()}", remedy=remedy)
    return found


def _quietly(command: list[str], env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, env=env, capture_output=True, text=True, check=False)
