"""Having an engine's interpreter import this very hostprep by PYTHONPATH: nothing is installed."""

from __future__ import annotations

import os
from collections.abc import Mapping

import hostprep
from hostprep.engines.installed import site_folders
from hostprep.zipapp import STABLE_NAME

__all__ = ["python_path"]


def python_path(root: str, program: str, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variable by which a program's interpreter imports us; {} where it does anyway.

    The zipapp comes first, ours or the one published below `root`: a folder in which hostprep
    is installed among other packages would put those before the engine's own.
    """
    home = os.path.dirname(os.path.abspath(hostprep.__path__[0]))
    if os.path.isdir(home):
        if os.path.realpath(home) in map(os.path.realpath, site_folders(program, environ)):
            return {}
        published = f"{root}/{STABLE_NAME}"
        home = published if os.path.isfile(published) else home
    before = environ.get("PYTHONPATH", "")
    if home in before.split(":"):
        return {}
    return {"PYTHONPATH": f"{home}:{before}" if before else home}
