"""`hostprep prepare` and `hostprep release`."""

from __future__ import annotations

import time
from typing import Any

import click

from hostprep.api.pool_spec import PoolSpec
from hostprep.cli.options import output_option, progress_option, root_option, wait_option
from hostprep.cli.output import print_json, say, warn
from hostprep.cli.plan import plan_document, show_plan
from hostprep.cli.pool_options import pool_options, specs_from
from hostprep.cli.progress import showing
from hostprep.node.apply.service import ApplyResult, Node, check_met
from hostprep.node.plan.actions import Plan
from hostprep.units import format_bytes, format_seconds

__all__ = ["prepare", "release"]

_dry_run_option = click.option("--dry-run", is_flag=True, help="Show the plan and stop.")


@click.command()
@pool_options
@root_option
@_dry_run_option
@wait_option
@progress_option
@output_option
def prepare(
    root: str, output: str, progress: str, wait_s: float, dry_run: bool, **options: Any
) -> None:
    """Populate, pin and publish memory. What is right already is adopted in milliseconds.

    \b
    Safe to interrupt and to run again: it goes on where it was.
      hostprep prepare -f pool.yaml
      hostprep prepare --name kv --size 8Gi --backing HugeTLB2Mi,Base
    """
    specs = specs_from(options)
    node = Node(root)
    if dry_run:
        _show(node.plan(specs), specs, output)
        return
    begin_s = time.monotonic()
    with showing(progress) as shown:
        outcome = node.prepare(
            specs, progress=shown, wait_timeout_s=wait_s, on_wait=lambda who: warn(f"waits: {who}")
        )
    took_s = time.monotonic() - begin_s
    if output == "json":
        print_json(plan_document(outcome.plan) | {"took_s": took_s})
    else:
        _tell(outcome, took_s)


def _show(wanted: Plan, specs: tuple[PoolSpec, ...], output: str) -> None:
    if output == "json":
        print_json(plan_document(wanted))
    else:
        show_plan(wanted)
    check_met(wanted, specs)


def _tell(outcome: ApplyResult, took_s: float) -> None:
    for pool in outcome.plan.pools:
        for over in pool.passed_over:
            say(f"passed over {over.backing}: {over.why}")
        for note in pool.notes:
            say(f"note: {note}")
        verb = "prepared" if outcome.plan.changes_anything else "adopted"
        say(
            f"pool {pool.name}: {format_bytes(pool.planned_bytes)} {verb} in "
            f"{pool.backing_words} pages ({format_seconds(took_s)})"
        )
        if pool.blocked:
            say(f"  still to change once released: {', '.join(pool.blocked)}")


@click.command(short_help="Give back exactly what was taken.")
@click.argument("pools", nargs=-1, required=True, metavar="POOL...")
@root_option
@click.option("--force", is_flag=True, help="Even what is leased; holders keep it till they end.")
@wait_option
@progress_option
@output_option
def release(
    pools: tuple[str, ...], root: str, output: str, progress: str, wait_s: float, force: bool
) -> None:
    """Give memory and huge pages back: exactly what was taken. Refused while leased."""
    begin_s = time.monotonic()
    with showing(progress) as shown:
        outcome = Node(root).release(
            pools,
            force=force,
            progress=shown,
            wait_timeout_s=wait_s,
            on_wait=lambda who: warn(f"waits: {who}"),
        )
    if output == "json":
        print_json(plan_document(outcome.plan) | {"took_s": time.monotonic() - begin_s})
    else:
        say(f"released {', '.join(pools)} ({format_seconds(time.monotonic() - begin_s)})")
