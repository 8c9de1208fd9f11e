"""Stand-ins for the CUDA driver and for NVML, built by the tests: order and behaviour, never speed.

See libcuda.c and libnvidia-ml.c for what they do and which variables steer them. The real
`cuda.bindings` loads the first in a child process, through LD_LIBRARY_PATH.
"""

from __future__ import annotations

import functools
import os
import subprocess
import tempfile
from pathlib import Path

__all__ = ["build", "build_copies", "build_nvml", "environment"]

_HERE = Path(__file__).parent
_WARNINGS = ("-Wall", "-Wextra", "-Werror")


def build(folder: Path, *more: str) -> Path:
    """Compile libcuda.so.1 into the folder, of `more` sources too.

    Returns the folder, for LD_LIBRARY_PATH.
    """
    return _build(folder, "libcuda.so.1", "libcuda.c", *more)


def build_nvml(folder: Path) -> Path:
    """Compile libnvidia-ml.so.1 into the folder; return the folder."""
    return _build(folder, "libnvidia-ml.so.1", "libnvidia-ml.c")


def build_copies(folder: Path) -> Path:
    """Compile the library that LMCache's copies go to; return its path, for LD_PRELOAD."""
    return _build(folder, "libcopies.so", "runtime_copies.c") / "libcopies.so"


def _build(folder: Path, library: str, *sources: str) -> Path:
    (folder / library).write_bytes(_compiled(library, sources))
    return folder


@functools.cache
def _compiled(library: str, sources: tuple[str, ...]) -> bytes:
    """Compile a library once for all tests of this process."""
    kind = ("-shared", "-fPIC", "-O1", f"-Wl,-soname,{library}", *_WARNINGS)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, library)
        files = ("-o", str(path), *(str(_HERE / source) for source in sources))
        subprocess.run(["cc", *kind, *files, "-lpthread", "-ldl"], check=True, timeout=120)
        return path.read_bytes()


def environment(folder: Path, *, log: Path, lock: Path, **settings: object) -> dict[str, str]:
    """Return a child's environment: the stand-in first, and its settings (STANDIN_<NAME>)."""
    steering = {f"STANDIN_{name.upper()}": str(value) for name, value in settings.items()}
    inherited = {name: text for name, text in os.environ.items() if name[:8] != "STANDIN_"}
    return {
        **inherited,
        "LD_LIBRARY_PATH": str(folder),
        "STANDIN_LOG": str(log),
        "STANDIN_LOCK": str(lock),
        **steering,
    }
