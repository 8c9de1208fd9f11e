"""A virtual environment that is made in one folder and used in another."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterable
from pathlib import Path

from hostprep.errors import FailedError
from testbed.cache import Say

_DOWNLOADED = re.compile(r"^\s*Downloading (\S+) \(([0-9.]+) (kB|MB|GB)\)")
_IN_MB = {"kB": 0.001, "MB": 1.0, "GB": 1000.0}
_SAY_EVERY_MB = 100.0
_REASON_LINES = 10


def create(folder: Path) -> None:
    """Make an empty environment, without pip; raises FailedError."""
    command = [sys.executable, "-m", "venv", "--without-pip", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise FailedError(
            f"cannot make a virtual environment: {(done.stderr or done.stdout).strip()}",
            remedy="install Python's venv module, such as the package python3-venv",
        )


def site_packages(folder: Path) -> Path:
    """Where its packages are."""
    return folder / "lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}" / "site-packages"


def add_packages_of(folder: Path, others: Iterable[Path]) -> None:
    """Let it import the packages of other environments too, after its own."""
    lines = "".join(f"{site_packages(other)}\n" for other in others)
    (site_packages(folder) / "hostprep-shared.pth").write_text(lines, encoding="utf-8")


def install_locked(folder: Path, lock: Path, say: Say, *, held_fd: int) -> None:
    """Install exactly what the lock names, hashes checked, dependencies left alone.

    Says what it downloads. pip holds `held_fd` as well, the builder's lock: it goes on writing
    when we are killed. Raises FailedError with pip's own words.
    """
    # No cache: wheels of hundreds of MB would lie on the disk twice. No byte code: Python makes
    # it for what is imported, a small part of all.
    command = [sys.executable, "-m", "pip", "--python", str(folder / "bin" / "python"), "install"]
    command += ["--no-deps", "--require-hashes", "--only-binary", ":all:", "--no-cache-dir"]
    command += ["--no-compile", "--progress-bar", "off", "--disable-pip-version-check"]
    start_s = time.monotonic()
    last: deque[str] = deque(maxlen=_REASON_LINES)
    with subprocess.Popen(
        [*command, "-r", str(lock)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        pass_fds=(held_fd,),
    ) as pip:
        assert pip.stdout is not None
        megabytes = _follow(pip.stdout, lock.stem, last, say)
    if pip.returncode != 0:
        raise FailedError(
            f"pip could not install {lock.name}:\n{''.join(last).strip()}",
            remedy="check that PyPI, or the index pip is set to, can be reached",
        )
    say(f"{lock.stem}: {megabytes:.0f} MB fetched, {time.monotonic() - start_s:.0f} s")


def _follow(lines: Iterable[str], name: str, last: deque[str], say: Say) -> float:
    total_mb = said_mb = 0.0
    for line in lines:
        last.append(line)
        match = _DOWNLOADED.match(line)
        if match:
            total_mb += float(match[2]) * _IN_MB[match[3]]
            if total_mb - said_mb >= _SAY_EVERY_MB:
                said_mb = total_mb
                say(f"{name}: fetching {match[1].partition('-')[0]}, {total_mb:.0f} MB so far")
        elif line.startswith("Installing collected packages"):
            say(f"{name}: unpacking")
    return total_mb


def move_scripts(folder: Path, to: Path) -> None:
    """Make its programs name the interpreter at its later place: pip wrote the present one."""
    old, new = os.fsencode(f"#!{folder}/"), os.fsencode(f"#!{to}/")
    for path in (folder / "bin").iterdir():
        if path.is_symlink() or not path.is_file():
            continue
        content = path.read_bytes()
        if content.startswith(old):
            path.write_bytes(new + content.removeprefix(old))
