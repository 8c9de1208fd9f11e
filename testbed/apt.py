"""Debian's packages, fetched without touching the machine's own lists."""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hostprep.errors import FailedError

__all__ = ["KEYRING", "Source", "download_packages", "mirror", "parse_mirror", "release"]

KEYRING = "/usr/share/keyrings/debian-archive-keyring.gpg"
_LISTS = ("/etc/apt/sources.list.d/debian.sources", "/etc/apt/sources.list")


@dataclass(frozen=True, slots=True)
class Source:
    """One suite of one mirror, signed by Debian's own keys."""

    mirror: str
    suite: str

    def __str__(self) -> str:
        return f"deb [signed-by={KEYRING}] {self.mirror} {self.suite} main"


def parse_mirror(text: str) -> str | None:
    """The first archive in a sources file of either form; None when there is none."""
    for line in text.splitlines():
        words = line.split()
        if words[:1] == ["URIs:"] and len(words) > 1:
            return words[1]
        if words[:1] == ["deb"]:
            return next((word for word in words[1:] if "://" in word), None)
    return None


def mirror() -> str:
    """`$DEBIAN_MIRROR`, else the archive that this machine uses. Raises FailedError without one."""
    given = os.environ.get("DEBIAN_MIRROR")
    if given:
        return given
    for name in _LISTS:
        path = Path(name)
        found = parse_mirror(path.read_text(encoding="utf-8")) if path.exists() else None
        if found:
            return found
    raise FailedError(
        "no mirror of Debian is known", remedy="set DEBIAN_MIRROR to one, such as your own cache"
    )


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
