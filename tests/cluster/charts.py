"""The chart, rendered by the real helm, and the custom resources of others that it may use."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml

from hostprep.errors import NotReadyError
from testbed.binaries import find
from testbed.cache import cache_folder
from testbed.chart import IMAGE
from testbed.control_plane import ControlPlane
from testbed.go_programs import find_go
from testbed.processes import wait_for

CHART = Path(__file__).parents[2] / "charts" / "hostprep"
RELEASE, NAMESPACE = "hostprep", "hostprep-system"
PROMETHEUS_OPERATOR = "github.com/prometheus-operator/prometheus-operator@v0.85.0"
_OWN_CRDS = Path(__file__).parents[2] / "testbed" / "crds"
_SELECTOR = '{"matchLabels":{"pool.hostprep.dev/kv":"true"}}'
PROFILES: dict[str, tuple[str, ...]] = {
    profile: ("--set", f"autoscaler.profile={profile}")
    for profile in ("clusterAutoscaler", "karpenter", "nodeReadinessController", "none")
}
PROFILES["nodeReadinessController"] += (
    "--set-json",
    f"autoscaler.nodeReadinessRule.nodeSelector={_SELECTOR}",
)
PLATFORMS = tuple(
    ("--values", str(path))
    for path in sorted((CHART.parents[1] / "examples" / "platforms").glob("values-*.yaml"))
)
"""Options of helm for each values file of examples/platforms."""
MONITORING = ("--api-versions", "monitoring.coreos.com/v1")


HELMS = ("helm", "helm-3")
"""The newest, and the oldest that docs/install.md names."""
_KUBERNETES = ("--kube-version", "1.36.3")
"""For a helm without a cluster: it takes one of its own age, and the chart refuses old ones."""


def _helm(*arguments: str, program: str = "helm") -> subprocess.CompletedProcess[str]:
    try:
        helm = find(program)
    except NotReadyError as error:
        pytest.skip(str(error))
    environ = {"PATH": os.environ.get("PATH", ""), "HOME": "/nonexistent"}
    command = [str(helm), *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=60, env=environ
    )


def _template(*options: str, helm: str) -> subprocess.CompletedProcess[str]:
    where = ("--namespace", NAMESPACE, *_KUBERNETES)
    return _helm("template", RELEASE, str(CHART), *where, *IMAGE, *options, program=helm)


def render_text(*options: str, helm: str = "helm") -> str:
    """`helm template` as text."""
    done = _template(*options, helm=helm)
    assert done.returncode == 0, done.stderr
    return done.stdout


class _EachKeyOnce(yaml.CSafeLoader):
    """YAML of which no key comes twice: the API server refuses that when it applies."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [key.value for key, _ in node.value]
        twice = sorted({key for key in keys if keys.count(key) > 1})
        assert not twice, f"{twice} twice in line {node.start_mark.line}"
        return super().construct_mapping(node, deep=deep)


def render(*options: str, helm: str = "helm") -> list[dict[str, Any]]:
    """Every object that the chart makes with these options of helm's, hooks included."""
    text = render_text(*options, helm=helm)
    return [document for document in yaml.load_all(text, _EachKeyOnce) if document]


def render_error(*options: str, helm: str = "helm") -> str:
    """What helm says when it refuses."""
    done = _template(*options, helm=helm)
    assert done.returncode != 0, "helm accepted it"
    return done.stderr


def lint(*options: str, helm: str = "helm") -> str:
    """What `helm lint --strict` says; warnings count as failures."""
    done = _helm("lint", "--strict", str(CHART), *_KUBERNETES, *options, program=helm)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def notes(*options: str) -> str:
    """What a person reads after `helm install`."""
    done = _helm(
        *("install", RELEASE, str(CHART), "--namespace", NAMESPACE),
        *("--dry-run=client", "--hide-secret", *IMAGE, *options),
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.partition("NOTES:\n")[2]


def foreign_crds() -> list[Path]:
    """Custom resources of prometheus-operator, from its Go module, and our minimal stand-ins for
    those of node-readiness-controller and OpenShift, whose modules are not to be had.
    """
    go = find_go(cache=cache_folder(), say=print)
    done = subprocess.run(
        [str(go), "mod", "download", "-json", PROMETHEUS_OPERATOR],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    folder = Path(json.loads(done.stdout)["Dir"]) / "example" / "prometheus-operator-crd"
    kinds = ("podmonitors", "prometheusrules")
    theirs = [folder / f"monitoring.coreos.com_{kind}.yaml" for kind in kinds]
    return [*theirs, *sorted(_OWN_CRDS.glob("*.yaml"))]


def load_crds(cluster: ControlPlane, paths: Sequence[Path]) -> None:
    """Apply custom resource definitions and wait until they are served."""
    for path in paths:
        cluster.kubectl("apply", "--server-side", "-f", str(path))
        cluster.kubectl("wait", "--for=condition=Established", "--timeout=30s", "-f", str(path))


def give_cleanup_its_rights(cluster: ControlPlane) -> None:
    """Apply the clean-up hook's identity and roles, which a release without hooks lacks."""
    kinds = {"ServiceAccount", "ClusterRole", "ClusterRoleBinding", "Role", "RoleBinding"}
    for document in render():
        if document["metadata"]["name"] == "hostprep-cleanup" and document["kind"] in kinds:
            cluster.kubectl("apply", "-f", "-", stdin=json.dumps(document))


def _is_served(cluster: ControlPlane, path: str) -> bool:
    return cluster.api.request("GET", path).status == 200


@contextmanager
def cluster_with_the_chart(
    *options: str, helm: str = "helm", kubernetes: str | None = None, controllers: bool = True
) -> Iterator[ControlPlane]:
    """A control plane, and the release `hostprep` on it without its hooks.

    Without controllers the namespace has no ServiceAccount `default`, and the chart's workloads
    stay objects.
    """
    try:
        cluster = ControlPlane(kubernetes=kubernetes, controllers=controllers)
    except NotReadyError as error:
        pytest.skip(str(error))
    with cluster:
        cluster.helm(
            *("install", RELEASE, str(CHART), "--no-hooks", *IMAGE),
            *("--namespace", NAMESPACE, "--create-namespace", *options),
            program=helm,
        )
        accounts = f"/api/v1/namespaces/{NAMESPACE}/serviceaccounts"
        if controllers:
            wait_for(lambda: cluster.api.exists(f"{accounts}/default"), why="no ServiceAccount")
        # For a while after it is established, the API server answers 429 for a definition.
        for plural in ("hostmemorypools", "hostmemorynodes"):
            path = f"/apis/hostprep.dev/v1alpha1/{plural}"
            wait_for(partial(_is_served, cluster, path), why=f"{plural} are not served")
        yield cluster
