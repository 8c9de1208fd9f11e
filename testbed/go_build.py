"""Build a program from its pinned Go module, telling whoever waits how far it is."""

from __future__ import annotations

import hashlib
import os
import platform
import subprocess
import threading
import time
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path

from hostprep.errors import FailedError
from testbed.cache import Say, install
from testbed.versions import GoProgram

__all__ = ["build", "cache_name"]

_MODULES = Path(__file__).parent / "modules"
_SAY_EVERY_SECONDS = 10.0
_TAIL_LINES = 25


def cache_name(program: GoProgram) -> str:
    """The folder in the cache: changes with the version, the sums of the source and the flags.

    What most programs have by default does not count, so that their names stay when a field of
    GoProgram is added.
    """
    recipe = hashlib.sha256()
    folder = _MODULES / program.module
    # main.go: a program of our own, put together from others' packages.
    for path in (folder / "go.mod", folder / "go.sum", *folder.glob("main.go")):
        recipe.update(path.read_bytes())
    recipe.update(f"{program.package} {program.ldflags} {platform.machine()}".encode())
    if program.tags or program.cgo:
        recipe.update(f" {program.tags} {program.cgo}".encode())
    return f"{program.name}-{program.version}-{recipe.hexdigest()[:8]}"


def build(program: GoProgram, *, go: Path, cache: Path, say: Say) -> Path:
    """Build into the cache, under the builder's lock; return the program's path.

    Raises FailedError with the compiler's last lines and what to do about them.
    """
    label = f"{program.name} {program.version}"
    say(f"building {label}, once: about {program.expected_seconds} s on two cores when all is new")
    with install(cache, cache_name(program)) as folder:
        _compile(program, go=go, output=folder / program.name, label=label, say=say)
    return cache / cache_name(program) / program.name


@dataclass(slots=True)
class _Progress:
    """What the compiler said so far; written by a thread, read by the one that reports."""

    downloads: int = 0
    packages: int = 0
    tail: deque[str] = field(default_factory=lambda: deque(maxlen=_TAIL_LINES))

    def take(self, line: str) -> None:
        if line.startswith("go: downloading"):
            self.downloads += 1
        elif line and " " not in line and ":" not in line:
            self.packages += 1
        else:
            self.tail.append(line)

    def __str__(self) -> str:
        return f"{self.downloads} modules fetched, {self.packages} packages compiled"


def _compile(program: GoProgram, *, go: Path, output: Path, label: str, say: Say) -> None:
    command = [str(go), "build", "-v", "-mod=readonly", "-trimpath", "-buildvcs=false"]
    command += ["-tags", program.tags] if program.tags else []
    command += ["-ldflags", program.ldflags, "-o", str(output), program.package]
    # The toolchain stays the one we found: a download of another would not be pinned by go.sum.
    env = {**os.environ, "GOTOOLCHAIN": "local", "GOFLAGS": ""}
    env["CGO_ENABLED"] = "1" if program.cgo else "0"
    start = time.monotonic()
    progress = _Progress()
    with subprocess.Popen(
        command,
        cwd=_MODULES / program.module,
        env=env,
        text=True,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    ) as process:
        reader = threading.Thread(target=_read, args=(process, progress))
        reader.start()
        try:
            while not _ended(process):
                say(f"  {label}: {time.monotonic() - start:.0f} s, {progress}")
        except BaseException:
            process.terminate()
            raise
        finally:
            reader.join()
    if process.returncode != 0:
        raise _failure(label, list(progress.tail))
    say(f"  {label}: done in {time.monotonic() - start:.0f} s, {progress}")


def _read(process: subprocess.Popen[str], progress: _Progress) -> None:
    assert process.stderr is not None
    for line in process.stderr:
        progress.take(line.rstrip("\n"))


def _ended(process: subprocess.Popen[str]) -> bool:
    try:
        process.wait(timeout=_SAY_EVERY_SECONDS)
    except subprocess.TimeoutExpired:
        return False
    return True


def _failure(label: str, tail: list[str]) -> FailedError:
    text = "\n".join(f"    {line}" for line in tail)
    remedy = "read the compiler's last lines above; a full disk and a small memory look like this"
    if any(_is_network(line) for line in tail):
        remedy = "the Go module proxy cannot be reached: check the network, or set GOPROXY"
    return FailedError(f"{label} was not built:\n{text}", remedy=remedy)


def _is_network(line: str) -> bool:
    signs = ("dial tcp", "no such host", "i/o timeout", "connection refused", "TLS handshake")
    return any(sign in line for sign in signs)
