"""Which release of an engine a command would start, without starting or importing it."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence

__all__ = ["installed_version", "site_folders", "untried"]

_FIRST_LINE_BYTES = 512


def installed_version(program: str, names: Sequence[str], environ: Mapping[str, str]) -> str | None:
    """Return the version of the first of these distributions beside a program's interpreter.

    The program is a Python, or a script whose first line names one. None where it cannot be told.
    """
    pattern = re.compile(
        "(?:" + "|".join(re.escape(name) for name in names) + r")-(?P<version>[^-]+)\.dist-info"
    )
    for folder in site_folders(program, environ):
        try:
            entries = os.listdir(folder)
        except OSError:
            continue
        for entry in sorted(entries):
            match = pattern.fullmatch(entry)
            if match is not None:
                return match["version"]
    return None


def site_folders(program: str, environ: Mapping[str, str]) -> tuple[str, ...]:
    """Return the folders from which a program's interpreter imports what is installed."""
    python = _interpreter(program, environ)
    if python is None:
        return ()
    prefix = os.path.dirname(os.path.dirname(python))
    found = []
    for lib in (f"{prefix}/lib", f"{prefix}/lib64", f"{prefix}/local/lib"):
        try:
            versions = sorted(name for name in os.listdir(lib) if name.startswith("python3"))
        except OSError:
            continue
        for version in versions:
            found += [f"{lib}/{version}/{kind}-packages" for kind in ("site", "dist")]
    return tuple(found)


def untried(name: str, version: str | None, versions: Sequence[str]) -> tuple[str, ...]:
    """Return a note for people where a release was never tried; none where it is not known."""
    release = (version or "").partition("+")[0]
    if not release or release in versions:
        return ()
    tried = ", ".join(versions) or "none"
    return (f"{name} {version} has never been tried with this (tried: {tried}); going on",)


def _interpreter(program: str, environ: Mapping[str, str]) -> str | None:
    path = _found(program, environ)
    if path is None:
        return None
    if os.path.basename(path).startswith("python"):
        return path
    try:
        with open(path, "rb") as file:
            first = file.readline(_FIRST_LINE_BYTES)
    except OSError:
        return None
    if not first.startswith(b"#!"):
        return None
    words = first[2:].decode("utf-8", "replace").split()
    if words and os.path.basename(words[0]) == "env":
        words = [word for word in words[1:] if not word.startswith("-")]
    return _found(words[0], environ) if words else None


def _found(program: str, environ: Mapping[str, str]) -> str | None:
    if "/" in program:
        return program
    for folder in environ.get("PATH", os.defpath).split(":"):
        path = f"{folder}/{program}"
        if os.path.isfile(path) and os.access(path, os.X_OK):
            return path
    return None
