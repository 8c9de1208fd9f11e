"""Pools on the virtual node: made as an administrator does, looked at on the node itself."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime
from typing import Any, Protocol

from testbed.processes import wait_for

JsonObject = dict[str, Any]
_ROOT = "/run/hostprep"
_SECONDS = 180.0


class Shell(Protocol):
    """What runs a command on the node as root: a VirtualNode."""

    def run(self, command: str, *, timeout_s: float = ...) -> str:
        """Return what the command printed; raises when it fails."""
        ...


def pool_object(name: str, size: str, *, gid: int, **spec: Any) -> JsonObject:
    """A HostMemoryPool for the nodes with the static label of its name.

    Released at once when it is deleted. Said from the beginning, since an operator that restarts
    just then has not seen what is said only with the deletion, and keeps the memory for 600 s.
    """
    return {
        "apiVersion": "hostprep.dev/v1alpha1",
        "kind": "HostMemoryPool",
        "metadata": {"name": name},
        "spec": {
            "nodeSelector": {f"pool.hostprep.dev/{name}": "true"},
            "size": size,
            "backings": ["HugeTLB2Mi"],
            "reserve": "256Mi",
            "access": {"gid": gid},
            "release": {"when": "Immediately"},
        }
        | spec,
    }


def delete_pool(kubectl: Callable[..., str], name: str) -> None:
    """Delete a pool by the explicit words: at once, and whoever holds it. None there is fine."""
    if kubectl("get", "hmp", name, "--ignore-not-found").strip():
        words = {"release": {"when": "Immediately"}, "deletionProtection": "None"}
        kubectl("patch", "hmp", name, "--type=merge", "-p", json.dumps({"spec": words}))
        kubectl("delete", "hmp", name, "--ignore-not-found")


class NodePools:
    """The pools of one node."""

    def __init__(self, kubectl: Callable[..., str], node: Shell, name: str = "node-a") -> None:
        self._kubectl = kubectl
        self._node = node
        self._name = name

    @contextmanager
    def held(self, pool: JsonObject, *, wait: bool = True) -> Iterator[None]:
        """Label the node and make the pool; delete it after, and wait until the memory is back."""
        name = pool["metadata"]["name"]
        self.label(name)
        self._kubectl("apply", "-f", "-", stdin=json.dumps(pool))
        try:
            if wait:
                self.wait_published(name)
            yield
        finally:
            delete_pool(self._kubectl, name)
            wait_for(
                lambda: not self.has(name), _SECONDS, every_s=0.5, why=f"pool {name} did not go"
            )
            self._kubectl("label", "node", self._name, f"pool.hostprep.dev/{name}-")

    def label(self, name: str) -> None:
        """Put the static label on the node."""
        self._kubectl("label", "node", self._name, "--overwrite", f"pool.hostprep.dev/{name}=true")

    def has(self, name: str) -> bool:
        """Whether the node has a folder of that pool."""
        return self.shell(f"test -e {_ROOT}/{name} && echo yes || true") == "yes"

    def wait_published(self, name: str) -> None:
        """Wait for the handoff of this boot."""
        path = f"{_ROOT}/{name}/handoff.json"
        wait_for(
            lambda: self.shell(f"test -e {path} && echo yes || true") == "yes",
            _SECONDS,
            every_s=0.2,
            why=f"no {path}",
        )

    def published_at_s(self, name: str) -> float:
        """When the handoff was published, by the node's clock."""
        return float(self.shell(f"stat -c %.Y {_ROOT}/{name}/handoff.json"))

    def handoff(self, name: str) -> JsonObject:
        """The handoff, as it stands."""
        found: JsonObject = json.loads(self.shell(f"cat {_ROOT}/{name}/handoff.json"))
        return found

    def inodes(self, name: str) -> dict[str, int]:
        """The regions' files, as the kernel numbers them."""
        text = self.shell(f"stat -c '%n %i' {_ROOT}/{name}/mem/*")
        pairs = [line.split() for line in text.splitlines()]
        return {path.rpartition("/")[2]: int(inode) for path, inode in pairs}

    def shell(self, command: str) -> str:
        """Run a command on the node; its output without the last newline."""
        return self._node.run(command).strip()

    def cgroup_of(self, pod_uid: str) -> str:
        """The pod's cgroup, as kubelet's systemd driver names it."""
        wanted = shlex.quote(f"*pod{pod_uid.replace('-', '_')}.slice")
        path = self.shell(f"find /sys/fs/cgroup/kubepods.slice -maxdepth 3 -name {wanted}")
        assert path, f"no cgroup of pod {pod_uid}"
        return path

    def usage(self, cgroup: str) -> dict[str, int]:
        """What the cgroup is charged for, in bytes: memory, page tables, huge pages."""
        text = self.shell(
            f"cd {cgroup} && echo memory $(cat memory.current) && "
            "grep '^pagetables ' memory.stat && "
            "for f in hugetlb.2MB.current hugetlb.2MB.rsvd.current; do echo $f $(cat $f); done"
        )
        return {name: int(value) for name, value in (line.split() for line in text.splitlines())}


def seconds_of(stamp: str) -> float:
    """Kubernetes' time (RFC 3339, up to nanoseconds) as seconds since 1970."""
    text = stamp.removesuffix("Z")
    whole, _, fraction = text.partition(".")
    return datetime.fromisoformat(f"{whole}+00:00").timestamp() + float(f"0.{fraction or 0}")
