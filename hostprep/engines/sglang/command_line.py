"""SGLang's command line: which of its options bear on its host memory.

Names and defaults: sglang/srt/arg_groups/fields/{memory,parallel}.py and server_args.py, 0.5.23.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass

from hostprep.engines.options import read_options
from hostprep.errors import BadInputError

__all__ = ["ServerCommand", "read_command"]

_SAME = {
    "--enable-hicache": "--enable-hierarchical-cache",
    "--tensor-parallel-size": "--tp-size",
    "--pipeline-parallel-size": "--pp-size",
    "--data-parallel-size": "--dp-size",
}
_FLAGS = (
    "--disable-radix-cache",
    "--disaggregation-decode-enable-offload-kvcache",
    "--enable-dp-attention",
    "--enable-hierarchical-cache",
    "--enable-hicache",
    "--enable-lmcache",
    "--enable-unified-cache-external-linker",
    "--use-ray",
)
_OPTIONS = (
    "--config",
    "--disaggregation-mode",
    "--dp-size",
    "--hicache-host-memory-fraction",
    "--hicache-host-memory-mode",
    "--hicache-io-backend",
    "--hicache-mem-layout",
    "--hicache-ratio",
    "--hicache-size",
    "--hicache-storage-backend",
    "--hicache-storage-backend-extra-config",
    "--hicache-storage-prefetch-policy",
    "--hicache-write-policy",
    "--nnodes",
    "--pp-size",
    "--tp-size",
)
"""Those that matter, and those whose beginning is another's: argparse takes unique beginnings."""
_NAMES = (*_OPTIONS, *_FLAGS, *_SAME)
_SHORTEST = {"--dp": "--dp-size", "--pp": "--pp-size", "--tp": "--tp-size"}
_LEAST = len("--enable-")
_MODULE = "sglang.launch_server"
_IN_A_FILE = re.compile(
    r"^[ \t]*['\"]?"
    r"(?P<key>(?:hicache|enable[-_]hi)[-_\w]*|(?:tp|pp|dp)[-_]size|"
    r"(?:tensor|pipeline|data)[-_]parallel[-_]size|nnodes)"
    r"['\"]?[ \t]*:",
    re.MULTILINE | re.ASCII,
)
_FILE_LIMIT = 1 << 20


@dataclass(frozen=True)
class ServerCommand:
    """A command that starts SGLang's server, read."""

    words: tuple[str, ...]
    program: str
    """The script `sglang`, or the Python that runs its module."""
    options: tuple[tuple[str, str], ...]
    """Long names and what was given, in order; the empty string for a flag."""

    def last(self, name: str) -> str | None:
        """Return what an option was given last, which is what counts; None where it was not."""
        found = [given for option, given in self.options if option == name]
        return found[-1] if found else None

    def count(self, name: str) -> int:
        """Return a number of ranks or nodes, 1 by default. Raises BadInputError for none."""
        text = self.last(name)
        if text is None:
            return 1
        if not text.isascii() or not text.isdigit() or int(text) < 1:
            raise BadInputError(
                f"{name} {text!r} is no number of anything",
                reason="BadCommand",
                remedy="give a whole number from 1 on",
            )
        return int(text)

    @property
    def ranks_here(self) -> int:
        """Processes with a GPU that it starts on this node."""
        ranks = self.count("--tp-size") * self.count("--pp-size")
        if self.last("--enable-dp-attention") is None:  # whose groups are ranks of one world
            ranks *= self.count("--dp-size")
        return max(1, ranks // self.count("--nnodes"))

    @property
    def key_in_file(self) -> str | None:
        """The first key of ours that its --config file sets; a file that cannot be read has none.

        Raises nothing: SGLang says it better.
        """
        path = self.last("--config")
        if path is None:
            return None
        try:
            with open(path, encoding="utf-8", errors="replace") as file:
                match = _IN_A_FILE.search(file.read(_FILE_LIMIT))
        except OSError:
            return None
        return match["key"] if match else None


def read_command(words: Sequence[str]) -> ServerCommand:
    """Read `python3 -m sglang.launch_server ...` or `sglang serve ...`, after `numactl` or alone.

    Raises BadInputError for what starts no server.
    """
    for index, word in enumerate(words[:-1]):
        is_module = word == "-m" and words[index + 1] == _MODULE and index > 0
        is_script = os.path.basename(word) == "sglang" and words[index + 1] == "serve"
        if is_module or is_script:
            program = words[index - 1] if is_module else word
            options = read_options(words[index + 2 :], _long, flags=_FLAGS)
            same = ((_SAME.get(name, name), given) for name, given in options)
            return ServerCommand(tuple(words), program, tuple(same))
    raise BadInputError(
        "the command starts no server of SGLang's",
        reason="BadCommand",
        remedy=f"give --engine sglang one: -- python3 -m {_MODULE} ..., or -- sglang serve ...; "
        "for a program of your own see docs/engines/sglang.md",
    )


def _long(name: str) -> str | None:
    """Return the option that a name or its beginning stands for; None for all others."""
    if name in _NAMES or name in _SHORTEST:
        return _SHORTEST.get(name, name)
    if len(name) <= _LEAST or not name.startswith("--"):
        return None
    matching = [option for option in _NAMES if option.startswith(name)]
    return matching[0] if len(matching) == 1 else None
