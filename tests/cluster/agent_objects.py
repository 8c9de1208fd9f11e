"""One node's HostMemoryNode in a test, written as the operator writes it."""

from __future__ import annotations

from typing import Any

from hostprep.client.handoff import read_handoff
from hostprep.node.apply.service import Node
from hostprep.node.observe.pools import observe_pools
from hostprep.paths import PoolPaths
from testbed.api import Api
from testbed.processes import wait_for

HMNS = "/apis/hostprep.dev/v1alpha1/hostmemorynodes"
JsonObject = dict[str, Any]
SMALL = {"size": "32Mi", "backings": ["HugeTLB2Mi"], "regions": 2}


class Hmn:
    """One HostMemoryNode, written as the operator does."""

    def __init__(self, api: Api, name: str) -> None:
        self.api = api
        self.name = name
        self.path = f"{HMNS}/{name}"

    def create(self, *pools: JsonObject) -> JsonObject:
        return self.api.create(
            HMNS,
            {
                "apiVersion": "hostprep.dev/v1alpha1",
                "kind": "HostMemoryNode",
                "metadata": {"name": self.name},
                "spec": {"pools": list(pools)},
            },
        )

    def ask(self, *pools: JsonObject) -> JsonObject:
        return self.api.patch(self.path, {"spec": {"pools": list(pools)}})

    def read(self) -> JsonObject:
        return self.api.get(self.path)

    def version(self) -> str:
        return str(self.read()["metadata"]["resourceVersion"])

    def pool(self, name: str = "kv") -> JsonObject:
        pools = self.read().get("status", {}).get("pools", [])
        return next((pool for pool in pools if pool["name"] == name), {})

    def phase(self, name: str = "kv") -> str:
        return str(self.pool(name).get("phase", ""))

    def wait_phase(self, phase: str, name: str = "kv", timeout_s: float = 20) -> JsonObject:
        """Wait for the phase, as an answer to the present spec."""

        def there() -> JsonObject:
            document = self.read()
            status = document.get("status", {})
            if status.get("observedGeneration") != document["metadata"]["generation"]:
                return {}
            pool = self.pool(name)
            return pool if pool.get("phase") == phase else {}

        return wait_for(there, timeout_s, why=f"{name} never became {phase}: {self.read()}")


def entry(name: str = "kv", generation: int = 1, **policy: Any) -> JsonObject:
    return {
        "name": name,
        "uid": f"uid-of-{name}",
        "generation": generation,
        "state": "Present",
        "policy": {**SMALL, **policy},
    }


def absent(name: str = "kv") -> JsonObject:
    return {"name": name, "uid": f"uid-of-{name}", "generation": 1, "state": "Absent"}


def inodes(memory: Node, pool: str = "kv") -> list[int]:
    return [region.st_ino for region in read_handoff(PoolPaths(memory.root, pool)).regions]


def pools(memory: Node) -> list[str]:
    return [pool.name for pool in observe_pools(memory.root)]
