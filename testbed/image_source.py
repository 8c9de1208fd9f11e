"""What an image build is given: the files that `.containerignore` lets through, and their hash."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Mapping
from pathlib import Path

__all__ = ["read_sources", "sum_of", "write_sources"]

_RECIPES = ("Containerfile", ".containerignore")
# Zip files, and so wheels, know no time before 1980.
_WRITTEN_SECONDS = 946684800


def read_sources(project: Path) -> dict[str, bytes]:
    """The recipe and every file that a build sees, by their paths in the project."""
    lines = (project / ".containerignore").read_text(encoding="utf-8").splitlines()
    found: dict[str, bytes] = {}
    for name in (*_RECIPES, *(line[1:] for line in lines if line.startswith("!"))):
        top = project / name
        for path in sorted(top.rglob("*")) if top.is_dir() else [top]:
            relative = path.relative_to(project)
            if path.is_file() and not any(_is_cache(part) for part in relative.parts):
                found[str(relative)] = path.read_bytes()
    return found


def _is_cache(part: str) -> bool:
    return part == "__pycache__" or (part.startswith(".") and part not in _RECIPES)


def sum_of(sources: Mapping[str, bytes], *more: bytes) -> str:
    """Eight digits that change with any name, any byte, and anything in `more`."""
    digest = hashlib.sha256()
    for name, content in sorted(sources.items()):
        digest.update(f"{name}\0{len(content)}\0".encode() + content)
    for part in more:
        digest.update(b"%d\0" % len(part) + part)
    return digest.hexdigest()[:8]


def write_sources(sources: Mapping[str, bytes], folder: Path) -> None:
    """Write them to an empty folder, with the same modes and times whoever wrote the originals."""
    shutil.rmtree(folder, ignore_errors=True)
    for name, content in sources.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    for path in (folder, *folder.rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)
        os.utime(path, (_WRITTEN_SECONDS, _WRITTEN_SECONDS))
