"""Memory goes bad for real: MADV_HWPOISON makes the kernel treat a sound page as a reported one."""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import Any

import pytest

from testbed.control_plane import ClientError, ControlPlane
from testbed.engine_pods import EnginePods, pod_of
from testbed.node import VirtualNode
from testbed.node_scene import agent_pod, node_condition, pool_status
from testbed.processes import wait_for

pytestmark = [pytest.mark.node, pytest.mark.timeout(600)]

JsonObject = dict[str, Any]
_MEM = "/run/hostprep/kv/mem"
# madvise(2), MADV_HWPOISON: asm-generic/mman-common.h, 100. Ends at once: unmapping is a touch.
_POISON = """
import ctypes, mmap, os, sys
fd = os.open(sys.argv[1], os.O_RDWR)
size = os.fstat(fd).st_size
memory = mmap.mmap(fd, size)
address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
libc = ctypes.CDLL(None, use_errno=True)
page = ctypes.c_void_p(address + int(sys.argv[2]))
failed = libc.madvise(page, ctypes.c_size_t(4096), 100)
os._exit(ctypes.get_errno() if failed else 0)
"""
_HOLD = """
import time
import hostprep.attachment
memory = hostprep.attachment.attach("kv", region="node0-0", wait_timeout_s=600)
print("attached", memory.region.name, flush=True)
time.sleep(9999)
"""


@pytest.fixture(scope="module")
def engines(kubectl: Callable[..., str], chart: object) -> EnginePods:
    found = EnginePods(kubectl)
    found.prepare()
    return found


def _poison(cluster: ControlPlane, region: str, offset: int) -> None:
    """Do it in the agent's container: the node has no Python, and this takes CAP_SYS_ADMIN."""
    agent = agent_pod(cluster)
    program = ("python3", "-c", _POISON, f"{_MEM}/{region}", str(offset))
    try:
        cluster.kubectl("-n", "hostprep-system", "exec", agent, "--", *program)
    except ClientError as error:
        if f"exit code {128 + signal.SIGBUS}" not in str(
            error
        ):  # the kernel tells who has it mapped
            raise


def _inodes(node: VirtualNode) -> dict[str, str]:
    """By region: one that is made again lies on a further mount, since bad pages stay charged."""
    words = node.run(f"stat -c '%n %i' {_MEM}*/node*").split()
    names = [word.rpartition("/")[2] for word in words[::2]]
    return dict(zip(names, words[1::2], strict=True))


def _wait_sound(cluster: ControlPlane, node: VirtualNode, before: dict[str, str]) -> dict[str, str]:
    """Wait until a region was replaced and all is Ready again; return the inodes then."""

    def look() -> bool:
        pool = pool_status(cluster, "kv")
        states = {region["state"] for region in pool["regions"]}
        found = _inodes(node)
        # The status lags behind the files: a region that is gone for a moment is not replaced yet.
        replaced = found != before and found.keys() == before.keys()
        return replaced and pool["phase"] == "Ready" and states == {"Free"}

    wait_for(look, 120, every_s=0.5, why="the region was not replaced")
    return _inodes(node)


def test_a_bad_page_costs_its_free_region_only_and_that_is_replaced(
    cluster: ControlPlane, node: VirtualNode, kv: JsonObject
) -> None:
    before = _inodes(node)
    _poison(cluster, "node1-0", 6 << 20)
    after = _wait_sound(cluster, node, before)
    changed = {path for path in after if after[path] != before.get(path)}
    assert changed == {"node1-0"}
    assert node_condition(cluster, "Damaged")["status"] == "False"
    assert int(node.run("awk '/HardwareCorrupted/ {print $2}' /proc/meminfo")) >= 4


def test_a_bad_page_under_a_lease_is_named_and_its_region_replaced_after_the_release(
    cluster: ControlPlane, node: VirtualNode, kv: JsonObject, engines: EnginePods
) -> None:
    before = _inodes(node)
    with engines.running([pod_of("holder", _HOLD)]):
        engines.wait_line("holder", "^attached")
        _poison(cluster, "node0-0", 0)

        said = wait_for(
            lambda: (
                found if (found := node_condition(cluster, "Damaged"))["status"] == "True" else None
            ),
            60,
            every_s=0.5,
            why="nobody noticed",
        )
        assert said["message"] == "kv/node0-0"
        (region,) = [r for r in pool_status(cluster, "kv")["regions"] if r["state"] == "Damaged"]
        assert "bad page" in region["message"]
        assert "offset 0x0" in region["message"]
        assert _inodes(node) == before, "it was changed under its holder"

    after = _wait_sound(cluster, node, before)
    assert {path for path in after if after[path] != before.get(path)} == {"node0-0"}
