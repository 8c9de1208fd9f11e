"""Regions as devices: a real agent and real memory, and containers with what Allocate injected.

The other end is a kubelet's device half of our own, on the true protocol; tier `node` has a real
one.
"""

from __future__ import annotations

import json
import os
import select
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from hostprep.agent.desired import DesiredState, Source, save
from hostprep.api.node_resource import PoolEntry
from hostprep.client.attach import attach
from hostprep.client.handoff import read_handoff
from hostprep.linux.processes import boot_id
from hostprep.node.apply.service import Node
from hostprep.paths import PoolPaths
from testbed.agent_process import AgentProcess
from testbed.processes import wait_for
from tests.kernel.deviceplugin.injected import Injected
from tests.support.kubelet_devices import KubeletDevices

pytestmark = pytest.mark.kernel

POOL = "kv"
RESOURCE = "hostprep.dev/kv"
GID = 4242
PYTHON = os.path.realpath(sys.executable)
POLICY = {
    "size": "16Mi",
    "backings": ["Base"],
    "regions": 2,
    "attach": {"mode": "devicePlugin"},
    "access": {"gid": GID},
}
Start = Callable[..., AgentProcess]

_HOLD = """
import sys, time
sys.path.insert(0, "{pyz}")
from hostprep import attach
with attach("kv", wait_timeout_s=60) as memory:
    assert not any(memory.buffer), "old bytes"
    memory.buffer[:] = b"x" * memory.size_bytes
    print("holds", memory.region.name, flush=True)
    time.sleep(600)
"""


@pytest.fixture
def kubelet_dir() -> Iterator[Path]:
    """A short one: sockets' names are."""
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder, "kubelet")


@pytest.fixture
def start(node: Node, tmp_path: Path, kubelet_dir: Path) -> Iterator[Start]:
    """Start an agent that works from saved entries: there is no API server here."""
    Path(node.root).parent.chmod(0o755)
    started: list[AgentProcess] = []

    def begin(*options: str, interval_s: float = 60.0, **policy: Any) -> AgentProcess:
        entry = PoolEntry(
            name=POOL, uid="u", generation=1, absent=False, policy={**POLICY, **policy}
        )
        state = tmp_path / "state"
        state.mkdir(exist_ok=True)
        save(str(state), DesiredState(source=Source.SAVED, boot_id=boot_id(), entries=(entry,)))
        options = ("--kubelet-dir", str(kubelet_dir), *options)
        agent = AgentProcess("n1", node.root, state, None, *options, interval_s=interval_s)
        started.append(agent)
        return agent

    yield begin
    for agent in started:
        agent.close()


@pytest.fixture
def kubelet(kubelet_dir: Path) -> Iterator[KubeletDevices]:
    with KubeletDevices(kubelet_dir) as kubelet:
        yield kubelet


def healths(kubelet: KubeletDevices) -> list[str]:
    return sorted(kubelet.health(RESOURCE).values())


def wait_healthy(kubelet: KubeletDevices, count: int = 2) -> None:
    wait_for(lambda: healths(kubelet) == ["Healthy"] * count, 30)


def container(kubelet: KubeletDevices, folder: Path, *devices: str) -> Injected:
    return Injected(folder, kubelet.allocate(RESOURCE, *devices), gid=GID)


def pyz(node: Node) -> str:
    return f"{node.root}/hostprep.pyz"


def attach_in(container: Injected, node: Node, *options: str) -> dict[str, Any]:
    """Attach by the zipapp, as an engine's container does."""
    command = (PYTHON, pyz(node), "attach", "--pool", POOL, "-o", "json", *options)
    done = container.run(*command)
    assert done.returncode == 0, done.stdout + done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_devices_are_told_once_the_regions_are_there(
    start: Start, kubelet: KubeletDevices, node: Node
) -> None:
    agent = start()
    wait_healthy(kubelet)
    published = {region.name for region in read_handoff(PoolPaths(node.root, POOL)).regions}
    assert set(kubelet.health(RESOURCE)) == published
    wait_for(lambda: agent.metric("hostprep_device_plugin_registered", pool=POOL) == 1)
    assert agent.metric("hostprep_devices", pool=POOL, health="Healthy") == 2
    assert agent.metric("hostprep_devices", pool=POOL, health="Unhealthy") == 0


def test_a_container_with_nothing_else_attaches(
    start: Start, kubelet: KubeletDevices, node: Node, tmp_path: Path
) -> None:
    start()
    wait_healthy(kubelet)
    there = container(kubelet, tmp_path, "node0-1")
    ready = there.run(PYTHON, pyz(node), "wait", "--pool", POOL, "-o", "json")
    assert json.loads(ready.stdout)["size_bytes"] == 8 << 20, ready.stderr
    assert attach_in(there, node)["regions"] == ["node0-1"]


def test_it_sees_its_region_and_nothing_else_of_the_pool(
    start: Start, kubelet: KubeletDevices, node: Node, tmp_path: Path
) -> None:
    start()
    wait_healthy(kubelet)
    there = container(kubelet, tmp_path, "node0-0")
    listed = there.run("sh", "-c", f"cd {node.root}; find . | sort; env").stdout.splitlines()
    seen = {line for line in listed if line.startswith("./")}
    assert seen == {
        "./hostprep.pyz",
        "./kv",
        "./kv/claim.lock",
        "./kv/handoff.json",
        "./kv/links",
        "./kv/mem",
        "./kv/mem/node0-0",
        "./kv/state",
        "./kv/state/node0-0",
        "./kv/state/node0-0/clean",
        "./kv/state/node0-0/users",
        "./kv/tickets",
        "./turnstile",
        "./turnstile/node",
        "./turnstile/node/slot0",
    }
    assert "HOSTPREP_REGION=node0-0" in listed


def test_it_can_change_nothing_but_its_own(
    start: Start, kubelet: KubeletDevices, node: Node, tmp_path: Path
) -> None:
    start()
    wait_healthy(kubelet)
    there = container(kubelet, tmp_path, "node0-0")
    for attempt in (
        f"rm -f {node.root}/kv/handoff.json",
        f"touch {node.root}/kv/mine",
        f"mv {node.root}/kv/mem/node0-0 {node.root}/kv/mem/other",
        f"rm {node.root}/kv/claim.lock",
        f"touch {node.root}/kv/state/node0-1",
        f"echo >> {node.root}/hostprep.pyz",
    ):
        done = there.run("sh", "-c", attempt)
        assert done.returncode != 0, attempt
    assert attach_in(there, node)["regions"] == ["node0-0"]


def test_two_devices_are_claimed_in_one_step(
    start: Start, kubelet: KubeletDevices, node: Node, tmp_path: Path
) -> None:
    start()
    wait_healthy(kubelet)
    there = container(kubelet, tmp_path, "node0-1", "node0-0")
    assert attach_in(there, node, "--count", "2")["regions"] == ["node0-0", "node0-1"]


def test_a_lease_in_a_container_is_seen_and_its_end_leaves_a_clean_region_at_once(
    start: Start, kubelet: KubeletDevices, node: Node, tmp_path: Path
) -> None:
    """The rounds are a minute apart: what is seen sooner was heard."""
    start()
    wait_healthy(kubelet)
    there = container(kubelet, tmp_path, "node0-0")
    with there.started(PYTHON, "-c", _HOLD.format(pyz=pyz(node))) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "holds node0-0\n"
        assert healths(kubelet) == ["Healthy", "Healthy"]

        # Kubelet knows nothing of leases: here it gives the region to a second container.
        second = container(kubelet, tmp_path, "node0-0")
        with second.started(PYTHON, "-c", _HOLD.format(pyz=pyz(node))) as waiter:
            assert waiter.stdout is not None
            wait_for(lambda: os.listdir(PoolPaths(node.root, POOL).tickets), 20)
            assert not select.select([waiter.stdout], [], [], 0)[0]
            os.killpg(holder.pid, signal.SIGKILL)
            holder.wait()
            assert waiter.stdout.readline() == "holds node0-0\n"
    wait_healthy(kubelet)


@pytest.mark.parametrize("backing", ["Base", "HugeTLB2Mi"])
def test_between_two_owners_the_device_is_unhealthy_until_it_is_clean(
    start: Start, kubelet: KubeletDevices, node: Node, tmp_path: Path, backing: str
) -> None:
    """The rounds are a minute apart here as well, on either kind of file system."""
    start(backings=[backing])
    wait_healthy(kubelet)
    seen: list[dict[str, str]] = []
    there = container(kubelet, tmp_path, "node0-0")
    with there.started(PYTHON, "-c", _HOLD.format(pyz=pyz(node))) as holder:
        assert holder.stdout is not None
        holder.stdout.readline()
    updates = kubelet.updates(RESOURCE)

    def look() -> bool:
        seen.append(kubelet.health(RESOURCE))
        return kubelet.updates(RESOURCE) >= updates + 2 and healths(kubelet) == ["Healthy"] * 2

    wait_for(look, 20, every_s=0.001)
    assert {"node0-0": "Unhealthy", "node0-1": "Healthy"} in seen


def test_a_claim_on_the_node_and_one_in_the_container_exclude_each_other(
    start: Start, kubelet: KubeletDevices, node: Node, tmp_path: Path
) -> None:
    """The locks are on the same inodes, however they are reached."""
    start()
    wait_healthy(kubelet)
    there = container(kubelet, tmp_path, "node0-0")
    with attach(POOL, region="node0-0", root=node.root):
        refused = there.run(PYTHON, pyz(node), "attach", "--pool", POOL)
        assert refused.returncode == 1
        assert "node0-0" in refused.stderr
    assert attach_in(there, node, "--wait", "30")["regions"] == ["node0-0"]


def test_an_engines_end_is_its_containers_too_with_exec_and_a_link(
    start: Start, kubelet: KubeletDevices, node: Node, tmp_path: Path
) -> None:
    start()
    wait_healthy(kubelet)
    there = container(kubelet, tmp_path, "node0-0")
    for _ in range(2):
        done = there.run(
            *(PYTHON, pyz(node), "exec", "--pool", POOL, "--wait", "60"),
            *("--link", f"{node.root}/kv/links/engine.bin", "--", "sh", "-c"),
            f'readlink -f {node.root}/kv/links/engine.bin; echo "$HOSTPREP_PATH"',
        )
        assert done.returncode == 0, done.stdout + done.stderr
        assert done.stdout.splitlines() == [f"{node.root}/kv/mem/node0-0"] * 2


def test_links_in_a_containers_view_go_with_the_scrub(
    start: Start, kubelet: KubeletDevices, node: Node, tmp_path: Path
) -> None:
    start(interval_s=0.3)
    wait_healthy(kubelet)
    there = container(kubelet, tmp_path, "node0-0")
    for name in ("a", "b"):
        done = there.run(
            *(PYTHON, pyz(node), "exec", "--wait", "60", "--link"),
            *(f"{node.root}/kv/links/engine-{name}.bin", "--", "mkdir", "-p"),
            f"{node.root}/kv/links/node0-0@in-the-way",
        )
        assert done.returncode == 0, done.stdout + done.stderr
    links = Path(PoolPaths(node.root, POOL).devices, "node0-0", "links")
    assert links.is_dir()
    wait_for(lambda: [entry.name for entry in links.iterdir()] == ["node0-0@in-the-way"])


def test_a_region_that_its_engine_shrank_is_rebuilt_and_had_by_the_next_container(
    start: Start, kubelet: KubeletDevices, node: Node, tmp_path: Path
) -> None:
    start(interval_s=0.3)
    wait_healthy(kubelet)
    there = container(kubelet, tmp_path, "node0-0")
    shrunk = there.run(PYTHON, "-c", f"import os; os.truncate('{node.root}/kv/mem/node0-0', 4096)")
    assert shrunk.returncode == 0, shrunk.stderr

    wait_for(lambda: read_handoff(PoolPaths(node.root, POOL)).generation > 1, 30)
    wait_healthy(kubelet)

    again = container(kubelet, tmp_path, "node0-0")
    assert attach_in(again, node)["size_bytes"] == 8 << 20


def test_an_agent_that_is_replaced_leaves_the_engine_alone(
    start: Start, kubelet: KubeletDevices, node: Node, tmp_path: Path
) -> None:
    first = start()
    wait_healthy(kubelet)
    there = container(kubelet, tmp_path, "node0-0")
    with there.started(PYTHON, "-c", _HOLD.format(pyz=pyz(node))) as holder:
        assert holder.stdout is not None
        holder.stdout.readline()
        assert first.stop() == 0
        wait_for(lambda: not kubelet.is_connected(RESOURCE))
        start()
        wait_healthy(kubelet)
        assert holder.poll() is None


def test_an_owner_whose_bytes_are_kept_does_not_keep_the_device(
    start: Start, kubelet: KubeletDevices, node: Node, tmp_path: Path
) -> None:
    """Kubelet gives it to somebody else: who waits has it zeroed."""
    start(interval_s=0.3)
    wait_healthy(kubelet)
    script = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "from hostprep import attach\n"
        "from hostprep import Owner\n"
        "with attach('kv', owner=Owner('a secret of sixteen'), wait_timeout_s=30) as memory:\n"
        "    memory.buffer[:4] = b'mine'\n"
    )
    there = container(kubelet, tmp_path, "node0-0")
    kept = there.run(PYTHON, "-c", script, pyz(node))
    assert kept.returncode == 0, kept.stderr
    with there.started(PYTHON, "-c", _HOLD.format(pyz=pyz(node))) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "holds node0-0\n"


def test_a_pool_that_is_scrubbed_on_claim_is_scrubbed_for_who_waits(
    start: Start, kubelet: KubeletDevices, node: Node, tmp_path: Path
) -> None:
    start(interval_s=0.3, scrub={"when": "OnClaim"})
    wait_healthy(kubelet)
    there = container(kubelet, tmp_path, "node0-0")
    attach_in(there, node)
    wait_healthy(kubelet)
    assert attach_in(there, node, "--wait", "30")["regions"] == ["node0-0"]


def test_without_a_kubelet_the_agent_works_and_says_so_once(
    start: Start, node: Node, kubelet_dir: Path
) -> None:
    agent = start(interval_s=0.2)
    wait_for(lambda: agent.metric("hostprep_regions_leased", pool=POOL) == 0)
    wait_for(lambda: agent.get("/readyz")[0] == 200)

    def said() -> list[dict[str, Any]]:
        return [line for line in agent.log() if line["event"] == "device_plugin_not_registered"]

    wait_for(said)
    rounds = agent.metric("hostprep_verify_duration_seconds_count")
    wait_for(lambda: agent.metric("hostprep_verify_duration_seconds_count") > rounds + 10)
    assert len(said()) == 1
    assert "--kubelet-dir" in said()[0]["remedy"]
    with KubeletDevices(kubelet_dir) as kubelet:
        wait_healthy(kubelet)


def test_hostpath_pools_are_no_devices(start: Start, kubelet: KubeletDevices) -> None:
    agent = start(interval_s=0.2, attach={"mode": "hostPath"})
    wait_for(lambda: agent.metric("hostprep_verify_duration_seconds_count") > 5)
    assert kubelet.registrations == 0
