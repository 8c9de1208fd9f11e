"""A container that has nothing of a pool but what a device plugin's Allocate injected.

A root file system of its own with this machine's programs, read-only, and the mounts of the
answer: made as a container runtime makes them, without a folder or file of its own in what is
mounted read-only. It runs as uid 1000 without any capability, in a PID namespace of its own.
"""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from hostprep.deviceplugin import v1beta1_pb2 as api

_UID = 1000
_SYSTEM = ("/usr", "/bin", "/lib", "/lib64", "/etc")


class Injected:
    """Starts programs in containers like that; below one folder of the test's."""

    def __init__(self, folder: Path, response: api.ContainerAllocateResponse, *, gid: int) -> None:
        """`gid` is the supplemental group that the pod asks for."""
        self._folder = folder
        self._mounts = list(response.mounts)
        self._envs: Mapping[str, str] = dict(response.envs)
        self._gid = gid

    def run(self, *command: str, timeout_s: float = 60) -> subprocess.CompletedProcess[str]:
        """Run a program to its end."""
        return subprocess.run(
            self._argv(command), capture_output=True, text=True, timeout=timeout_s, check=False
        )

    @contextmanager
    def started(self, *command: str) -> Iterator[subprocess.Popen[str]]:
        """Run a program beside the block; kill its container at the end."""
        process = subprocess.Popen(
            self._argv(command),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            process_group=0,
        )
        try:
            yield process
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            assert process.stdout is not None
            process.stdout.close()

    def _argv(self, command: Sequence[str]) -> list[str]:
        unshare = ["unshare", "--mount", "--propagation=private", "--pid", "--fork"]
        return [*unshare, "--kill-child", "sh", "-ec", self._script(command)]

    def _script(self, command: Sequence[str]) -> str:
        root = self._folder / "container"
        root.mkdir(exist_ok=True)
        system = [path for path in (*_SYSTEM, sys.base_prefix) if Path(path).exists()]
        lines = [f"mount -t tmpfs -o size=1m none {root}", f"mkdir -p {root}/proc {root}/dev"]
        lines += [_bind(path, f"{root}{path}", read_only=True) for path in system]
        lines += [f"mount -t proc none {root}/proc", _bind("/dev", f"{root}/dev", read_only=False)]
        for mount in self._mounts:
            target = f"{root}{mount.container_path}"
            lines.append(_bind(mount.host_path, target, read_only=mount.read_only))
        variables = [f"{name}={value}" for name, value in self._envs.items()]
        enter = [
            *("setpriv", f"--reuid={_UID}", f"--regid={_UID}", f"--groups={self._gid}"),
            *("--inh-caps=-all", "--bounding-set=-all", "--no-new-privs"),
        ]
        inner = [*enter, "env", "-i", *variables, *command]
        lines.append(f"exec chroot {root} {shlex.join(inner)}")
        return "\n".join(lines)


def _bind(source: str, target: str, *, read_only: bool) -> str:
    """Return a line that mounts; like runtimes it makes the place, where there is none."""
    place, source = shlex.quote(target), shlex.quote(source)
    make = f"if [ -d {source} ]; then mkdir -p {place}; else"
    make += f" mkdir -p $(dirname {place}); touch {place}; fi"
    mount = f"mount --bind {source} {place}"
    again = f"; mount -o remount,bind,ro {place}" if read_only else ""
    return f"[ -e {place} ] || {{ {make}; }}; {mount}{again}"
