"""CUDA libraries that torch links and a run without a GPU never calls: built as empty shells.

torch's CUDA wheel is the one on the usual index, and its NVIDIA libraries are 2 GB. No file of
torch's is edited: the shells lie on LD_LIBRARY_PATH, and every function in them returns 999
(cudaErrorUnknown), should anybody call one.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

from hostprep.errors import FailedError
from testbed.apt import install_packages
from testbed.cache import Say

_SONAMES = (
    "libcublas.so.13",
    "libcublasLt.so.13",
    "libcudnn.so.9",
    "libcufft.so.12",
    "libcufile.so.0",
    "libcurand.so.10",
    "libcusolver.so.12",
    "libcusparse.so.12",
    "libcusparseLt.so.0",
    "libnccl.so.2",
    "libnvrtc.so.13",
    "libnvshmem_host.so.3",
)
"""What torch 2.13.0's libraries need, besides libcudart and libcupti, which are the real ones."""
_OURS = re.compile(
    r"(cu(blas|sparse|fft|rand|dnn|solver|File)|cudnn|nccl|pnccl|nvrtc|nvshmem|_nvshmemi?)"
)
# ld.so refuses (check_match) versioned symbols inside a library of the wanted name that has no
# versions: they live in a library of another name, which the shells need.
_SYMBOLS = "libhostprep_cuda_stubs.so"


def build_stubs(torch_libraries: Path, folder: Path, say: Say) -> None:
    """Build the shells for the torch whose `torch/lib` is given, into a new folder.

    Raises FailedError where there is no C compiler and none can be installed.
    """
    if any(shutil.which(tool) is None for tool in ("cc", "readelf")):
        install_packages(("gcc", "libc6-dev", "binutils"), say)
    folder.mkdir()
    names = _wanted(torch_libraries)
    code = "".join(f"int {name}(void) {{ return 999; }}\n" for name in names)
    # -fno-builtin and -w: the functions' real types are none of our business.
    _cc(folder, _SYMBOLS, "-x", "c", "-", "-fPIC", "-fno-builtin", "-w", text=code)
    for soname in _SONAMES:
        _cc(
            folder,
            soname,
            "-Wl,--no-as-needed",
            "-Wl,-rpath,$ORIGIN",
            f"-L{folder}",
            f"-l:{_SYMBOLS}",
        )
    say(f"built {len(_SONAMES)} stub CUDA libraries with {len(names)} functions")


def _wanted(libraries: Path) -> list[str]:
    defined: set[str] = set()
    undefined: set[str] = set()
    for path in sorted(libraries.glob("*.so*")):
        done = subprocess.run(
            ["readelf", "-W", "--dyn-syms", str(path)], capture_output=True, text=True, check=False
        )
        for line in done.stdout.splitlines():
            columns = line.split()
            if len(columns) > 7:
                name = columns[7].partition("@")[0]
                (undefined if columns[6] == "UND" else defined).add(name)
    return sorted(name for name in undefined - defined if _OURS.match(name))


def _cc(folder: Path, soname: str, *options: str, text: str = "") -> None:
    command = ["cc", "-shared", "-nostdlib", f"-Wl,-soname,{soname}", "-o", str(folder / soname)]
    done = subprocess.run(
        [*command, *options], input=text, capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        raise FailedError(f"cc could not build {soname}: {done.stderr.strip()[-2000:]}")
