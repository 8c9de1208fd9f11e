"""Where a whole vLLM server plays in a test: prepared regions, a driver, a model.

The server runs on the CPU platform, whose copies are plain ones; the driver is the stand-in's.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from hostprep.cuda.board import RankBoard
from hostprep.node.apply.service import Node
from hostprep.paths import PoolPaths
from testbed.engines.interpreters import EnginePython
from testbed.engines.vllm_server import (
    BLOCK_BYTES,
    cuda_bindings,
    free_port,
    serve_command,
    tiny_model,
    with_own_shared_memory,
)
from testbed.machine import POOL, base_pool
from testbed.standin import build, environment

_REGION = "node0-0"


@dataclass
class Stage:
    """Where a server plays: regions, a driver that can be held up, a model."""

    node: Node
    vllm: EnginePython
    folder: Path
    port: int

    @property
    def paths(self) -> PoolPaths:
        return PoolPaths(self.node.root, POOL)

    @property
    def region(self) -> Path:
        """The first one."""
        return Path(self.paths.mem) / _REGION

    def users(self) -> set[int]:
        """Return the processes that have the first region open or mapped, whatever they call it."""
        status = self.region.stat()
        # Other pools' regions have the same name, and each file system begins its inodes again.
        device = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}"
        file = [device, str(status.st_ino)]
        found = set()
        for process in Path("/proc").glob("[0-9]*"):
            # It, or its file, may be gone by now.
            with contextlib.suppress(OSError):
                lines = (process / "maps").read_text().splitlines()
                if any(line.split()[3:5] == file for line in lines):
                    found.add(int(process.name))
                for fd in (process / "fd").iterdir():
                    with contextlib.suppress(OSError):
                        if os.path.samestat(fd.stat(), status):
                            found.add(int(process.name))
        return found

    @property
    def calls(self) -> str:
        return (self.folder / "calls").read_text("ascii")

    def gate(self, region: str = _REGION) -> str:
        """The gate's state as `hostprep status` would show it; Closed until it was decided."""
        announced = RankBoard.look(self.paths.board(region)).gate
        return announced.state if announced else "Closed"

    def ranks(self) -> list[str]:
        return [rank.slot.state for rank in RankBoard.look(self.paths.board(_REGION)).ranks]

    def used_bytes(self, *, rank: int = 0, world: int = 1, block_bytes: int = BLOCK_BYTES) -> int:
        """Bytes of a rank's part of the region, by blocks of KV in which anything is."""
        content = self.region.read_bytes()
        part = len(content) // world
        begins = range(rank * part, (rank + 1) * part, block_bytes)
        empty = bytes(block_bytes)
        return sum(content[at : at + block_bytes] != empty for at in begins) * block_bytes

    @contextlib.contextmanager
    def busy_driver(self, lock: str = "lock") -> Iterator[None]:
        """Have every registration wait, for as long as the block lasts."""
        with open(self.folder / lock, "a", encoding="ascii") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def environment(
        self, *python_path: Path, variables: Mapping[str, str] | None = None, **settings: object
    ) -> dict[str, str]:
        """The stand-in driver before the engine's libraries, and nothing of ours installed."""
        folder = self.folder / "standin"
        folder.mkdir()
        driver = environment(
            build(folder), log=self.folder / "calls", lock=self.folder / "lock",
            **({"scale": 0, "context": 1} | settings),
        )  # fmt: skip
        steering = {name: text for name, text in driver.items() if name.startswith("STANDIN_")}
        libraries = f"{folder}:{self.vllm.variables.get('LD_LIBRARY_PATH', '')}"
        paths = [*python_path, cuda_bindings(self.folder / "bindings")]
        more = {
            "LD_LIBRARY_PATH": libraries,
            "PYTHONPATH": ":".join(str(path) for path in paths),
            "VLLM_SERVER_DEV_MODE": "1",  # for /reset_prefix_cache
            "VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS": "60",  # then it kills its workers
        }
        return self.vllm.environ(**steering, **more, **(variables or {}))

    def command(
        self, config: Mapping[str, object], *exec_options: str, options: Sequence[str] = ()
    ) -> list[str]:
        """Return `hostprep exec` with `exec_options` before a server with `options`."""
        serve = serve_command(
            self.vllm, tiny_model(self.folder / "model"), self.port,
            "--kv-transfer-config", json.dumps(config), *options,
        )  # fmt: skip
        ours = [sys.executable, "-m", "hostprep", "exec", "--pool", POOL, "--root", self.node.root]
        return [*ours, *exec_options, "--", *serve]

    def own(self, command: list[str]) -> list[str]:
        """Have a command play in a shared memory of its own."""
        pools = Path(self.node.root).parent
        return with_own_shared_memory(command, pools, self.folder / "aside")


@contextlib.contextmanager
def staged(vllm: EnginePython, folder: Path, *, regions: int = 1, mib: int = 64) -> Iterator[Stage]:
    """Yield a stage with regions of base pages; skips the test where it has no rights."""
    if os.geteuid() != 0:
        pytest.skip("needs root: mounts")
    with base_pool(regions=regions, mib=mib) as root:
        yield Stage(Node(root), vllm, folder, free_port())
