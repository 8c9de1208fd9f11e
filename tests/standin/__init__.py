"""A stand-in for the CUDA driver, built by the tests: order and behaviour, never speed.

See libcuda.c for what it does and which variables steer it. The real `cuda.bindings` loads it in
a child process, through LD_LIBRARY_PATH.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

__all__ = ["build", "environment"]

_SOURCE = Path(__file__).parent / "libcuda.c"
_WARNINGS = ("-Wall", "-Wextra", "-Werror")


def build(folder: Path) -> Path:
    """Compile libcuda.so.1 into the folder; return the folder, for LD_LIBRARY_PATH."""
    library = folder / "libcuda.so.1"
    kind = ("-shared", "-fPIC", "-O1", "-Wl,-soname,libcuda.so.1")
    files = ("-o", str(library), str(_SOURCE), "-lpthread", "-ldl")
    subprocess.run(["cc", *kind, *_WARNINGS, *files], check=True, timeout=120)
    return folder


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
