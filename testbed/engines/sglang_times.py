"""How long SGLang's own host pool takes to be made, cold (the second time) and prepared.

`python -m testbed.engines.sglang_times MIB [BACKING]`, as root; prints seconds. Takes that much
memory and gives it back; SGLang wants 10 GB free besides.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from hostprep.backing import Backing
from testbed.engines.interpreters import EnginePython, engine_python
from testbed.engines.own_network import in_own_network
from testbed.machine import POOL, clean_node, machine_lock, pool_of

SCENE = Path(__file__).with_name("sglang_scene.py")


def play(folder: Path, python: EnginePython, root: str) -> list[str]:
    """Return how `hostprep exec` becomes `sglang serve`: a program that plays the scene instead.

    It runs in SGLang's interpreter, and finds nothing of ours by itself.
    """
    program = folder / "sglang"
    program.write_text(
        f"#!{python.path} -P\nimport sys, runpy\n"
        f"assert sys.argv[1:3] == ['serve', 'm'], sys.argv\n"
        f"runpy.run_path({str(SCENE)!r}, run_name='__main__')\n"
    )
    program.chmod(0o755)
    command = [sys.executable, "-m", "hostprep", "exec", "--pool", POOL, "--root", root]
    command += ["--engine", "sglang", "--", str(program), "serve", "m", "--hicache-ratio", "2"]
    return in_own_network(command)


def main(mib: int, backing: str = Backing.HUGETLB_2MI.value) -> None:
    """Time it cold, and again over a pool prepared for it; each has the memory to itself."""
    python = engine_python("sglang")
    around = python.environ(SCENE_MIB=str(mib), OMP_NUM_THREADS=str(os.cpu_count() or 1))
    with machine_lock(), tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        cold = _told(in_own_network([python.path, "-P", str(SCENE)]), folder, around)
        with clean_node() as node:
            node.prepare([pool_of(mib=mib + 2, backing=Backing(backing))])
            prepared = _told(play(folder, python, node.root), folder, around)
    told = {"cold": cold["pools"], "prepared": prepared["pools"], "joining": prepared["joining"]}
    print(json.dumps(told))


def _told(command: list[str], folder: Path, around: dict[str, str]) -> dict[str, Any]:
    done = subprocess.run(command, env=around, cwd=folder, check=True, stdout=subprocess.PIPE)
    told: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return told


if __name__ == "__main__":
    main(int(sys.argv[1]), *sys.argv[2:])
