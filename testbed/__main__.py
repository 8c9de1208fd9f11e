"""The testbed's commands: `python -m testbed --help`."""

from __future__ import annotations

import json
import shutil
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path

import click

from hostprep.errors import HostprepError
from testbed import binaries, model_configs, playground
from testbed.cache import builder_lock, cache_folder
from testbed.control_plane import ControlPlane, runs
from testbed.engines import environments
from testbed.karpenter import crd_files
from testbed.node import NodeParts, build_node_parts
from testbed.nodes import this_machine
from testbed.playground import open_console
from testbed.versions import (
    CONTROL_PLANE,
    HELM_VERSION,
    KUBECTL_VERSION,
    KUBELET_VERSION,
    KUBERNETES_VERSIONS,
    NODE_PROGRAMS,
    go_programs,
    kubernetes_version,
)

_kubernetes = click.option(
    "--kubernetes",
    metavar="VERSION",
    envvar="KUBERNETES",
    help=f"One of {', '.join(KUBERNETES_VERSIONS)} (or 1.36, newest, oldest). [env: KUBERNETES]",
)

_PROGRAMS = (*binaries.ALL, *NODE_PROGRAMS)


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def main() -> None:
    """A throw-away Kubernetes cluster: real etcd, API server, controllers, scheduler, and a node.

    Programs are built once from pinned Go modules into ~/.cache/hostprep/testbed; a cluster is
    then up in a few seconds and leaves nothing behind.
    """


@main.command()
@click.argument("programs", nargs=-1, type=click.Choice(_PROGRAMS), metavar="[PROGRAM]...")
@click.option("--node", "with_node", is_flag=True, help="What the tests of tier node need.")
@click.option("--engines", is_flag=True, help="What the tests of tier engines need, and no more.")
@click.option("--engines-all", is_flag=True, help="The engines that only some runs test as well.")
@_kubernetes
def build(
    programs: tuple[str, ...],
    with_node: bool,
    engines: bool,
    engines_all: bool,
    kubernetes: str | None,
) -> None:
    """Build or fetch what is missing: all that tier cluster needs, or the named ones.

    Tier cluster needs the API server of the newest Kubernetes besides the default one's.

    PROGRAM is one of etcd, kube-apiserver, kube-controller-manager, kube-scheduler, helm, helm-3,
    kubectl, promtool, prometheus, karpenter, kubelet, kube-proxy, containerd,
    containerd-shim-runc-v2, ctr, runc, coredns, channel, registry.
    """
    if engines or engines_all:
        if programs or with_node:
            raise click.UsageError("--engines goes with no program and not with --node")
        environments.build(environments.ALL if engines_all else environments.ALWAYS, _say)
        model_configs.build(_say)
        return
    wanted = programs or (binaries.NODE if with_node else binaries.ALL)
    start = time.monotonic()
    newest = () if programs or with_node else binaries.NEWEST
    missing = [n for n in wanted if binaries.locate(n, kubernetes=kubernetes) is None]
    missing += [n for n in newest if binaries.locate(n, kubernetes="newest") is None]
    binaries.build(wanted, kubernetes=kubernetes, say=_say)
    binaries.build(newest, kubernetes="newest", say=_say)
    if "karpenter" in wanted:
        crd_files(_say)
    if with_node:
        build_node_parts(_say)
    if missing:
        _say(f"everything is there after {time.monotonic() - start:.0f} s")


@main.command()
@_kubernetes
@click.option("--bare", is_flag=True, help="Etcd and API server alone: nothing acts by itself.")
@click.option("--address", default="127.0.0.1", show_default=True, help="Where the API listens.")
@click.option("--node", "with_node", is_flag=True, help="With a real node, in a virtual machine.")
@click.option("--shell", is_flag=True, help="Open a shell in the node, here; Ctrl-] leaves it.")
def up(kubernetes: str | None, bare: bool, address: str, with_node: bool, shell: bool) -> None:
    """Start a cluster, print how to use it, and run until Ctrl-C.

    What an earlier, killed one left behind is removed first. Without --node there is no kubelet:
    nodes are objects that you create yourself. With it, kubelet and containerd run in a virtual
    machine, and the chart is installed.
    """
    if with_node and (bare or address != "127.0.0.1"):
        raise click.UsageError("--node goes with neither --bare nor --address")
    if with_node and kubernetes_version(kubernetes) != KUBELET_VERSION:
        # A kubelet may not be newer than its API server (Kubernetes' version skew policy).
        raise click.UsageError(f"--node needs the API server of its kubelet, {KUBELET_VERSION}")
    if shell and not with_node:
        raise click.UsageError("--shell needs --node")
    names = CONTROL_PLANE[:2] if bare else CONTROL_PLANE
    tools = binaries.build([*names, "kubectl", "helm"], kubernetes=kubernetes, say=_say)
    parts = build_node_parts(_say) if with_node else None
    for name in runs().sweep():
        _say(f"removed what {name} left behind")
    cluster = ControlPlane(
        kubernetes=kubernetes, controllers=not bare, scheduler=not bare, address=address
    )
    with suppress(playground.EndedError):
        signals = playground.Signals()
        _run_until_ended(cluster, signals, tools["kubectl"].parent, parts, shell)
    _say("ended")


def _run_until_ended(
    cluster: ControlPlane,
    signals: playground.Signals,
    tools: Path,
    parts: NodeParts | None,
    shell: bool,
) -> None:
    start_s = time.monotonic()
    with ExitStack() as stack:
        stack.enter_context(cluster)
        version = cluster.api.get("/version")["gitVersion"]
        _say(f"Kubernetes {version} is up after {time.monotonic() - start_s:.1f} s")
        if parts is None:
            click.echo(playground.how_to_use(cluster.kubeconfig, tools))
            playground.watch(cluster, signals)
        else:
            node = stack.enter_context(playground.running_node(cluster, parts, _say))
            click.echo(playground.how_to_use_a_node(cluster.kubeconfig, tools))
            if shell:
                open_console(node.guest.console)
            playground.watch(cluster, signals, node)
        _say("stopping")


@main.command()
def shell() -> None:
    """Open a shell in the virtual node that `up --node` runs. Ctrl-] leaves it."""
    playground.enter_node()


@main.command()
@_kubernetes
def versions(kubernetes: str | None) -> None:
    """Show every program, its version, and where it is."""
    programs = go_programs(kubernetes_version(kubernetes))
    pinned = {name: program.version for name, program in programs.items()}
    pinned |= {"helm": HELM_VERSION, "kubectl": KUBECTL_VERSION}
    for name in _PROGRAMS:
        path = binaries.locate(name, kubernetes=kubernetes)
        _show_program(name, pinned.get(name, "as found"), path)
    if (newest := kubernetes_version("newest")) != kubernetes_version(kubernetes):
        for name in binaries.NEWEST:
            _show_program(name, newest, binaries.locate(name, kubernetes=newest))
    click.echo(f"{'clusters that run now':24} {', '.join(runs().alive()) or 'none'}")


def _show_program(name: str, version: str, path: Path | None) -> None:
    click.echo(f"{name:24} {version:10} {path or 'not built'}")


@main.command()
@click.argument("name")
@click.option("--label", "labels", multiple=True, metavar="KEY=VALUE", help="May be repeated.")
def node(name: str, labels: tuple[str, ...]) -> None:
    """Print a Node object that stands for this machine, as its kubelet would register it.

    It is Ready, of this boot and this size, and has the start-up taint. For example:
    python -m testbed node node-a | kubectl create -f -
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
