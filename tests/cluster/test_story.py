"""The whole story on a real API server and real memory, as an administrator sees it by kubectl.

The chart is installed, operator and agent run as processes with tokens of the chart's own
ServiceAccounts, and examples/pool.yaml is applied. What kubectl shows is kept in golden files;
UPDATE_GOLDEN=1 rewrites them.
"""

from __future__ import annotations

import json
import os
import re
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from hostprep.node.apply.service import Node
from hostprep.node.observe.pools import observe_pools
from testbed.agent_process import AgentProcess
from testbed.api import ApiError
from testbed.control_plane import ControlPlane
from testbed.machine import clean_node, huge_pages_total, machine_lock
from testbed.nodes import create_node, this_machine
from testbed.operator_process import NODES, OperatorProcess, traceless
from testbed.processes import wait_for
from tests.cluster.charts import NAMESPACE, cluster_with_the_chart

pytestmark = pytest.mark.cluster

_GOLDEN = Path(__file__).parent / "golden"
_EXAMPLE = Path(__file__).parents[2] / "examples" / "pool.yaml"
_NAME = "node-a"
_UUID = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}")
_VARYING = (
    (_UUID, "<uid>"),
    (re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ"), "<time>"),
    (re.compile(r"\w{3}, \d\d \w{3} \d{4} \d\d:\d\d:\d\d \+\d{4}"), "<time>"),
    (re.compile(r"(Resource Version: +)\d+"), r"\1<version>"),
    (re.compile(r"(Seconds: +)\d+(\.\d+)?$", re.MULTILINE), r"\1<seconds>"),
    (re.compile(r"<uid>/\d+"), "<uid>/<version>"),
    (re.compile(r"(?<=\s)(\d+[smh])+(?=\s)"), "<age>"),
    (re.compile(r"(cpu|memory|Total|Held): +\S+"), r"\1: <number>"),
    (re.compile(r'"openedAt".*'), '"openedAt"...'),
    (re.compile(r"(?<=\S) +"), " "),
)


@dataclass(frozen=True, slots=True)
class Stage:
    """Everything that plays a part."""

    cluster: ControlPlane
    memory: Node
    agent: AgentProcess
    operator: OperatorProcess


@pytest.fixture(scope="module")
def stage() -> Iterator[Stage]:
    """The chart installed, one node that stands for this machine, operator and agent running."""
    if os.geteuid() != 0:
        pytest.skip("needs root: the agent mounts real memory")
    with (
        cluster_with_the_chart() as cluster,
        machine_lock(),
        clean_node() as memory,
        tempfile.TemporaryDirectory() as folder,
    ):
        node = create_node(cluster.api, this_machine(_NAME))
        operator = OperatorProcess(
            cluster,
            "--agent-liveness=off",
            f"--namespace={NAMESPACE}",
            kubeconfig=cluster.token_kubeconfig(NAMESPACE, "hostprep-operator"),
        )
        operator.wait_ready()
        token = cluster.token_kubeconfig(NAMESPACE, "hostprep-agent", node=node["metadata"]["name"])
        agent = AgentProcess(_NAME, memory.root, Path(folder) / "state", token)
        try:
            yield Stage(cluster, memory, agent, operator)
        finally:
            agent.close()


def _delete_at_once(stage: Stage) -> None:
    """Delete the pool without its grace period: the word first, and once nodes have it, the act."""
    kubectl = stage.cluster.kubectl
    patch = json.dumps({"spec": {"release": {"when": "Immediately"}, "deletionProtection": "None"}})
    kubectl("patch", "hmp", "kv", "--type=merge", "-p", patch)
    wait_for(lambda: "Immediately" in kubectl("get", "hmn", _NAME, "-o", "json"), 30)
    kubectl("delete", "hmp", "kv")


def test_the_story(stage: Stage) -> None:
    """Apply the example, see it told, delete it, and find no trace."""
    api, kubectl = stage.cluster.api, stage.cluster.kubectl
    before = traceless(api.get(f"{NODES}/{_NAME}"))
    pages = huge_pages_total()

    kubectl("apply", "-f", str(_EXAMPLE))
    wait_for(lambda: _is_open(stage), 120, why=stage.agent.log_text())
    kubectl("wait", "--for=condition=Ready", "hmp/kv", "--timeout=90s")
    wait_for(lambda: "MemoryReady" in kubectl("get", "events"), 90, why="no event")

    _compare("get", kubectl("get", "hmp,hmn,nodes"))
    _compare("get-wide", kubectl("get", "hmp,hmn", "-o", "wide"))
    for kind, name in (("hmp", "kv"), ("hmn", _NAME), ("node", _NAME)):
        text = kubectl("describe", kind, name)
        _compare(f"describe-{kind}", text if kind != "node" else _ours_of_node(text))
    assert huge_pages_total() > pages or "Base" in kubectl("get", "hmn", "-o", "json")

    _delete_at_once(stage)
    wait_for(lambda: not kubectl("get", "hmn", "-o", "name").strip(), 120, why="hmn stays")
    wait_for(lambda: traceless(api.get(f"{NODES}/{_NAME}")) == _untainted(before), 90)
    assert observe_pools(stage.memory.root) == ()
    assert huge_pages_total() == pages
    assert not os.path.exists(stage.memory.root)


def test_an_agent_cannot_speak_for_another_node(stage: Stage) -> None:
    """The token that the agent used is of no use for other nodes' objects."""
    api = stage.cluster.api
    create_node(api, this_machine("node-b"))
    stage.cluster.kubectl("apply", "-f", str(_EXAMPLE))
    path = "/apis/hostprep.dev/v1alpha1/hostmemorynodes/node-b"
    wait_for(lambda: api.exists(path), 90, why="no HostMemoryNode for node-b")
    token = stage.cluster.token_kubeconfig(NAMESPACE, "hostprep-agent", node=_NAME)
    patch = json.dumps({"status": {"summary": "mine"}})
    with pytest.raises((AssertionError, ApiError, Exception), match=r"(?i)forbidden|denied"):
        stage.cluster.kubectl(
            *("patch", "hmn", "node-b", "--subresource=status", "--type=merge", "-p", patch),
            kubeconfig=token,
        )
    _delete_at_once(stage)
    api.delete(f"{NODES}/node-b")
    wait_for(lambda: observe_pools(stage.memory.root) == (), 120, why="memory stays")


def _is_open(stage: Stage) -> bool:
    node = stage.cluster.api.get(f"{NODES}/{_NAME}")
    return not node["spec"].get("taints") and "ready.hostprep.dev/kv" in node["metadata"]["labels"]


def _untainted(node: dict[str, object]) -> dict[str, object]:
    """Opening removed the start-up taint, whoever put it there: all else is as it was."""
    spec = node["spec"]
    assert isinstance(spec, dict)
    return node | {"spec": {key: value for key, value in spec.items() if key != "taints"}}


def _ours_of_node(text: str) -> str:
    """What tells of us in a Node's description; kubectl orders events of one second at will."""
    head, _, events = text.partition("\nEvents:")
    wanted = ("hostprep", "Taints", "Type ", "Name:")
    lines = [line for line in head.splitlines() if any(word in line for word in wanted)]
    return "\n".join([*lines, *sorted(line for line in events.splitlines() if "Memory" in line)])


def _compare(name: str, text: str) -> None:
    for pattern, replacement in _VARYING:
        text = pattern.sub(replacement, text)
    text = "\n".join(line.rstrip() for line in text.splitlines()).strip() + "\n"
    path = _GOLDEN / f"story-{name}.txt"
    if os.environ.get("UPDATE_GOLDEN"):
        path.write_text(text, encoding="utf-8")
    assert text == path.read_text(encoding="utf-8"), f"{path.name}: UPDATE_GOLDEN=1 rewrites it"
