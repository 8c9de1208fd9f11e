"""How long SGLang's own host pool takes to be made, cold (the second time) and prepared.

`python -m tests.engines.sglang_times MIB [BACKING]`, as root; prints seconds. Takes twice that
much memory, and gives it back.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from hostprep.backing import Backing
from tests.engines.own_network import in_own_network
from tests.support.engine_environments import EnginePython, engine_python
from tests.support.machine import clean_node, machine_lock
from tests.support.pools import POOL, pool_of

__all__ = ["SCENE", "play"]

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
    """Prepare, and have it timed."""
    python = engine_python("sglang")
    with machine_lock(), clean_node() as node, tempfile.TemporaryDirectory() as folder:
        node.prepare([pool_of(mib=mib + 2, backing=Backing(backing))])
        around = python.environ(SCENE_MIB=str(mib), OMP_NUM_THREADS=str(os.cpu_count() or 1))
        subprocess.run(play(Path(folder), python, node.root), env=around, cwd=folder, check=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), *sys.argv[2:])
