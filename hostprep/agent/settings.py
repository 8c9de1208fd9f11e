"""What the agent is told at its start, checked before anything happens."""

from __future__ import annotations

import contextlib
import os
import re
from dataclasses import dataclass, field

from hostprep.agent.desired import prepare_folder
from hostprep.deviceplugin.devices import socket_name
from hostprep.deviceplugin.plugins import plugins_folder
from hostprep.errors import BadInputError
from hostprep.kube.listener import parse_listen
from hostprep.linux.files import closing_fd, from_os_error
from hostprep.linux.locks import try_lock
from hostprep.node.observe import HostRoot, observe
from hostprep.node.observe.pools import pool_names
from hostprep.paths import canonical_root

__all__ = [
    "DEFAULT_LISTEN",
    "DEFAULT_STATE_DIR",
    "DEFAULT_VERIFY_INTERVAL_S",
    "DEFAULT_WAIT_S",
    "Settings",
]

DEFAULT_STATE_DIR = "/var/lib/hostprep"
DEFAULT_LISTEN = ":9808"
DEFAULT_VERIFY_INTERVAL_S = 5.0
DEFAULT_WAIT_S = 300.0
"""More than a Pod is given to end, and its successor to become Ready."""

_LABEL = r"[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?"
_NODE_NAME = re.compile(rf"{_LABEL}(?:\.{_LABEL})*", re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The options of `hostprep agent`."""

    node_name: str
    root: str
    state_dir: str = DEFAULT_STATE_DIR
    listen: str = DEFAULT_LISTEN
    verify_interval_s: float = DEFAULT_VERIFY_INTERVAL_S
    allow_cgroup_v1: bool = False
    kubeconfig: str | None = None
    kubelet_dir: str = ""
    """Kubelet's root folder; empty where no device plugin is to be served."""
    once: bool = False
    wait_s: float = DEFAULT_WAIT_S
    """How long to stand by for another agent to end."""
    host: HostRoot = field(default_factory=lambda: HostRoot("/"))

    def check(self) -> str:
        """Check everything that can be before the start; make the state folder.

        Returns the boot's identity. Raises BadInputError.
        """
        if len(self.node_name) > 253 or _NODE_NAME.fullmatch(self.node_name) is None:
            shown = self.node_name[:60]
            raise BadInputError(
                f"{shown!r} is not a node's name" if shown else "which node is this?",
                reason="BadNodeName",
                remedy="give --node-name or NODE_NAME (in a pod: from spec.nodeName)",
            )
        canonical_root(self.root)
        self._check_kubelet_dir()
        pool_names(self.root)
        parse_listen(self.listen)
        facts = observe(host=self.host, root=self.root)
        if facts.cgroup.version == 1 and not self.allow_cgroup_v1:
            raise BadInputError(
                "this node charges memory by cgroup v1",
                reason="CgroupV1",
                remedy="boot it with cgroup v2 (systemd.unified_cgroup_hierarchy=1), or give"
                " --allow-cgroup-v1 where you know that pods' limits do not matter",
            )
        prepare_folder(self.state_dir)
        return facts.kernel.boot_id

    def _check_kubelet_dir(self) -> None:
        if not self.kubelet_dir:
            return
        if not self.kubelet_dir.startswith("/"):
            raise BadInputError(
                f"kubelet's folder {self.kubelet_dir!r} is not an absolute path",
                reason="BadKubeletDir",
                remedy="give --kubelet-dir as kubelet has it, such as /var/lib/kubelet",
            )
        socket_name(plugins_folder(self.kubelet_dir), "a-pool")

    def lock(self) -> int:
        """Be the only agent with this state folder. Returns a descriptor to keep open.

        Raises BadInputError where another one runs.
        """
        path = f"{self.state_dir}/agent.lock"
        try:
            # The folder itself, which is there also where a full disk takes no file: that is no
            # reason to leave the node without its memory.
            fd = os.open(self.state_dir, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as error:
            raise from_os_error(error, f"open {self.state_dir}") from error
        if try_lock(fd, exclusive=True):
            _write_number(path)
            return fd
        os.close(fd)
        raise BadInputError(
            f"another agent (process {_read_number(path)}) works with {self.state_dir}",
            reason="AlreadyRunning",
            remedy="end it first; two nodes on one machine need a --root and a --state-dir each",
        )


def _write_number(path: str) -> None:
    """Leave word of who has the lock: for people."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    with contextlib.suppress(OSError), closing_fd(os.open(path, flags, 0o600)) as fd:
        os.ftruncate(fd, 0)
        os.pwrite(fd, str(os.getpid()).encode(), 0)


def _read_number(path: str) -> str:
    with contextlib.suppress(OSError), open(path, encoding="ascii", errors="replace") as file:
        return file.read(20).strip() or "unknown"
    return "unknown"
