"""What an engine left in its memory, on a real kubelet: who finds it again, and who never does.

One story with examples/kubernetes/engine-warm.yaml, whose engine counts in its first byte how many
starts left their bytes there.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from testbed.chart import NAMESPACE, RELEASE, wait_for_chart
from testbed.control_plane import ControlPlane
from testbed.engine_pods import GID, EnginePods, documents, renamed_pool
from testbed.node import VirtualNode
from testbed.node_scene import agent_pod, pool_status
from testbed.processes import wait_for
from tests.node.node_pools import NodePools, pool_object

pytestmark = [pytest.mark.node, pytest.mark.timeout(1800)]

JsonObject = dict[str, Any]
_POOL = "warm"
_ENGINE = "engine-warm"
_STRANGER = "stranger"
_NEXT = "0.1.0-next"
_SECONDS = 300.0


@dataclass
class Scene:
    """The pool of one region, and the example's Deployment."""

    cluster: ControlPlane
    node: VirtualNode
    engines: EnginePods
    pools: NodePools

    def starts(self, app: str, count: int, *, pods: int = 1) -> None:
        """Wait until engines say how many starts left their bytes before them."""
        said = f"{count} starts before"
        for pod in self.engines.some(app, pods):
            self.engines.wait_line(pod, "starts before")
            assert said in self.engines.log(pod), self.engines.log(pod)

    def scale(self, replicas: int) -> None:
        """Scale the engine, and wait until pods that are too many have gone."""
        scale = ("scale", f"deployment/{_ENGINE}", f"--replicas={replicas}")
        self.cluster.kubectl("-n", "engines", *scale)
        if not replicas:
            wait_for(lambda: not self.engines.pods(_ENGINE), _SECONDS, every_s=0.5, why="it stays")

    def hostprep(self, *words: str) -> str:
        """What an administrator asks in the agent's pod."""
        agent = agent_pod(self.cluster)
        return self.cluster.kubectl("-n", NAMESPACE, "exec", agent, "--", "hostprep", *words)

    def kept(self) -> dict[str, str]:
        """The name under which each region that keeps something is kept."""
        (pool,) = json.loads(self.hostprep("status", _POOL, "-o", "json"))["pools"]
        regions = pool["regions"]
        return {each["name"]: each["kept"]["name"] for each in regions if each["kept"]}

    def wait_clean(self) -> None:
        """Wait until the agent has zeroed all regions."""
        states = f"/run/hostprep/{_POOL}/state/*"
        missing = f"ls -d {states} | while read s; do [ -e $s/clean ] || echo $s; done"
        wait_for(lambda: not self.pools.shell(missing), _SECONDS, every_s=0.5, why="not zeroed")

    def patch(self, **spec: Any) -> None:
        """Change the pool's spec."""
        patch = json.dumps({"spec": spec})
        self.cluster.kubectl("patch", "hmp", _POOL, "--type=merge", "-p", patch)

    def wait_regions(self, count: int) -> None:
        """Wait until the pool is ready with that many regions."""
        wait_for(
            lambda: (
                len(self.pools.handoff(_POOL)["regions"]) == count
                and pool_status(self.cluster, _POOL).get("phase") == "Ready"
            ),
            _SECONDS,
            every_s=0.5,
            why=f"the pool never had {count} regions",
        )

    def upgrade(self) -> None:
        """`helm upgrade` to the image that does not run now; another agent takes the pools over."""
        before = agent_pod(self.cluster)
        agent = json.loads(
            self.cluster.kubectl("-n", NAMESPACE, "get", "pod", before, "-o", "json")
        )
        tag = "" if agent["spec"]["containers"][0]["image"].endswith(_NEXT) else _NEXT
        self.cluster.helm(
            *("upgrade", RELEASE, "charts/hostprep", "--namespace", NAMESPACE),
            *("--reset-then-reuse-values", "--set", f"image.tag={tag}"),
        )
        wait_for_chart(self.cluster, timeout_s=2 * _SECONDS)
        assert agent_pod(self.cluster) != before


@pytest.fixture
def scene(
    cluster: ControlPlane, node: VirtualNode, chart: None, kubectl: Callable[..., str]
) -> Iterator[Scene]:
    engines, pools = EnginePods(kubectl), NodePools(kubectl, node)
    engines.prepare()
    with pools.held(pool_object(_POOL, "64Mi", gid=GID, regions=1)):
        yield Scene(cluster, node, engines, pools)


def _secret(kubectl: Callable[..., str], name: str) -> None:
    """As the example's first lines say."""
    token = "--from-literal=token=0123456789abcdef" + name
    kubectl("-n", "engines", "delete", "secret", name, "--ignore-not-found")
    kubectl("-n", "engines", "create", "secret", "generic", name, token)


def _engine() -> JsonObject:
    (deployment,) = renamed_pool(documents(f"{_ENGINE}.yaml"), _POOL)
    return deployment


def _stranger(replicas: int) -> JsonObject:
    """The same engine, of the same name for its contents, with a token of its own."""
    text = json.dumps(_engine()).replace("engine-warm-owner", "stranger-owner")
    other: JsonObject = json.loads(text.replace(f'"{_ENGINE}"', f'"{_STRANGER}"'))
    other["spec"]["replicas"] = replicas
    return other


def test_an_engine_that_was_killed_finds_its_bytes_and_nobody_else_does(
    scene: Scene, kubectl: Callable[..., str]
) -> None:
    _secret(kubectl, "engine-warm-owner")
    _secret(kubectl, "stranger-owner")
    with scene.engines.running([_engine()]):
        scene.starts(_ENGINE, 0)
        (region,) = scene.pools.inodes(_POOL)
        assert scene.kept() == {region: "chat"}

        scene.node.run("kill -9 $(pgrep -f '[s]tarts before this one')")
        wait_for(lambda: scene.engines.restarts(_ENGINE) == 1, _SECONDS, why="it was not killed")
        scene.starts(_ENGINE, 1)

        # The pod goes; while no process has the region the agent's next version comes, and the pool
        # gets a further region.
        inodes = scene.pools.inodes(_POOL)
        scene.scale(0)
        scene.patch(size="128Mi", regions=2)
        scene.upgrade()
        scene.wait_regions(2)
        assert scene.pools.inodes(_POOL).items() >= inodes.items()
        assert scene.kept() == {region: "chat"}
        scene.scale(1)
        scene.starts(_ENGINE, 2)
        assert region in scene.engines.log(scene.engines.one(_ENGINE))

        # Strangers that ask for both regions: what is kept gives way to them, zeroed.
        scene.scale(0)
        with scene.engines.running([_stranger(2)]):
            scene.starts(_STRANGER, 0, pods=2)

        # What strangers left: forgotten by an administrator, and older than the pool allows.
        regions = [each["name"] for each in scene.pools.handoff(_POOL)["regions"]]
        assert scene.kept() == dict.fromkeys(regions, "chat")
        assert "forgotten, zeroed" in scene.hostprep("purge", _POOL, "--region", region)
        scene.patch(retention={"maxAgeSeconds": 1})
        scene.wait_clean()
        assert scene.kept() == {}
