"""Engine pods of examples/kubernetes: the very manifests, changed as a user would, and watched."""

from __future__ import annotations

import copy
import json
import re
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from testbed.processes import wait_for

JsonObject = dict[str, Any]
EXAMPLES = Path(__file__).parents[1] / "examples" / "kubernetes"
HOST_PATH_MANIFESTS = sorted(
    path
    for path in EXAMPLES.parent.rglob("*.yaml")
    if "hostPath:" in path.read_text(encoding="utf-8")
)
"""All examples whose pods mount folders of the node."""
NAMESPACE = "engines"
GID = 4242
_POD_SECONDS = 300.0
"""A pod under emulation starts in some ten seconds; in a minute and a half on a busy machine."""
_PAUSE = re.compile(r"(\d+) rounds, all bytes as written; longest pause ([\d.]+) ms")


def documents(name: str | Path) -> list[JsonObject]:
    """The objects of an example, such as `engine.yaml`, as they stand."""
    return [found for found in yaml.safe_load_all((EXAMPLES / name).read_text()) if found]


def pod_specs(found: Sequence[JsonObject]) -> Iterator[JsonObject]:
    """Every pod's spec in these objects."""
    for document in found:
        if document["kind"] == "Pod":
            yield document["spec"]
        elif "template" in document.get("spec", {}):
            yield document["spec"]["template"]["spec"]


def renamed_pool(found: Sequence[JsonObject], pool: str) -> list[JsonObject]:
    """The objects for another pool than `kv`: what a user replaces by hand."""
    text = json.dumps(found)
    for before in ("wait kv", '"exec", "kv', "pool.hostprep.dev/kv", "/run/hostprep/kv"):
        text = text.replace(before, before.removesuffix("kv") + pool)
    changed: list[JsonObject] = json.loads(text)
    for spec in pod_specs(changed):
        for container in spec["containers"]:
            for variable in container.get("env", ()):
                if variable["name"] == "ENGINE_POOL":
                    variable["value"] = pool
    return changed


def pod_of(name: str, program: str, *, pool: str = "kv", **environ: str) -> JsonObject:
    """A bare pod as in engine.yaml, with a Python program of the test's own."""
    (deployment,) = renamed_pool(documents("engine.yaml"), pool)
    pod: JsonObject = copy.deepcopy(deployment["spec"]["template"])
    pod |= {"apiVersion": "v1", "kind": "Pod"}
    pod["metadata"] = {"name": name, "namespace": NAMESPACE, "labels": {"app": name}}
    (container,) = pod["spec"]["containers"]
    container["command"] = ["python3", "-u", "-c", program]
    container["env"] += [{"name": key, "value": value} for key, value in environ.items()]
    del container["readinessProbe"]
    # As process 1 it ignores SIGTERM.
    pod["spec"]["terminationGracePeriodSeconds"] = 1
    return pod


@dataclass(frozen=True, slots=True)
class Pauses:
    """What an engine reported over some time."""

    rounds: int
    longest_ms: float

    def __str__(self) -> str:
        return f"{self.longest_ms:.1f} ms"


class EnginePods:
    """The namespace `engines` on a cluster, by kubectl."""

    def __init__(self, kubectl: Callable[..., str]) -> None:
        self._kubectl = kubectl

    def prepare(self) -> None:
        """Make the namespace and the stand-in engines, as the examples' first line says."""
        for name in ("namespace.yaml", "engine-scripts.yaml"):
            self._kubectl("apply", "-f", str(EXAMPLES / name))
        wait_for(
            lambda: self._kubectl("-n", NAMESPACE, "get", "serviceaccount", "default"),
            30,
            why="the namespace got no ServiceAccount",
        )

    @contextmanager
    def running(self, found: Sequence[JsonObject]) -> Iterator[None]:
        """Apply the objects; delete them afterwards, and wait until their pods are gone."""
        text = json.dumps({"apiVersion": "v1", "kind": "List", "items": list(found)})
        self._kubectl("apply", "-f", "-", stdin=text)
        try:
            yield
        finally:
            self._kubectl("delete", "--wait=false", "--ignore-not-found", "-f", "-", stdin=text)
            apps = {_app_of(document) for document in found} - {""}
            for app in apps:
                wait_for(
                    lambda app=app: not self.pods(app),  # type: ignore[misc]
                    _POD_SECONDS,
                    every_s=0.5,
                    why=f"pods of {app} did not go",
                )

    def pods(self, app: str) -> list[JsonObject]:
        """The pods with that label, oldest first."""
        text = self._kubectl("-n", NAMESPACE, "get", "pods", "-l", f"app={app}", "-o", "json")
        found: list[JsonObject] = json.loads(text)["items"]
        return sorted(found, key=lambda pod: str(pod["metadata"]["creationTimestamp"]))

    def names(self, app: str) -> list[str]:
        """Names of the pods that are not being deleted, oldest first."""
        return [
            pod["metadata"]["name"]
            for pod in self.pods(app)
            if "deletionTimestamp" not in pod["metadata"]
        ]

    def log(self, pod: str, container: str = "engine", *options: str) -> str:
        """What a container has printed; empty while it has not begun."""
        try:
            return self._kubectl("-n", NAMESPACE, "logs", pod, "-c", container, *options)
        except subprocess.CalledProcessError:
            return ""

    def wait_line(
        self,
        pod: str,
        words: str,
        *,
        container: str = "engine",
        timeout_s: float = _POD_SECONDS,
        options: Sequence[str] = (),
    ) -> str:
        """Wait for a line with these words (a regular expression), and return the line."""

        def look() -> str | None:
            lines = self.log(pod, container, *options).splitlines()
            return next((line for line in lines if re.search(words, line)), None)

        try:
            return wait_for(look, timeout_s, every_s=0.5, why=f"no line {words!r} of {pod}")
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.describe(pod)}") from error

    def describe(self, pod: str) -> str:
        """What a person would look at: events, states and all logs of the pod."""
        try:
            return self._kubectl("-n", NAMESPACE, "describe", "pod", pod) + self._kubectl(
                *("-n", NAMESPACE, "logs", pod, "--all-containers", "--prefix", "--tail=20")
            )
        except subprocess.CalledProcessError as error:
            return str(error.stderr)

    def one(self, app: str) -> str:
        """Wait for the one pod with that label, and return its name."""
        return self.some(app, 1)[0]

    def some(self, app: str, count: int) -> list[str]:
        """Wait until that many pods are there and not being deleted; return their names."""

        def look() -> list[str] | None:
            names = self.names(app)
            return names if len(names) == count else None

        return wait_for(look, _POD_SECONDS, every_s=0.5, why=f"no {count} pods of {app}")

    def restarts(self, app: str) -> int:
        """How often containers of these pods were started again, init containers included."""
        return sum(
            status["restartCount"]
            for pod in self.pods(app)
            for kind in ("initContainerStatuses", "containerStatuses")
            for status in pod["status"].get(kind, ())
        )

    def execute(self, pod: str, *command: str, container: str = "engine") -> str:
        """Run a command in a container."""
        return self._kubectl("-n", NAMESPACE, "exec", pod, "-c", container, "--", *command)

    def kubectl_delete(self, kind: str, name: str) -> None:
        """Delete an object of the namespace, and wait until its pods are gone."""
        self._kubectl("-n", NAMESPACE, "delete", kind, name, "--cascade=foreground")

    def wait_ready(self, pod: str) -> None:
        """Wait until all containers of the pod run."""
        self._kubectl(
            *("-n", NAMESPACE, "wait", "--for=condition=Ready", f"--timeout={_POD_SECONDS:.0f}s"),
            f"pod/{pod}",
        )

    def reports(self, pod: str, container: str = "engine") -> list[Pauses]:
        """All that the engine has reported; the log must hold nothing wrong."""
        text = self.log(pod, container)
        assert "WRONG" not in text, text[-2000:]
        return [Pauses(int(rounds), float(ms)) for rounds, ms in _PAUSE.findall(text)]

    def longest(self, pod: str, since: int, *, container: str = "engine") -> Pauses:
        """The longest pause in the reports after the first `since`; waits for two of them."""

        def look() -> list[Pauses] | None:
            found = self.reports(pod, container)[since:]
            return found if len(found) >= 2 else None

        found = wait_for(look, _POD_SECONDS, every_s=0.5, why=f"{pod} reports nothing more")
        return Pauses(found[-1].rounds, max(pauses.longest_ms for pauses in found))


def _app_of(document: JsonObject) -> str:
    spec = document.get("spec", {})
    labels = spec.get("template", document).get("metadata", {}).get("labels", {})
    return str(labels.get("app", ""))
