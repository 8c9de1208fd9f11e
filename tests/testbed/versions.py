"""What the testbed is made of: every program, its pinned version and how long it takes to build."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from hostprep.errors import BadInputError

__all__ = [
    "CONTROL_PLANE",
    "ETCD_VERSION",
    "HELM_VERSION",
    "KARPENTER_VERSION",
    "KUBECTL_VERSION",
    "KUBERNETES_VERSIONS",
    "GoProgram",
    "go_programs",
    "go_version",
    "kubernetes_version",
]

ETCD_VERSION = "3.6.8"
HELM_VERSION = "4.3.1"
KUBECTL_VERSION = "1.37.1"
KARPENTER_VERSION = "1.14.0"
KUBERNETES_VERSIONS = ("1.36.3", "1.33.13")
"""Newest first: the oldest is the oldest whose modules the Go module proxy has in full."""

CONTROL_PLANE = ("etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler")


@dataclass(frozen=True, slots=True)
class GoProgram:
    """A program out of a Go module, with what it takes to build it again, bit by bit the same."""

    name: str
    version: str
    package: str
    module: str
    """Folder below `modules/` with the go.mod and go.sum that pin all of its source."""
    expected_seconds: int
    """Measured with cold caches, downloads apart, on two cores."""
    ldflags: str = "-s -w"


def kubernetes_version(wanted: str | None) -> str:
    """The pinned patch release for `1.36`, `1.36.3`, `newest` or `oldest`; none means the newest.

    Raises BadInputError for one that is not pinned here.
    """
    if not wanted or wanted == "newest":
        return KUBERNETES_VERSIONS[0]
    if wanted == "oldest":
        return KUBERNETES_VERSIONS[-1]
    plain = wanted.removeprefix("v")
    for version in KUBERNETES_VERSIONS:
        if plain in {version, version.rpartition(".")[0]}:
            return version
    choices = ", ".join(version.rpartition(".")[0] for version in KUBERNETES_VERSIONS)
    raise BadInputError(
        f"the testbed has no Kubernetes {wanted!r}", remedy=f"choose one of {choices}"
    )


def go_programs(kubernetes: str) -> dict[str, GoProgram]:
    """Every program built from Go modules, by name, for a pinned Kubernetes version."""
    programs: Iterable[GoProgram] = (
        GoProgram("etcd", ETCD_VERSION, "go.etcd.io/etcd/server/v3", f"etcd-{ETCD_VERSION}", 70),
        _kubernetes("kube-apiserver", kubernetes, 360),
        _kubernetes("kube-controller-manager", kubernetes, 110),
        _kubernetes("kube-scheduler", kubernetes, 10),
        GoProgram(
            "karpenter",
            KARPENTER_VERSION,
            "sigs.k8s.io/karpenter/kwok",
            f"karpenter-{KARPENTER_VERSION}",
            180,
        ),
    )
    return {program.name: program for program in programs}


def _kubernetes(name: str, version: str, seconds: int) -> GoProgram:
    major, minor, _ = version.split(".")
    values = {
        "k8s.io/component-base/version.gitVersion": f"v{version}",
        "k8s.io/client-go/pkg/version.gitVersion": f"v{version}",
        "k8s.io/component-base/version.gitMajor": major,
        "k8s.io/component-base/version.gitMinor": minor,
    }
    # Without them the API server calls itself v0.0.0, and clients refuse to talk to it.
    stamps = " ".join(f"-X {key}={value}" for key, value in values.items())
    package = f"k8s.io/kubernetes/cmd/{name}"
    return GoProgram(
        name, version, package, f"kubernetes-{version}", seconds, ldflags=f"-s -w {stamps}"
    )


def go_version(text: str) -> tuple[int, int, int]:
    """The numbers in `go1.26.8`, `1.26`, `go1.27rc1`; raises BadInputError for anything else."""
    numbers: list[int] = []
    for part in text.strip().removeprefix("go").split(".")[:3]:
        digits = part[: next((i for i, c in enumerate(part) if not c.isdecimal()), len(part))]
        if not digits:
            raise BadInputError(f"{text!r} is no version of Go")
        numbers.append(int(digits))
    major, minor, patch = [*numbers, 0, 0][:3]
    return major, minor, patch
