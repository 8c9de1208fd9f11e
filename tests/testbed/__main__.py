"""The testbed's commands: `python -m tests.testbed --help`."""

from __future__ import annotations

import json
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import click

from hostprep.errors import HostprepError
from tests.testbed import binaries
from tests.testbed.cache import builder_lock, cache_folder
from tests.testbed.control_plane import ControlPlane, runs
from tests.testbed.nodes import this_machine
from tests.testbed.versions import (
    CONTROL_PLANE,
    HELM_VERSION,
    KUBECTL_VERSION,
    KUBERNETES_VERSIONS,
    go_programs,
    kubernetes_version,
)

_kubernetes = click.option(
    "--kubernetes",
    metavar="VERSION",
    envvar="KUBERNETES",
    help=f"One of {', '.join(KUBERNETES_VERSIONS)} (or 1.36, newest, oldest). [env: KUBERNETES]",
)


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def main() -> None:
    """A throw-away Kubernetes control plane: real etcd, API server, controllers and scheduler.

    Programs are built once from pinned Go modules into ~/.cache/hostprep/testbed; a cluster is
    then up in a few seconds and leaves nothing behind.
    """


@main.command()
@click.argument("programs", nargs=-1, type=click.Choice(binaries.ALL), metavar="[PROGRAM]...")
@_kubernetes
def build(programs: tuple[str, ...], kubernetes: str | None) -> None:
    """Build or fetch what is missing: all that the tests need, or the named ones.

    PROGRAM is one of etcd, kube-apiserver, kube-controller-manager, kube-scheduler, helm, kubectl,
    promtool, prometheus, karpenter.
    """
    wanted = programs or binaries.ALL
    start = time.monotonic()
    missing = [n for n in wanted if binaries.locate(n, kubernetes=kubernetes) is None]
    binaries.build(wanted, kubernetes=kubernetes, say=_say)
    if missing:
        _say(f"everything is there after {time.monotonic() - start:.0f} s")


@main.command()
@_kubernetes
@click.option("--bare", is_flag=True, help="Etcd and API server alone: nothing acts by itself.")
@click.option("--address", default="127.0.0.1", show_default=True, help="Where the API listens.")
def up(kubernetes: str | None, bare: bool, address: str) -> None:
    """Start a cluster, print how to use it, and run until Ctrl-C.

    What an earlier, killed one left behind is removed first. There is no kubelet: nodes are objects
    that you create yourself.
    """
    names = CONTROL_PLANE[:2] if bare else CONTROL_PLANE
    tools = binaries.build([*names, "kubectl", "helm"], kubernetes=kubernetes, say=_say)
    for name in runs().sweep():
        _say(f"removed what {name} left behind")
    ended = _on_signal()
    start = time.monotonic()
    cluster = ControlPlane(
        kubernetes=kubernetes, controllers=not bare, scheduler=not bare, address=address
    )
    with cluster:
        version = cluster.api.get("/version")["gitVersion"]
        _say(f"Kubernetes {version} is up after {time.monotonic() - start:.1f} s")
        click.echo(_how_to_use(cluster.kubeconfig, tools["kubectl"].parent))
        while not ended.wait(0.5):
            if not (cluster.etcd.alive and cluster.api_server.alive):
                raise click.ClickException(f"a server ended:\n{cluster.api_server.tail()}")
        _say("stopping")


@main.command()
@_kubernetes
def versions(kubernetes: str | None) -> None:
    """Show every program, its version, and where it is."""
    programs = go_programs(kubernetes_version(kubernetes))
    pinned = {name: program.version for name, program in programs.items()}
    pinned |= {"helm": HELM_VERSION, "kubectl": KUBECTL_VERSION}
    for name in binaries.ALL:
        path = binaries.locate(name, kubernetes=kubernetes)
        where = str(path) if path else "not built"
        click.echo(f"{name:24} {pinned.get(name, 'as found'):10} {where}")
    click.echo(f"{'clusters that run now':24} {', '.join(runs().alive()) or 'none'}")


@main.command()
@click.argument("name")
@click.option("--label", "labels", multiple=True, metavar="KEY=VALUE", help="May be repeated.")
def node(name: str, labels: tuple[str, ...]) -> None:
    """Print a Node object that stands for this machine, as its kubelet would register it.

    It is Ready, of this boot and this size, and has the start-up taint. For example:
    python -m tests.testbed node node-a | kubectl create -f -
    """
    wrong = [label for label in labels if "=" not in label]
    if wrong:
        raise click.BadParameter(f"{wrong[0]!r}: write it like pool=kv", param_hint="--label")
    pairs = dict(label.split("=", 1) for label in labels)
    click.echo(json.dumps(this_machine(name, labels=pairs), indent=2))


@main.command()
@click.option("--cache", is_flag=True, help="Remove the built programs as well.")
def down(cache: bool) -> None:
    """Remove what killed clusters left behind. One that runs is left alone: end it with Ctrl-C."""
    for name in runs().sweep():
        _say(f"removed what {name} left behind")
    for name in runs().alive():
        _say(f"{name} runs, and is left alone")
    if cache:
        with builder_lock(cache_folder(), _say):
            shutil.rmtree(cache_folder())
        _say(f"removed {cache_folder()}")


def _how_to_use(kubeconfig: Path, tools: Path) -> str:
    return f"""
In another terminal:

  export KUBECONFIG={kubeconfig}
  export PATH={tools}:$PWD/.venv/bin:$PATH

What to try next:

  python -m tests.testbed node node-a | kubectl create -f -       # this machine, as an object
  helm install hostprep charts/hostprep --no-hooks -n hostprep-system --create-namespace
  hostprep-operator run --agent-liveness off &
  hostprep agent --node-name node-a --state-dir /tmp/hostprep-state &
  kubectl apply -f examples/pool.yaml
  kubectl get hmp,hmn,nodes

The whole story: docs/try-cluster.md. Ctrl-C here ends the cluster and removes every trace of it.
"""


def _on_signal() -> threading.Event:
    ended = threading.Event()

    def stop(_number: int, _frame: FrameType | None) -> None:
        ended.set()

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, stop)
    return ended


def _say(line: str) -> None:
    click.echo(f"testbed: {line}", err=True)


def _run(command: Callable[[], None]) -> int:
    try:
        command()
    except HostprepError as error:
        _say(str(error))
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(_run(main))
