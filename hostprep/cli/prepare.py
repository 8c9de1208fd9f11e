"""`hostprep plan`, `prepare`, `release`, and `boot`, which prints what must precede kubelet."""

from __future__ import annotations

import time
from typing import Any

import click

from hostprep.api.pool_spec import PoolSpec
from hostprep.cli.completion import complete_pool
from hostprep.cli.options import (
    output_option,
    pool_options,
    progress_option,
    root_option,
    specs_from,
    wait_option,
)
from hostprep.cli.progress import showing
from hostprep.client.sidecar import NO_PROCESS, read_sidecar, short_command
from hostprep.console import print_json, print_table, say, warn
from hostprep.errors import BadInputError
from hostprep.node.apply.service import ApplyResult, Node, check_met
from hostprep.node.boot import boot_script
from hostprep.node.observe.pools import observe_pools
from hostprep.node.plan.actions import Plan, PoolPlan, stages
from hostprep.paths import PoolPaths
from hostprep.units import format_bytes, format_seconds


@click.command(short_help="Say what prepare would do here, and what it takes.")
@pool_options
@root_option
@output_option
def plan(root: str, output: str, **options: Any) -> None:
    """Say what prepare would do on this node, what it takes and how long. Changes nothing."""
    specs = specs_from(options)
    _plan(Node(root), specs, output)


def _plan(node: Node, specs: tuple[PoolSpec, ...], output: str) -> None:
    wanted = node.plan(specs)
    if output == "json":
        print_json(_plan_document(wanted))
    else:
        show_plan(wanted)
    check_met(wanted, specs)


def show_plan(wanted: Plan) -> None:
    """Print a plan for people."""
    for pool in wanted.pools:
        _show_pool(pool)
    rows = [
        (
            action.pool,
            action.describe(),
            format_bytes(action.expected_bytes) if action.expected_bytes else "",
            format_seconds(action.expected_s) if action.expected_s else "",
        )
        for action in wanted.actions
    ]
    if rows:
        print_table("", ("POOL", "STEP", "BYTES", "AT BEST"), rows, flexible=("STEP",))
        if any(action.expected_s for action in wanted.actions):
            say(f"All of it: {format_seconds(wanted.expected_s)}{_side_by_side(wanted)}.")
            say("At best: idle CPUs, and memory that is free at once. A virtual machine whose")
            say("host only finds the memory when it is first touched takes many times that, once.")
    if not wanted.changes_anything and not any(pool.unmet for pool in wanted.pools):
        say("Nothing to do: all of it is there.")


def _side_by_side(wanted: Plan) -> str:
    """Say how many regions are populated at once, where that is more than one."""
    lanes = max(len(stage) for stage in stages(wanted.actions))
    return f", with {lanes} regions populated at the same time" if lanes > 1 else ""


def _show_pool(pool: PoolPlan) -> None:
    say(
        f"Pool {pool.name}: {format_bytes(pool.planned_bytes)} of "
        f"{format_bytes(pool.wanted_bytes)} asked for"
        + (f", in {pool.backing_words} pages" if pool.backings else "")
    )
    for over in pool.passed_over:
        say(f"  passed over {over.backing}: {over.why}; {over.remedy}")
    for note in pool.notes:
        say(f"  note: {note}")
    if pool.blocked:
        say(f"  waits for the release of {', '.join(pool.blocked)}")
    if pool.page_table_bytes_per_process:
        cost = format_bytes(pool.page_table_bytes_per_process)
        say(f"  each engine process pays {cost} of page tables inside its own memory limit")


def _plan_document(wanted: Plan) -> dict[str, Any]:
    """Return a plan for programs."""
    return {
        "pools": wanted.pools,
        "actions": [
            {"action": type(action).__name__, "what": action.describe()}
            | {name: getattr(action, name) for name in ("pool", "expected_bytes", "expected_s")}
            for action in wanted.actions
        ],
        "expected_s": wanted.expected_s,
        "changes_anything": wanted.changes_anything,
    }


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
    """Populate memory, keep it resident, publish it. What is right already is adopted at once.

    \b
    Safe to interrupt and to run again: it goes on where it was.
      hostprep prepare -f pool.yaml
      hostprep prepare kv --size 8Gi --backing HugeTLB2Mi,Base
    """
    specs = specs_from(options)
    node = Node(root)
    if dry_run:
        _plan(node, specs, output)
        return
    begin_s = time.monotonic()
    with showing(progress) as shown:
        result = node.prepare(
            specs, progress=shown, wait_timeout_s=wait_s, on_wait=lambda who: warn(f"waits: {who}")
        )
    took_s = time.monotonic() - begin_s
    if output == "json":
        print_json(_plan_document(result.plan) | {"took_s": took_s})
    else:
        _show_result(result, took_s)


def _show_result(result: ApplyResult, took_s: float) -> None:
    for pool in result.plan.pools:
        for over in pool.passed_over:
            say(f"passed over {over.backing}: {over.why}")
        for note in pool.notes:
            say(f"note: {note}")
        verb = "prepared" if result.plan.changes_anything else "adopted"
        say(
            f"pool {pool.name}: {format_bytes(pool.planned_bytes)} {verb} in "
            f"{pool.backing_words} pages ({format_seconds(took_s)})"
        )
        if pool.blocked:
            say(f"  still to change once released: {', '.join(pool.blocked)}")


@click.command(short_help="Give back exactly what was taken.")
@click.argument("pools", nargs=-1, metavar="POOL...", shell_complete=complete_pool)
@click.option(
    "--pool",
    "--name",
    "pool_options",
    shell_complete=complete_pool,
    multiple=True,
    metavar="POOL",
    help="Another way to write POOL.",
)
@root_option
@click.option("--force", is_flag=True, help="Even what is leased; holders keep it till they end.")
@wait_option
@progress_option
@output_option
def release(
    pools: tuple[str, ...],
    pool_options: tuple[str, ...],
    root: str,
    output: str,
    progress: str,
    wait_s: float,
    force: bool,
) -> None:
    """Give memory and huge pages back: exactly what was taken. Refused while leased."""
    pools = tuple(dict.fromkeys((*pools, *pool_options)))
    if not pools:
        raise BadInputError("no pool is named", remedy="name one that `hostprep status` lists")
    begin_s = time.monotonic()
    holders = _holders(root, pools) if force else []
    with showing(progress) as shown:
        result = Node(root).release(
            pools,
            force=force,
            progress=shown,
            wait_timeout_s=wait_s,
            on_wait=lambda who: warn(f"waits: {who}"),
        )
    kept = _kept_pages(root, pools)
    if output == "json":
        took_s = time.monotonic() - begin_s
        document = {"took_s": took_s, "still_held": holders, "huge_pages_left": kept}
        print_json(_plan_document(result.plan) | document)
    else:
        for holder in holders:
            say(
                f"still held: {format_bytes(holder['size_bytes'])} of {holder['pool']}/"
                f"{holder['region']} by {holder['by']}, until that ends"
            )
        for left in kept:
            say(
                f"not given back: {left['pages']} huge pages of {left['pool']}, which processes "
                f"use; once they have ended: hostprep release {left['pool']}"
            )
        say(f"released {', '.join(pools)} ({format_seconds(time.monotonic() - begin_s)})")


def _kept_pages(root: str, pools: tuple[str, ...]) -> list[dict[str, Any]]:
    """Return the pools that could not give all of their huge pages back, with how many are left."""
    return [
        {"pool": facts.name, "pages": sum(entry.pages for entry in facts.taken)}
        for facts in observe_pools(root)
        if facts.name in pools and facts.taken
    ]


def _holders(root: str, pools: tuple[str, ...]) -> list[dict[str, Any]]:
    """Return who holds leased regions of the pools: a forced release does not end them."""
    return [
        {
            "pool": facts.name,
            "region": region.name,
            "size_bytes": region.size_bytes,
            "by": _holder(PoolPaths(root, facts.name), region.name),
        }
        for facts in observe_pools(root)
        if facts.name in pools
        for region in facts.regions
        if region.leased
    ]


def _holder(paths: PoolPaths, region: str) -> str:
    sidecar = read_sidecar(paths, region)
    if sidecar is None or sidecar.holder == NO_PROCESS:
        return "a process that no lease names"
    return f"process {sidecar.holder.pid} ({short_command(sidecar)})"


@click.command(short_help="Print the script that reserves pages before kubelet.")
@click.option("--script", is_flag=True, help="Print the script.")
@pool_options
@root_option
def boot(root: str, script: bool, **options: Any) -> None:
    """Print the POSIX sh script that reserves huge pages before kubelet starts.

    It needs coreutils and mount only: put it into user data, Ignition or a machine image.
    """
    if not script:
        raise BadInputError("what is to be done?", remedy="give --script to print the script")
    for spec in specs_from(options):
        click.echo(boot_script(spec, root=root), nl=False)
