"""Runs boot scripts on host trees, under a shell and with nothing but the commands they may use."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hostprep.api.pool_spec import PoolSpec
from hostprep.node.boot import boot_script

SHELLS = (("dash",), ("busybox", "sh"))
COMMANDS = ("cat", "mkdir", "mv", "rm")
_MOUNT = """\
#!/bin/sh
echo "$@" >> "$MOUNT_LOG"
[ -z "$MOUNT_FAILS" ] || exit 32
case $4 in
*pagesize=1073741824*) page=1024M ;;
*) page=2M ;;
esac
echo "99 1 0:99 / $6 rw - $2 $5 rw,pagesize=$page" >> "$HOSTPREP_SYSROOT/proc/self/mountinfo"
"""


@dataclass
class BootHost:
    """One machine's tree, and the folder of its pools."""

    tree: Path
    root: Path
    shell: tuple[str, ...]
    mount_fails: bool = False
    stderr: str = field(default="", init=False)

    def __post_init__(self) -> None:
        self._commands = self.tree.parent / "commands"
        self._commands.mkdir()
        for name in COMMANDS:
            found = shutil.which(name)
            assert found is not None
            (self._commands / name).symlink_to(found)
        (self._commands / "mount").write_text(_MOUNT)
        (self._commands / "mount").chmod(0o755)

    def command(self, spec: PoolSpec) -> list[str]:
        script = self.tree.parent / f"{spec.name}.sh"
        script.write_text(boot_script(spec, root=str(self.root)))
        shell = shutil.which(self.shell[0])
        assert shell is not None, f"{self.shell[0]} is not installed"
        return [shell, *self.shell[1:], str(script)]

    @property
    def environment(self) -> dict[str, str]:
        return {
            "PATH": str(self._commands),
            "HOSTPREP_SYSROOT": str(self.tree),
            "MOUNT_LOG": str(self.mount_log),
            "MOUNT_FAILS": "yes" if self.mount_fails else "",
        }

    @property
    def mount_log(self) -> Path:
        return self.tree.parent / "mount.log"

    @property
    def memory_mounts(self) -> list[str]:
        """The arguments of the mounts of pools, one line each."""
        lines = self.mount_log.read_text().splitlines() if self.mount_log.exists() else []
        return [line for line in lines if line.startswith("-t hugetlbfs")]

    def mount_sizes(self, pool: str = "kv") -> dict[str, int]:
        """The `size=` of each mount that was made, by folder, in bytes."""
        found = {
            line.split()[-1]: line.rpartition(",size=")[2].split()[0] for line in self.memory_mounts
        }
        return {path.rpartition(f"/{pool}/")[2]: int(size) for path, size in found.items()}

    def run(self, spec: PoolSpec) -> dict[str, Any]:
        """Run the pool's script and return its result; it must end with 0."""
        done = subprocess.run(
            self.command(spec),
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        self.stderr = done.stderr
        assert done.returncode == 0, done.stderr
        return self.result(spec.name)

    def result(self, pool: str = "kv") -> dict[str, Any]:
        path = self.root / pool / "boot.json"
        document: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
        return document

    def pages_file(self, node: int, kib: int = 2048) -> Path:
        name = f"sys/devices/system/node/node{node}/hugepages/hugepages-{kib}kB/nr_hugepages"
        return self.tree / name

    def pages(self, *nodes: int, kib: int = 2048) -> list[int]:
        return [int(self.pages_file(node, kib).read_text() or 0) for node in nodes]

    def gives_none(self, node: int, kib: int = 2048) -> None:
        """Make a node take every write and add nothing, as a kernel short of memory does."""
        self.pages_file(node, kib).unlink()
        os.symlink("/dev/null", self.pages_file(node, kib))
