"""Debian's packages: installed where the machine lacks them, or fetched for an image."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hostprep.errors import FailedError
from testbed.cache import Say

KEYRING = "/usr/share/keyrings/debian-archive-keyring.gpg"


@dataclass(frozen=True, slots=True)
class Source:
    """One suite of one mirror, signed by Debian's own keys."""

    mirror: str
    suite: str

    def __str__(self) -> str:
        return f"deb [signed-by={KEYRING}] {self.mirror} {self.suite} main"


def mirror() -> str:
    """`$DEBIAN_MIRROR`, else the archive that this machine uses. Raises FailedError without one."""
    given = os.environ.get("DEBIAN_MIRROR")
    if given:
        return given
    # First that of the machine's own suite: makers of programs have archives too.
    own = release()
    archives = sorted(_archives(), key=lambda archive: archive[0] != own)
    if archives:
        return archives[0][1]
    raise FailedError(
        "no mirror of Debian is known", remedy="set DEBIAN_MIRROR to one, such as your own cache"
    )


def _archives() -> list[tuple[str, str]]:
    """Suite and address of every archive that apt is configured for, in whichever file."""
    command = ["apt-get", "indextargets", "--no-release-info", "--format", "$(RELEASE) $(REPO_URI)"]
    command += ["Created-By: Packages", "Component: main"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return []
    words = (line.split() for line in done.stdout.splitlines())
    return [(line[0], line[1]) for line in words if len(line) == 2]


def release() -> str:
    """The machine's VERSION_CODENAME, such as bookworm; empty where it has none."""
    try:
        return platform.freedesktop_os_release().get("VERSION_CODENAME", "")
    except OSError:
        return ""


def download_packages(names: Sequence[str], source: Source, folder: Path) -> list[Path]:
    """Fetch packages of a source, signatures checked, into `folder`; returns their paths.

    Neither the machine's lists nor its packages change. Raises FailedError with apt's words.
    """
    state = folder / ".apt"
    for name in ("lists", "cache"):
        (state / name).mkdir(parents=True)
    (state / "sources.list").write_text(f"{source}\n", encoding="utf-8")
    options = {
        "Dir::Etc::SourceList": f"{state}/sources.list",
        "Dir::Etc::SourceParts": "/dev/null",
        "Dir::Etc::PreferencesParts": "/dev/null",
        "Dir::State::Lists": f"{state}/lists",
        "Dir::Cache": f"{state}/cache",
        "APT::Sandbox::User": "root",
    }
    apt = ["apt-get", "-qq"]
    for key, value in options.items():
        apt += ["-o", f"{key}={value}"]
    for command in ([*apt, "update"], [*apt, "download", *(f"{n}/{source.suite}" for n in names)]):
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise FailedError(
                f"apt could not fetch {', '.join(names)}: {done.stderr.strip()}",
                remedy=f"check that the mirror has the suite {source.suite}",
            )
    return sorted(folder.glob("*.deb"))


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
