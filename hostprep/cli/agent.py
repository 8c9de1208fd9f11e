"""`hostprep agent`."""

from __future__ import annotations

from typing import Any, Literal

import click

from hostprep.cli.options import root_option
from hostprep.console import Seconds
from hostprep.errors import BadInputError

LEVELS = ("debug", "info", "warning", "error")


@click.command(short_help="Keep a node's memory as its HostMemoryNode asks.")
@click.option(
    "--node-name",
    "--node",
    "node_name",
    envvar="NODE_NAME",
    default="",
    help="Name of this node, and of its HostMemoryNode. [env: NODE_NAME]",
)
@root_option
@click.option(
    "--state-dir",
    envvar="HOSTPREP_STATE_DIR",
    default="/var/lib/hostprep",
    show_default=True,
    help="Where the entries that are acted upon are kept, for when the API server is away.",
)
@click.option(
    "--listen",
    envvar="HOSTPREP_LISTEN",
    default=":9808",
    show_default=True,
    help="Address of /healthz, /readyz and /metrics.",
)
@click.option(
    "--verify-interval",
    "verify_interval_s",
    type=Seconds(min=0.1, max=3600),
    default=5.0,
    show_default=True,
    metavar="SECONDS",
    help="How often every region is held against the handoff, and repaired.",
)
@click.option(
    "--wait",
    "wait_s",
    type=Seconds(min=0, max=86400),
    default=300.0,
    show_default=True,
    metavar="SECONDS",
    help="How long to stand by for another agent that still runs, as in an upgrade.",
)
@click.option(
    "--kubeconfig",
    type=click.Path(dir_okay=False),
    help="Instead of KUBECONFIG, what a pod is given, or ~/.kube/config.",
)
@click.option(
    "--kubelet-dir",
    envvar="HOSTPREP_KUBELET_DIR",
    default="",
    metavar="PATH",
    help="Kubelet's root folder, such as /var/lib/kubelet: hand regions out by its device"
    " plugins, where pools ask for it (attach.mode: DevicePlugin).",
)
@click.option(
    "--allow-cgroup-v1",
    is_flag=True,
    help="Run on a node with cgroup v1, where pods' limits may strike what is populated.",
)
@click.option(
    "--log-format",
    type=click.Choice(["console", "json"]),
    default="console",
    show_default=True,
    envvar="HOSTPREP_LOG_FORMAT",
    help="Lines on standard error, for people or for collectors.",
)
@click.option(
    "--log-level",
    type=click.Choice(LEVELS),
    default="info",
    show_default=True,
    envvar="HOSTPREP_LOG_LEVEL",
    help="The least that is worth a line.",
)
@click.option("--once", is_flag=True, help="End once all is done: 0 all pools ready, 1 not.")
def agent(log_format: Literal["console", "json"], log_level: str, **options: Any) -> int:
    """Keep this node's memory as its HostMemoryNode asks, verify it, repair it, report it.

    The process of the DaemonSet; it can be run by hand as well:

    \b
      hostprep agent --node-name worker-1 --kubeconfig ~/.kube/config
      kubectl get hostmemorynode worker-1 -o yaml

    It may be killed, restarted and upgraded at any time: memory stays, and is adopted. Memory is
    released by nothing but an entry with `state: Absent`.
    """
    import asyncio

    try:
        from hostprep.agent.loop import run
        from hostprep.agent.settings import Settings
        from hostprep.kube.logs import make_logger, set_up_logs
    except ModuleNotFoundError as error:
        raise BadInputError(
            f"the agent needs {error.name}",
            remedy="install it from a clone by: pip install '.[agent]'",
        ) from error
    settings = Settings(**options)
    set_up_logs(style=log_format, level=log_level)
    return asyncio.run(run(settings, make_logger("agent", node=settings.node_name)))
