"""The rival of a reboot storm: the shortest kubernetes.aio program that makes the same patch.

`python -m benchmarks.control_plane.bare_loop KUBECONFIG`: watches Nodes, and puts the taint on
each that shows another boot id. No queue, no cache, no retry, no record. Says `ready` once it
watches; ends with its standard input.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

from benchmarks.control_plane.api import MERGE, NODES, Api
from hostprep.api.names import CLUSTER_AUTOSCALER_TAINT

_AT_ONCE = 16


async def run(api: Api) -> None:
    """Taint until cancelled."""
    slots = asyncio.Semaphore(_AT_ONCE)
    version = await api.version(NODES)
    boots = {node["metadata"]["name"]: _boot(node) async for node in api.list(NODES)}
    print("ready", flush=True)
    tasks: set[asyncio.Task[None]] = set()
    async for line in api.watch(NODES, version):
        node = json.loads(line)["object"]
        name = node["metadata"]["name"]
        if boots.get(name) != _boot(node):
            boots[name] = _boot(node)
            tasks.add(task := asyncio.create_task(_taint(api, node, slots)))
            task.add_done_callback(tasks.discard)


def _boot(node: dict[str, Any]) -> str:
    return str(node["status"]["nodeInfo"]["bootID"])


async def _taint(api: Api, node: dict[str, Any], slots: asyncio.Semaphore) -> None:
    taints = [*node["spec"].get("taints", []), _TAINT]
    version = node["metadata"]["resourceVersion"]
    patch = {"metadata": {"resourceVersion": version}, "spec": {"taints": taints}}
    async with slots:
        await api.request("PATCH", f"{NODES}/{node['metadata']['name']}", patch, content_type=MERGE)


_TAINT = {"key": CLUSTER_AUTOSCALER_TAINT, "effect": "NoSchedule"}


async def _main(kubeconfig: str) -> None:
    async with Api(kubeconfig) as api:
        tainting = asyncio.create_task(run(api))
        await asyncio.to_thread(sys.stdin.read)
        tainting.cancel()


if __name__ == "__main__":
    asyncio.run(_main(sys.argv[1]))
