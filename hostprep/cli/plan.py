"""`hostprep plan`: what prepare would do, and why so."""

from __future__ import annotations

from typing import Any

import click

from hostprep.cli.options import output_option, root_option
from hostprep.cli.pool_options import pool_options, specs_from
from hostprep.console import print_json, print_table, say
from hostprep.node.apply.service import Node, check_met
from hostprep.node.plan.actions import Plan, PoolPlan
from hostprep.units import format_bytes, format_seconds

__all__ = ["plan", "plan_document", "show_plan"]


@click.command(short_help="Say what prepare would do here, and what it takes.")
@pool_options
@root_option
@output_option
def plan(root: str, output: str, **options: Any) -> None:
    """Say what prepare would do on this node, what it takes and how long. Changes nothing."""
    specs = specs_from(options)
    wanted = Node(root).plan(specs)
    if output == "json":
        print_json(plan_document(wanted))
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
        print_table("", ("POOL", "STEP", "BYTES", "AT BEST"), rows)
    if not wanted.changes_anything and not any(pool.unmet for pool in wanted.pools):
        say("Nothing to do: all of it is there.")


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


def plan_document(wanted: Plan) -> dict[str, Any]:
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
