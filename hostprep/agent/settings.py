"""The options of the agent, checked before anything happens."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from hostprep.agent.desired import prepare_folder
from hostprep.deviceplugin.devices import plugins_folder, socket_name
from hostprep.errors import BadInputError
from hostprep.kube.health_server import parse_listen
from hostprep.node.observe import HostRoot, observe
from hostprep.node.observe.pools import pool_names
from hostprep.paths import canonical_root

_LABEL = r"[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?"
_NODE_NAME = re.compile(rf"{_LABEL}(?:\.{_LABEL})*", re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The options of `hostprep agent`."""

    node_name: str
    root: str
    state_dir: str = "/var/lib/hostprep"
    listen: str = ":9808"
    verify_interval_s: float = 5.0
    allow_cgroup_v1: bool = False
    kubeconfig: str | None = None
    kubelet_dir: str = ""
    """Kubelet's root folder; empty where no device plugin is to be served."""
    once: bool = False
    wait_s: float = 300.0
    """How long to stand by for another agent to end: more than a Pod is given for that."""
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
