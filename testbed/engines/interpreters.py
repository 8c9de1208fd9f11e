"""The engines' own interpreters, for tests that run their code in child processes."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import pytest

from testbed.engines import environments

_SILENT = {
    # Nobody is asked for anything, and nobody is told: engines report their use by default.
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "LMCACHE_TRACK_USAGE": "false",
    "DO_NOT_TRACK": "1",
    "PYTHONUNBUFFERED": "1",
    # vLLM and LMCache name blocks by Python's hash: the same in both, and in each run.
    "PYTHONHASHSEED": "0",
    # Without it vLLM asks the default route for the machine's address, and there is none.
    "VLLM_HOST_IP": "127.0.0.1",
    # GiB of KV cache of vLLM's CPU platform; its default is half of the memory.
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_LOGGING_COLOR": "0",
}
_OURS = (
    "PYTHONPATH",
    "PYTHONHOME",
    "VIRTUAL_ENV",
    "LD_LIBRARY_PATH",
    # With it each start compiles thousands of modules anew, which triples the time of an import.
    "PYTHONDONTWRITEBYTECODE",
)


@dataclass(frozen=True, slots=True)
class EnginePython:
    """An interpreter with an engine in it."""

    path: str
    variables: dict[str, str]
    """What its processes need in their environment, besides `environ()`'s rest."""

    def program(self, name: str) -> str:
        """The path of one of the engine's commands, such as `vllm`."""
        return str(Path(self.path).parent / name)

    def environ(self, **changes: str) -> dict[str, str]:
        """A whole environment for its processes: this one's, theirs, and `changes`.

        `PYTHONPATH` is empty unless it is among the changes: nothing of ours gets in by accident.
        """
        rest = {key: value for key, value in os.environ.items() if key not in _OURS}
        programs = f"{Path(self.path).parent}:{rest.get('PATH', os.defpath)}"
        return {**rest, "PATH": programs, **self.variables, **changes}


def chosen(name: str) -> str:
    """The environment in which tests of this one run: ENGINES_RELEASE names another release's.

    `ENGINES_RELEASE=vllm-cpu-previous` runs all tests of `vllm-cpu` there, and no other tests
    elsewhere. Raises ValueError for an environment that is no such release.
    """
    wanted = os.environ.get("ENGINES_RELEASE")
    if not wanted:
        return name
    if not any(wanted in releases for releases in environments.RELEASES.values()):
        raise ValueError(f"ENGINES_RELEASE is {wanted!r}: not one of {environments.RELEASES}")
    return wanted if wanted in environments.RELEASES.get(name, ()) else name


def engine_python(name: str) -> EnginePython:
    """The interpreter of `vllm-cpu`, `lmcache`, `mooncake`, `sglang` or `torch`.

    Of the release that `chosen` says. Skips the test where it is not built; where the tier is
    required, that is a failure.
    """
    name = chosen(name)
    folder = environments.locate(name)
    if folder is None:
        pytest.skip(
            f"the environment {name} is not built: "
            f"run .venv/bin/python -m testbed build {_flag(name)}"
        )
    libraries = ":".join(str(path) for path in environments.library_folders(name))
    variables = {**_SILENT, **({"LD_LIBRARY_PATH": libraries} if libraries else {})}
    return EnginePython(str(folder / "bin" / "python"), variables)


def _flag(name: str) -> str:
    return "--engines" if name in environments.ALWAYS else "--engines-all"
