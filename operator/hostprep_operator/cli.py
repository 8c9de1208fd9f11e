"""`hostprep-operator`: options, each with its environment variable, and exit codes."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable
from functools import partial
from typing import Any, Literal, TypeVar

import click

import hostprep
from hostprep.console import Seconds, report
from hostprep.errors import BadInputError, HostprepError
from hostprep.kube.logs import Style, set_up_logs

Command = TypeVar("Command", bound=Callable[..., Any])

_NAMESPACE_FILE = "/var/run/secrets/kubernetes.io/serviceaccount/namespace"


def _option(*names: str, **settings: Any) -> Callable[[Command], Command]:
    """Make an option that HOSTPREP_OPERATOR_<NAME> sets as well."""
    name = names[0].lstrip("-").replace("-", "_").upper()
    settings.setdefault("envvar", f"HOSTPREP_OPERATOR_{name}")
    return click.option(*names, show_default=True, show_envvar=True, **settings)


def _default_namespace(otherwise: str = "default") -> str:
    try:
        with open(_NAMESPACE_FILE, encoding="utf-8") as file:
            return file.read().strip() or otherwise
    except OSError:
        return otherwise


def _taint_keys(
    _context: click.Context, _option: click.Parameter, keys: tuple[str, ...]
) -> frozenset[str] | None:
    return frozenset(keys) or None


_taint_key = _option(
    "--taint-key",
    "taint_keys",
    multiple=True,
    callback=_taint_keys,
    metavar="KEY",
    help="A taint's key that may be set and removed; may be given several times. Without: any with "
    "hostprep or host-memory in it; others never.",
)
_kubeconfig = _option(
    "--kubeconfig",
    type=click.Path(),
    help="How to reach the API server; by default KUBECONFIG, the pod's own, or ~/.kube/config.",
)
_log_format = _option(
    "--log-format", type=click.Choice(["json", "console"]), default="console", help="Of log lines."
)
_log_level = _option(
    "--log-level",
    type=click.Choice(["debug", "info", "warning", "error"]),
    default="info",
    help="The least that is logged.",
)


_liveness = _option(
    "--agent-liveness",
    "liveness",
    type=click.Choice(["pods", "off"]),
    default="pods",
    help="Whether an agent lives while its Pod is Ready, or is not looked at.",
)
_release_namespace = _option(
    "--namespace",
    envvar=["HOSTPREP_OPERATOR_NAMESPACE", "POD_NAMESPACE"],
    default=partial(_default_namespace, "hostprep-system"),
    help="The release's: where the agents' Pods are, and the backup of the pools.",
)


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def cli() -> None:
    """Select nodes, copy policy to them, mark them, count.

    \b
    Exit codes: 0 done, 1 failed or not finished, 2 bad input (nothing was changed).
    """  # noqa: D301 - click looks for the character itself


@cli.command()
@_option(
    "--namespace",
    envvar=["HOSTPREP_OPERATOR_NAMESPACE", "POD_NAMESPACE"],
    default=_default_namespace,
    help="Where the agents' Pods and the Lease are.",
)
@_liveness
@_option(
    "--agent-grace",
    "agent_grace_s",
    type=Seconds(0, 3600),
    default=60.0,
    metavar="SECONDS",
    help="How long a node or its agent may be away before its condition becomes Unknown.",
)
@_option("--workers", type=click.IntRange(1, 64), default=12, help="Reconciles at the same time.")
@_option("--leader-elect", is_flag=True, help="Work only while holding the Lease.")
@_option("--lease-name", default="hostprep-operator", help="Of the Lease.")
@_option("--listen", default=":9809", metavar="[HOST]:PORT", help="For probes and metrics.")
@_option(
    "--resync",
    "resync_s",
    type=Seconds(1, 86400),
    default=3600.0,
    metavar="SECONDS",
    help="How often everything is listed again, beside the watches.",
)
@_taint_key
@_log_format
@_log_level
@_kubeconfig
def run(
    *,
    log_format: Style,
    log_level: str,
    liveness: Literal["pods", "off"],
    agent_grace_s: float,
    taint_keys: frozenset[str] | None,
    **options: Any,
) -> int:
    """Run the operator until SIGTERM."""
    from hostprep_operator.reconcile.changes import Settings
    from hostprep_operator.run import Options, run_operator

    set_up_logs(style=log_format, level=log_level)
    settings = Settings(liveness=liveness, agent_grace_s=agent_grace_s, taint_keys=taint_keys)
    identity = os.environ.get("POD_NAME", "")
    return asyncio.run(run_operator(Options(settings=settings, identity=identity, **options)))


@cli.command()
@_option(
    "--keep-memory",
    is_flag=True,
    help="Leave pools and memory as they are; take away only marks and HostMemoryNodes.",
)
@_option(
    "--force",
    type=click.Choice(["leased", "unreachable", "protected"]),
    multiple=True,
    help="Go on although a check refuses: engines use the memory, agents cannot be reached, or "
    "pools have deletionProtection Always. May be given several times.",
)
@_release_namespace
@_liveness
@_option(
    "--dry-run", is_flag=True, help="Check, and say what would be done; 2 where a check refuses."
)
@_option("--yes", is_flag=True, help="Do not ask; needed where no terminal is.")
@_option(
    "--timeout",
    "timeout_s",
    type=Seconds(0, 86400),
    default=600.0,
    metavar="SECONDS",
    help="How long to wait for nodes to give their memory back.",
)
@_taint_key
@click.option("-o", "--output", type=click.Choice(["table", "json"]), default="table")
@_log_format
@_log_level
@_kubeconfig
def cleanup(
    *,
    output: Literal["table", "json"],
    log_format: Style,
    log_level: str,
    yes: bool,
    force: tuple[str, ...],
    **given: Any,
) -> int:
    """Give all memory back and leave no trace on any node; safe to run again.

    Checks first, and changes nothing where engines use the memory, agents cannot act, or a right
    is missing. Then keeps every HostMemoryPool in ConfigMap hostprep-pools-backup, deletes them,
    waits until the agents have released their memory, and removes every mark. Asks first, unless
    --yes is given. The operator may be running or not; with --keep-memory it must not.
    """
    from hostprep_operator.cleanup import CleanupOptions, run_cleanup

    set_up_logs(style=log_format, level=log_level)
    options = CleanupOptions(force=frozenset(force), **given)
    confirm = None if yes else partial(_ask, keep_memory=options.keep_memory)
    return asyncio.run(run_cleanup(options, as_json=output == "json", confirm=confirm))


def _ask(server: str, *, keep_memory: bool) -> None:
    """Have a person confirm this very cluster. Raises BadInputError without a terminal."""
    what = "all marks and HostMemoryNodes" if keep_memory else "all pools and their memory"
    if not sys.stdin.isatty():
        raise BadInputError(
            f"this takes away {what} on {server}, and there is no terminal to confirm it on",
            reason="NotConfirmed",
            remedy="check with --dry-run, then give --yes",
        )
    click.confirm(f"Take away {what} on {server}?", abort=True, err=True)


@cli.command("restore")
@click.argument("pools", nargs=-1)
@_release_namespace
@_option("--dry-run", is_flag=True, help="Say what would be done.")
@click.option("-o", "--output", type=click.Choice(["table", "json"]), default="table")
@_kubeconfig
def restore_pools(
    *,
    pools: tuple[str, ...],
    namespace: str,
    dry_run: bool,
    output: Literal["table", "json"],
    kubeconfig: str | None,
) -> int:
    """Put back the pools that the last clean-up deleted, or those that are named.

    What exists is left as it is, except for what an interrupted clean-up changed on it.
    """
    from hostprep_operator.cleanup import run_restore

    return asyncio.run(
        run_restore(
            namespace=namespace,
            names=frozenset(pools),
            dry_run=dry_run,
            as_json=output == "json",
            kubeconfig=kubeconfig,
        )
    )


@cli.command()
def version() -> None:
    """Print the version."""
    click.echo(hostprep.__version__)


def main(arguments: list[str] | None = None) -> int:
    """Run the command line. Returns 0 done, 1 failed or not finished, 2 bad input, 130 Ctrl-C."""
    arguments = sys.argv[1:] if arguments is None else arguments
    try:
        result: Any = cli.main(arguments, prog_name="hostprep-operator", standalone_mode=False)
        return result if isinstance(result, int) else 0
    except HostprepError as error:
        report(error, as_json="json" in arguments)
        return error.exit_code
    except ModuleNotFoundError as error:
        # The command line alone is installed without what the operator needs.
        if (error.name or "").startswith("hostprep"):
            raise
        needed = BadInputError(
            f"hostprep-operator needs {error.name}",
            remedy="install it from a clone by: pip install '.[operator]'",
        )
        report(needed, as_json="json" in arguments)
        return needed.exit_code
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except (KeyboardInterrupt, click.Abort):
        return 130
