"""The engine half as one file that any Python >= 3.9 can run and import."""

from __future__ import annotations

import hashlib
import os
import zipfile
from importlib import resources
from importlib.resources.abc import Traversable
from io import BytesIO

import hostprep

_PACKAGES = ("linux", "client", "cuda", "register", "slots", "engines")
_MODULES = (
    "__init__",
    "attachment",
    "backing",
    "errors",
    "known_issues",
    "layout",
    "paths",
    "units",
    "zipapp",
)
_DATA = ("tested.json",)
_MAIN = """\
import sys
import zipimport

archive = __loader__.archive
sys.path_importer_cache.pop(archive, None)
getattr(zipimport, "_zip_directory_cache", {}).pop(archive, None)

from hostprep.engines.main import main

sys.exit(main())
"""
"""Python reads the zip's directory, then starts up, then reads this: another version may lie there
by then. So this is the same in all versions, first in the file and not compressed, and begins by
having the directory read again; hostprep/__init__.py then settles on one version. Do not change it.
"""
_PLUGINS = "[sglang.srt.plugins]\nhostprep = hostprep.engines.sglang.plugin:load\n"
"""As in pyproject.toml: what engines find by importlib.metadata, which reads zip files as well."""


def build_zipapp() -> bytes:
    """Return the zipapp's bytes; the same for the same sources."""
    package = resources.files("hostprep")
    files = {f"hostprep/{name}.py": package / f"{name}.py" for name in _MODULES}
    for folder in _PACKAGES:
        files.update(_files_below(package / folder, f"hostprep/{folder}"))
    texts = {name: file.read_text(encoding="utf-8") for name, file in files.items()}
    return b"#!/usr/bin/env python3\n" + _zip({"__main__.py": _MAIN} | _described() | texts)


def version_name(data: bytes) -> str:
    """Return the file name of the version that has these bytes."""
    return f"hostprep-{hostprep.__version__}-{hashlib.sha256(data).hexdigest()[:12]}.pyz"


def _described() -> dict[str, str]:
    """Return what says that hostprep is installed, and what it offers to engines."""
    version = hostprep.__version__
    metadata = f"Metadata-Version: 2.1\nName: hostprep\nVersion: {version}\n"
    folder = f"hostprep-{version}.dist-info"
    return {f"{folder}/METADATA": metadata, f"{folder}/entry_points.txt": _PLUGINS}


def _files_below(folder: Traversable, path: str) -> dict[str, Traversable]:
    """Return a package's modules and what they read with them, subpackages included."""
    found: dict[str, Traversable] = {}
    for entry in folder.iterdir():
        name = f"{path}/{entry.name}"
        if entry.is_dir() and entry.name != "__pycache__":
            found.update(_files_below(entry, name))
        elif entry.name.endswith(".py") or entry.name in _DATA:
            found[name] = entry
    return found


def _zip(files: dict[str, str]) -> bytes:
    buffer = BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name in sorted(files, key=lambda name: (name != "__main__.py", name)):
            # A fixed date: the agent compares bytes to see whether the published one is current.
            entry = zipfile.ZipInfo(name.replace(os.sep, "/"))
            kind = zipfile.ZIP_STORED if name == "__main__.py" else zipfile.ZIP_DEFLATED
            archive.writestr(entry, files[name], compress_type=kind)
    return buffer.getvalue()
