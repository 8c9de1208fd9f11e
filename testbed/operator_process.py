"""The operator as a real process against a testbed's API server, and what it left on objects."""

from __future__ import annotations

import copy
import json
import os
import sys
import urllib.request
from pathlib import Path
from typing import Any

from testbed.control_plane import ControlPlane
from testbed.processes import Child, free_port, wait_for

JsonObject = dict[str, Any]
NODES = "/api/v1/nodes"
POOLS = "/apis/hostprep.dev/v1alpha1/hostmemorypools"
HMNS = "/apis/hostprep.dev/v1alpha1/hostmemorynodes"


def pool_object(name: str = "kv", *, uid_label: str = "", **spec: Any) -> JsonObject:
    """A HostMemoryPool of 64 MiB on every node; keywords are fields of its spec."""
    selection = {} if spec.get("nodeSelector") else {"allNodes": True}
    return {
        "apiVersion": "hostprep.dev/v1alpha1",
        "kind": "HostMemoryPool",
        "metadata": {"name": name},
        "spec": {"size": "64Mi", "backings": ["Base"], **selection, **spec},
    }


def traceless(node: JsonObject) -> JsonObject:
    """The Node without what changes with every write."""
    node = copy.deepcopy(node)
    for name in ("resourceVersion", "managedFields"):
        node["metadata"].pop(name, None)
    return node


class OperatorProcess:
    """`hostprep-operator run`, which dies with the cluster."""

    def __init__(
        self,
        cluster: ControlPlane,
        *options: str,
        kubeconfig: Path | None = None,
        module: str = "hostprep_operator",
    ) -> None:
        """`module`: what is run; the kubeconfig may be changed between two starts."""
        self.cluster = cluster
        self._module = module
        self.options = options
        self.kubeconfig = kubeconfig or cluster.kubeconfig
        self.port = free_port()
        self.start()

    def start(self) -> None:
        """Start it (again)."""
        self.child: Child = self.cluster.spawn(
            "operator",
            [
                sys.executable,
                "-m",
                self._module,
                "run",
                f"--listen=127.0.0.1:{self.port}",
                f"--kubeconfig={self.kubeconfig}",
                *self.options,
            ],
            environ=_environ(),
        )

    def restart(self) -> None:
        """Kill it and start it again."""
        self.child.kill()
        self.start()

    def wait_ready(self, timeout_s: float = 30.0) -> None:
        """Wait until /readyz says so."""
        wait_for(
            lambda: self.page("/readyz")[0] == 200,
            timeout_s,
            why=f"operator not ready:\n{self.child.tail(40)}",
        )

    def page(self, path: str) -> tuple[int, str]:
        """Return status and text of one of its pages."""
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=5) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()

    def metric(self, name: str, **labels: str) -> float:
        """Return the sum of a metric's samples with these labels; 0 where there is none."""
        from prometheus_client.parser import text_string_to_metric_families

        total = 0.0
        for family in text_string_to_metric_families(self.page("/metrics")[1]):
            for sample in family.samples:
                if sample.name == name and labels.items() <= sample.labels.items():
                    total += sample.value
        return total

    def writes(self) -> float:
        """Return how many writes it has tried, events apart."""
        events = self.metric("hostprep_operator_writes_total", kind="Event")
        return self.metric("hostprep_operator_writes_total") - events


def run_command(cluster: ControlPlane, *arguments: str, timeout_s: float = 60) -> tuple[int, str]:
    """Run `hostprep-operator ...`; returns exit code and everything it printed."""
    child = cluster.spawn(
        "command",
        [sys.executable, "-m", "hostprep_operator", *arguments],
        environ=_environ() | {"KUBECONFIG": str(cluster.kubeconfig)},
    )
    return child.wait(timeout_s), child.output()


def parse_last_json(text: str) -> Any:
    """Return the JSON document that the output ends with."""
    return json.loads(text[text.index("{") :])


def _environ() -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("HOSTPREP_", "KUBE"))}
    return kept | {"PYTHONUNBUFFERED": "1"}
