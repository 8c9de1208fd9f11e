"""What the testbed is made of: every program, its pinned version and how long it takes to build."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from hostprep.errors import BadInputError

ETCD_VERSION = "3.6.8"
HELM_VERSION = "4.3.1"
HELM_OLDEST_VERSION = "3.14.0"
"""The oldest that docs/install.md names; program `helm-3`."""
KUBECTL_VERSION = "1.37.1"
KARPENTER_VERSION = "1.14.0"
KUBERNETES_VERSIONS = ("1.37.2", "1.36.3", "1.33.13")
"""Newest first: the oldest is the oldest whose modules the Go module proxy has in full."""
DEFAULT_KUBERNETES = "1.36.3"
"""What tests and playgrounds run, the node's kubelet among them; `test_newest_kubernetes` runs a
selection beside it on the newest one."""

KUBELET_VERSION = DEFAULT_KUBERNETES
"""One for all API servers: no older kubelet is of interest here."""
CONTAINERD_VERSION = "2.4.2"
RUNC_VERSION = "1.5.2"
COREDNS_VERSION = "1.15.0"
REGISTRY_VERSION = "3.0.0"

CONTROL_PLANE = ("etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler")
NODE_PROGRAMS = (
    "kubelet",
    "kube-proxy",
    "containerd",
    "containerd-shim-runc-v2",
    "ctr",
    "runc",
    "coredns",
    "channel",
)
"""What runs inside the virtual machine; each is one static file."""


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
    tags: str = ""
    """Go build tags, separated by spaces."""
    cgo: bool = False
    """Whether it has C in it, and wants `toolchain.ensure_c` to build."""


def kubernetes_version(wanted: str | None) -> str:
    """The pinned patch release for `1.36`, `1.36.3`, `newest` or `oldest`; none means the default.

    Raises BadInputError for one that is not pinned here.
    """
    if not wanted:
        return DEFAULT_KUBERNETES
    if wanted == "newest":
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
        # As its Makefile stamps it: the chart can ask for the version of helm.
        GoProgram(
            "helm-3",
            HELM_OLDEST_VERSION,
            "helm.sh/helm/v3/cmd/helm",
            f"helm-{HELM_OLDEST_VERSION}",
            90,
            ldflags=f"-s -w -X helm.sh/helm/v3/internal/version.version=v{HELM_OLDEST_VERSION}",
        ),
        GoProgram(
            "registry",
            REGISTRY_VERSION,
            "hostprep.dev/testbed/registry",
            f"registry-{REGISTRY_VERSION}",
            60,
        ),
        *_node_programs(),
    )
    return {program.name: program for program in programs}


def _node_programs() -> tuple[GoProgram, ...]:
    return (
        _kubernetes("kubelet", KUBELET_VERSION, 90, module="kubelet"),
        _kubernetes("kube-proxy", KUBELET_VERSION, 30, module="kubelet"),
        _containerd("containerd", 80),
        _containerd("containerd-shim-runc-v2", 10),
        _containerd("ctr", 10),
        GoProgram(
            "runc",
            RUNC_VERSION,
            "github.com/opencontainers/runc",
            f"runc-{RUNC_VERSION}",
            20,
            # Static, as upstream's own release is: the node's libseccomp is another one than ours.
            ldflags=f"-s -w -X main.version={RUNC_VERSION} -linkmode external -extldflags -static",
            tags="seccomp urfave_cli_no_docs netgo osusergo",
            cgo=True,
        ),
        GoProgram(
            "coredns",
            COREDNS_VERSION,
            "hostprep.dev/testbed/coredns",
            f"coredns-{COREDNS_VERSION}",
            180,
        ),
        # Ours, of the standard library alone: its own source is its version.
        GoProgram("channel", "1", "hostprep.dev/testbed/channel", "channel", 5),
    )


def _containerd(name: str, seconds: int) -> GoProgram:
    module = "github.com/containerd/containerd/v2"
    return GoProgram(
        name,
        CONTAINERD_VERSION,
        f"{module}/cmd/{name}",
        f"containerd-{CONTAINERD_VERSION}",
        seconds,
        ldflags=f"-s -w -X {module}/version.Version=v{CONTAINERD_VERSION}",
        # Snapshotters that want C libraries, and that nobody here uses.
        tags="no_btrfs no_devmapper no_zfs",
    )


def _kubernetes(name: str, version: str, seconds: int, *, module: str = "kubernetes") -> GoProgram:
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
        name, version, package, f"{module}-{version}", seconds, ldflags=f"-s -w {stamps}"
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
