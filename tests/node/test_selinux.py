"""SELinux enforces: engines are confined as container runtimes confine them, each with categories
of its own, and attach, and take over from one another.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from testbed.chart import NAMESPACE, wait_for_chart
from testbed.control_plane import ClientError, ControlPlane
from testbed.engine_pods import EnginePods, pod_of
from testbed.node import VirtualNode
from testbed.node_scene import agent_pod, wait_open
from testbed.processes import wait_for
from testbed.selinux import NewFiles, build_policy, enforce, load_policy, stop_enforcing

pytestmark = [pytest.mark.node, pytest.mark.timeout(1200)]

JsonObject = dict[str, Any]
_REGION = "node0-0"
_HANDOFF = "/run/hostprep/kv/handoff.json"
_ENGINE = f"""
import time
import hostprep
with open("/proc/self/attr/current") as file:
    print("confined as", file.read().strip("\\0\\n"), flush=True)
owner = hostprep.Owner("0123456789abcdef", {{"model": "the same"}}, name="engine")
memory = hostprep.attach("kv", region="{_REGION}", owner=owner, wait_timeout_s=600)
print("found", bytes(memory.buffer[:5]), flush=True)
memory.buffer[:5] = b"bytes"
time.sleep(9999)
"""
_IDLE = """
import time
print("idle", flush=True)
time.sleep(9999)
"""


@pytest.fixture(scope="module")
def engines(
    cluster: ControlPlane, node: VirtualNode, kv: JsonObject, kubectl: Callable[..., str]
) -> Iterator[EnginePods]:
    """Engines on the node while it enforces Fedora's way, with the agent confined anew as well."""
    policy = build_policy(NewFiles.AS_ITS_FOLDER, print)
    try:
        enforce(node, policy)
        found = EnginePods(kubectl)
        found.prepare()
        _restart_agent(cluster, node)
        yield found
    finally:
        stop_enforcing(node)
        wait_for_chart(cluster)
        wait_open(cluster, node)


def _restart_agent(cluster: ControlPlane, node: VirtualNode) -> None:
    cluster.kubectl("-n", NAMESPACE, "delete", "pod", agent_pod(cluster))
    wait_for_chart(cluster)
    wait_open(cluster, node)


def _labels(node: VirtualNode) -> dict[str, str]:
    """Type and level of all that lies below the root, by path."""
    listing = node.run("find /run/hostprep -exec stat -c '%C %n' {} +")
    words = (line.split(" ", 1) for line in listing.splitlines())
    return {path: ":".join(label.split(":")[2:]) for label, path in words}


@contextmanager
def _worker_stopped(node: VirtualNode) -> Iterator[None]:
    """Less than the minute after which the agent would end it."""
    node.run("pkill -STOP -f hostprep.agent.worker")
    try:
        yield
    finally:
        node.run("pkill -CONT -f hostprep.agent.worker")


def _may_read(engines: EnginePods, pod: str) -> bool:
    try:
        engines.execute(pod, "cat", _HANDOFF)
    except ClientError as error:
        if "Permission denied" not in str(error):
            raise
        return False
    return True


def _last_refusal(node: VirtualNode) -> str:
    """What the kernel logged of the last access that it denied."""
    return node.run("journalctl -k -o cat | grep 'avc:  denied' | tail -n 1")


def _doctor(cluster: ControlPlane) -> str:
    """What the doctor says of SELinux in the agent's pod, whose exit code is 1 with any finding."""
    command = "hostprep doctor || true"
    agent = ("-n", NAMESPACE, "exec", agent_pod(cluster), "--", "sh", "-c", command)
    lines = cluster.kubectl(*agent).splitlines()
    return "\n".join(line for line in lines if "SELinux" in line or "container_var_run_t" in line)


def test_what_has_the_runtimes_label_is_kept_from_engines_until_the_agent_labels_it(
    cluster: ControlPlane, node: VirtualNode, engines: EnginePods
) -> None:
    """Without labels of ours, engines are refused: the policy bites, and the doctor says so."""
    with engines.running([pod_of("looker", _IDLE)]):
        engines.wait_line("looker", "^idle")
        assert _may_read(engines, "looker")
        with _worker_stopped(node):
            node.run("chcon -R -t container_var_run_t /run/hostprep || true")
            assert not _may_read(engines, "looker")
            assert "container_var_run_t" in _doctor(cluster)
            print(refusal := _last_refusal(node))
            assert "tcontext=system_u:object_r:container_var_run_t:s0" in refusal
        wait_for(lambda: _may_read(engines, "looker"), 120, every_s=1, why="it stays unlabelled")
    assert not _doctor(cluster)
    assert set(_labels(node).values()) <= {"container_file_t:s0", "hugetlbfs_t:s0"}


@pytest.mark.parametrize("new_files", list(NewFiles))
def test_an_engine_takes_over_from_one_with_other_categories(
    new_files: NewFiles, node: VirtualNode, engines: EnginePods
) -> None:
    load_policy(node, build_policy(new_files, print))
    seen = []
    for number in range(2):
        name = f"engine-{number}-{new_files.name.lower().replace('_', '-')}"
        with engines.running([pod_of(name, _ENGINE)]):
            said = engines.wait_line(name, "^confined as")
            found = re.fullmatch(r"confined as system_u:system_r:container_t:(s0:c\d+,c\d+)", said)
            assert found, said
            seen.append(found[1])
            found_bytes = engines.wait_line(name, "^found")
            if number:
                assert "b'bytes'" in found_bytes, "it did not find what the first one left"
            print(said, found_bytes, sep="; ")
            _wait_shared(node)
    assert seen[0] != seen[1]


def _wait_shared(node: VirtualNode) -> None:
    """Wait until nothing below the root has categories: at once, or by the agent's next round."""
    wait_for(
        lambda: all(label.endswith(":s0") for label in _labels(node).values()),
        120,
        every_s=1,
        why=f"files keep categories: {_labels(node)}",
    )
