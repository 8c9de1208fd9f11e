"""The Python that a command would start: which release of an engine it has, how it imports us.

Nothing is started or imported to find out.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence

import hostprep
from hostprep.zipapp import STABLE_NAME

TYPE_CHECKING = False
if TYPE_CHECKING:
    from hostprep.engines.catalogue import Integration

_FIRST_LINE_BYTES = 512


def installed_version(program: str, names: Sequence[str], environ: Mapping[str, str]) -> str | None:
    """Return the version of the first of these distributions beside a program's interpreter.

    The program is a Python, or a script whose first line names one. None where it cannot be found.
    """
    pattern = re.compile(rf"(?:{'|'.join(names)})-(?P<version>[^-]+)\.dist-info")
    for folder in site_folders(program, environ):
        for entry in _matching(folder, "*.dist-info"):
            match = pattern.fullmatch(os.path.basename(entry))
            if match is not None:
                return match["version"]
    return None


def site_folders(program: str, environ: Mapping[str, str]) -> tuple[str, ...]:
    """Return the folders from which a program's interpreter imports what is installed."""
    python = _interpreter(program, environ)
    if python is None:
        return ()
    prefix = os.path.dirname(os.path.dirname(python))
    return tuple(
        f"{version}/{kind}-packages"
        for lib in ("lib", "lib64", "local/lib")
        for version in _matching(f"{prefix}/{lib}", "python3*")
        for kind in ("site", "dist")
    )


def release_notes(
    integration: Integration, program: str, environ: Mapping[str, str]
) -> tuple[str, ...]:
    """Return a note for people where the installed release was never tested; () where unknown."""
    version = installed_version(program, integration.packages, environ)
    release = (version or "").partition("+")[0]
    if not release or release in integration.versions:
        return ()
    tried = ", ".join(integration.versions) or "none"
    return (
        f"{integration.engine} {version} has never been tried with this (tried: {tried}); going on",
    )


def python_path(root: str, program: str, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variable by which a program's interpreter imports us; {} where it does anyway.

    An installed release of this very version is left alone: it is the whole package. Else the
    zipapp comes first, ours or the one published below `root`: a folder in which hostprep is
    installed among other packages would put those before the engine's own.
    """
    if installed_version(program, ("hostprep",), environ) == hostprep.__version__:
        return {}
    home = os.path.dirname(os.path.abspath(hostprep.__path__[0]))
    if os.path.isdir(home):
        folders = site_folders(program, environ)
        if os.path.realpath(home) in map(os.path.realpath, folders):
            return {}
        published = f"{root}/{STABLE_NAME}"
        home = published if os.path.isfile(published) else home
    before = environ.get("PYTHONPATH", "")
    if home in before.split(":"):
        return {}
    return {"PYTHONPATH": f"{home}:{before}" if before else home}


def offers_plugin(
    group: str, program: str, environ: Mapping[str, str], changed: Mapping[str, str]
) -> bool:
    """Tell whether a program's interpreter, with these variables changed, finds a plugin of ours.

    As engines search: our zipapp has the entry points, and where we are installed; a folder of
    sources has not.
    """
    from importlib.metadata import distributions

    path = changed.get("PYTHONPATH", environ.get("PYTHONPATH", ""))
    folders = (*path.split(":"), *site_folders(program, environ))
    found = distributions(name="hostprep", path=[folder for folder in folders if folder])
    return any(point.group == group for each in found for point in each.entry_points)


def find_program(program: str, environ: Mapping[str, str]) -> str | None:
    """Return a program's path, as a shell would find it (shutil.which costs 10 ms)."""
    folders = [""] if "/" in program else os.get_exec_path(environ)
    for folder in folders:
        path = f"{folder}/{program}" if folder else program
        if os.path.isfile(path) and os.access(path, os.X_OK):
            return path
    return None


def _matching(folder: str, pattern: str) -> list[str]:
    import glob

    return sorted(glob.glob(f"{glob.escape(folder)}/{pattern}"))


def _interpreter(program: str, environ: Mapping[str, str]) -> str | None:
    path = _path_of(program, environ)
    if path is None or os.path.basename(path).startswith("python"):
        return path
    try:
        with open(path, "rb") as file:
            first = file.readline(_FIRST_LINE_BYTES)
    except OSError:
        return None
    words = first[2:].decode("utf-8", "replace").split() if first.startswith(b"#!") else []
    if words and os.path.basename(words[0]) == "env":
        words = [word for word in words[1:] if not word.startswith("-")]
    return _path_of(words[0], environ) if words else None


def _path_of(program: str, environ: Mapping[str, str]) -> str | None:
    return program if "/" in program else find_program(program, environ)
