"""Debian's packages, fetched without touching the machine's own lists."""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hostprep.errors import FailedError

__all__ = ["KEYRING", "Source", "download_packages", "mirror", "release"]

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
