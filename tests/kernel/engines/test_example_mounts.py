"""The host paths of the examples, mounted as a runtime does: what an engine can write in them.

As root with all capabilities, which no example gives an engine: what is left are the mounts.
"""

from __future__ import annotations

import shlex
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from hostprep.node.apply.service import Node
from hostprep.node.observe.pools import pool_names
from testbed.engine_pods import GID, HOST_PATH_MANIFESTS, documents, pod_specs
from testbed.machine import POOL, pool_of

pytestmark = pytest.mark.kernel

_ROOT = "/run/hostprep"
_ZIPAPP = f"{_ROOT}/hostprep.pyz"
_OTHER = "other"
_WRITE = """
import errno, sys
for path in sys.argv[1:]:
    try:
        open(path, "ab").close()
        print("written")
    except OSError as error:
        print(errno.errorcode[error.errno])
"""
_TURN = """
from hostprep.cuda.turnstile import Turnstile
turnstile = Turnstile()
with turnstile.turn(5):
    print(turnstile.without)
"""


class Container:
    """A mount namespace with a container's host paths, in which programs run as root."""

    def __init__(self, pid: int) -> None:
        self._enter = ["nsenter", f"--target={pid}", "--mount", "--"]

    def python(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run this Python with the program of the mounted root, as engines' images do."""
        environ = ["env", "-C", "/", f"PYTHONPATH={_ZIPAPP}"]
        return subprocess.run(
            [*self._enter, *environ, sys.executable, "-B", *arguments],
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )

    def write(self, *paths: str) -> list[str]:
        """Try to open these for writing, or to make them; returns what came of each."""
        done = self.python("-c", _WRITE, *paths)
        assert done.returncode == 0, done.stderr
        return done.stdout.split()


@contextmanager
def container_of(path: Path, node: Node) -> Iterator[Container]:
    """Yield the example's container that claims, its host's root at the node's."""
    pods = [found for found in documents(path) if found["kind"] in ("Pod", "Deployment")]
    (spec,) = pod_specs(pods)
    paths = {v["name"]: v["hostPath"]["path"] for v in spec["volumes"] if "hostPath" in v}
    containers = [*spec.get("initContainers", ()), *spec["containers"]]
    mounts: list[dict[str, Any]] = next(
        found
        for container in containers
        if len(found := [m for m in container.get("volumeMounts", ()) if m["name"] in paths]) > 1
    )
    # The node's own /run stays as it is: this one is seen in the namespace alone.
    lines = [f"mount -t tmpfs none /run; mkdir -p {_ROOT}"]
    for mount in sorted(mounts, key=lambda mount: str(mount["mountPath"]).count("/")):
        source = paths[mount["name"]].replace(_ROOT, node.root)
        lines.append(f"mount --rbind {shlex.quote(source)} {mount['mountPath']}")
        if mount.get("readOnly"):
            lines.append(f"mount -o remount,bind,ro {mount['mountPath']}")
    lines += ["echo ready", "exec sleep 1000"]
    command = ["unshare", "--mount", "--propagation=slave", "sh", "-ec", "\n".join(lines)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            yield Container(process.pid)
        finally:
            process.kill()


@pytest.fixture
def node_with_two(node: Node) -> Node:
    """Two pools, of which the examples are for the first."""
    node.prepare([pool_of(gid=GID), pool_of(name=_OTHER)])
    return node


@pytest.mark.parametrize("path", HOST_PATH_MANIFESTS, ids=lambda path: path.stem)
def test_an_engine_that_is_root_writes_its_pool_and_no_other(
    node_with_two: Node, path: Path
) -> None:
    with container_of(path, node_with_two) as container:
        write = 'printf kv | dd of="$HOSTPREP_PATH" conv=notrunc status=none'
        done = container.python(_ZIPAPP, "exec", POOL, "--", "sh", "-c", write)
        assert done.returncode == 0, done.stderr
        assert container.python("-c", _TURN).stdout == "None\n", "it takes no turns"
        closed = ["mine", "hostprep.pyz", f"{_OTHER}/claim.lock", f"{_OTHER}/handoff.json"]
        closed += [f"{_OTHER}/state/node0-0/clean", f"{_OTHER}/mine"]
        assert container.write(*(f"{_ROOT}/{name}" for name in closed)) == ["EROFS"] * 6


@pytest.fixture
def shared_mounts(node: Node) -> Iterator[None]:
    """Mounts below the node's root are seen where `HostToContainer` says so, as on any node."""
    folder = Path(node.root).parent
    subprocess.run(["mount", "--bind", folder, folder], check=True)
    subprocess.run(["mount", "--make-shared", folder], check=True)
    yield
    node.release(pool_names(node.root))
    subprocess.run(["umount", folder], check=True)


@pytest.mark.usefixtures("shared_mounts")
def test_a_pool_that_is_made_again_is_claimed_after_a_restart(node_with_two: Node) -> None:
    (path,) = (path for path in HOST_PATH_MANIFESTS if path.name == "engine.yaml")
    claim = (_ZIPAPP, "exec", POOL, "--", "true")
    with container_of(path, node_with_two) as container:
        node_with_two.release([POOL])
        node_with_two.prepare([pool_of(gid=GID)])
        done = container.python(*claim)
        assert done.returncode == 2
        assert "the file system is read-only" in done.stderr
        assert "start the container again" in done.stderr
    with container_of(path, node_with_two) as container:
        assert container.python(*claim).returncode == 0
