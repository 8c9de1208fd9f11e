"""What comes from Debian's packages, where the machine does not have it already."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from hostprep.errors import FailedError
from testbed.cache import Say

__all__ = ["PROMETHEUS", "find_prometheus", "install_packages", "install_prometheus"]

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
    if len(found) < len(PROMETHEUS):
        install_packages(["prometheus"], say)
        found = find_prometheus()
    if len(found) < len(PROMETHEUS):
        raise FailedError(
            "there is no promtool and no prometheus",
            remedy="put prometheus and promtool on the PATH",
        )
    return found


def install_packages(names: Sequence[str], say: Say) -> None:
    """Install Debian packages with apt, their services left alone.

    Raises FailedError, with apt's words, where that cannot be done.
    """
    words = " ".join(names)
    remedy = f"install Debian's packages: {words}"
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        raise FailedError(f"this machine has no {words}", remedy=remedy)
    say(f"installing with apt: {words}")
    command = ["apt-get", "install", "-y", "-qq", "--no-install-recommends", *names]
    # RUNLEVEL=1 makes the packages' maintainer scripts leave services alone.
    env = {**os.environ, "RUNLEVEL": "1", "DEBIAN_FRONTEND": "noninteractive"}
    done = _quietly(command, env)
    if done.returncode != 0:
        _quietly(["apt-get", "update", "-qq"], env)
        done = _quietly(command, env)
    if done.returncode != 0:
        raise FailedError(f"apt did not install {words}: {done.stderr.strip()}", remedy=remedy)


def _quietly(command: list[str], env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, env=env, capture_output=True, text=True, check=False)
