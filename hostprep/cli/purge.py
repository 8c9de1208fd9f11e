"""`hostprep purge`: forget what regions keep for their owners, and zero it where allowed."""

from __future__ import annotations

import threading
import time
from typing import Any

import click

from hostprep.cli.completion import complete_pool
from hostprep.cli.options import output_option, root_option
from hostprep.client.claim import claim_lock
from hostprep.client.kept import forget_contents, kept_contents
from hostprep.client.owner import check_owner_name
from hostprep.client.scrub import may_scrub_pool, why_locked
from hostprep.client.sidecar import read_sidecar
from hostprep.console import print_json, print_table, say
from hostprep.errors import BadInputError, BusyError, HostprepError, NotReadyError
from hostprep.linux.files import from_os_error
from hostprep.node.apply.regions import scrub_region
from hostprep.node.facts import PoolFacts, RegionFacts
from hostprep.node.observe.pools import as_region, missing_pool, observe_pool, pool_names
from hostprep.paths import PoolPaths, check_pool_name
from hostprep.units import format_bytes, format_seconds


@click.command(short_help="Forget what regions keep for their owners.")
@click.argument("pool", metavar="POOL", shell_complete=complete_pool)
@click.option("--region", help="Of this region alone.")
@click.option("--name", help="Of what is kept under this name alone: exec's --warm.")
@click.option("--dry-run", is_flag=True, help="Show what would be forgotten and stop.")
@root_option
@output_option
def purge(
    pool: str, region: str | None, name: str | None, dry_run: bool, root: str, output: str
) -> int:
    """Forget what regions keep for their owners: the next start is an empty one.

    It is zeroed at once as root on the host; elsewhere the agent, or root's `hostprep prepare`,
    zeroes it. Regions that are leased are left alone.
    """
    check_pool_name(pool)
    if name is not None:
        check_owner_name(name, "--name")
    if pool not in pool_names(root):
        raise missing_pool(root, pool, remedy="see `hostprep status`")
    paths = PoolPaths(root, pool)
    facts = observe_pool(paths, repair=False)
    kept = [each for each in _chosen(facts, region) if _name_of(paths, each) is not None]
    chosen = [each for each in kept if name in (None, _name_of(paths, each))]
    results = [_purge(paths, each, dry_run=dry_run) for each in chosen]
    if output == "json":
        print_json({"pool": pool, "dry_run": dry_run, "regions": results})
    elif not results:
        others = sorted({_name_of(paths, each) or "(no name)" for each in kept})
        say(
            f"pool {pool} keeps nothing"
            + (f" under the name {name}" if name else "")
            + (f"; what it keeps: {', '.join(others[:8])}" if others else "")
        )
    else:
        print_table(
            "",
            ("REGION", "NAME", "SIZE", "KEPT", "RESULT"),
            [_row(result) for result in results],
            flexible=("RESULT",),
        )
    return 1 if any(result["problem"] for result in results) else 0


def _chosen(facts: PoolFacts, region: str | None) -> list[RegionFacts]:
    """Return the finished regions, or the one of that name. Raises BadInputError, NotReadyError."""
    if facts.failure:
        raise NotReadyError(f"pool {facts.name} cannot be looked at: {facts.failure}")
    finished = [each for each in facts.regions if each.finished]
    if region is None:
        return finished
    chosen = [each for each in finished if each.name == region]
    if not chosen:
        listed = ", ".join(each.name for each in finished[:8])
        raise BadInputError(
            f"pool {facts.name} has no region {region}",
            reason="NoSuchRegion",
            remedy=f"it has: {listed or 'none'}",
        )
    return chosen


def _name_of(paths: PoolPaths, region: RegionFacts) -> str | None:
    """Return the name of what a region keeps, which may be empty; None where it keeps nothing."""
    kept = None if region.clean else kept_contents(paths, region.name)
    return kept.name if kept is not None else None


def _purge(paths: PoolPaths, region: RegionFacts, *, dry_run: bool) -> dict[str, Any]:
    kept = kept_contents(paths, region.name)
    result: dict[str, Any] = {
        "region": region.name,
        "name": kept.name if kept else "",
        "size_bytes": region.size_bytes,
        "kept_s": round(max(0.0, time.time() - kept.since_s), 1) if kept else None,
        "forgotten": False,
        "zeroed": False,
        "problem": None,
    }
    try:
        if dry_run:
            if region.leased:
                raise _in_use(region.name, "leased")
            return result
        _forget(paths, region)
        result["forgotten"] = True
        if may_scrub_pool(paths):
            nothing = threading.Event()
            scrub_region(paths, as_region(region), on_done=lambda _: None, stop=nothing)
            result["zeroed"] = True
    except HostprepError as error:
        result["problem"] = str(error)
    return result


def _forget(paths: PoolPaths, region: RegionFacts) -> None:
    """Remove the owner's name, where no process has the region. Raises BusyError if one has."""
    with claim_lock(paths):  # no claim begins meanwhile
        why = why_locked(paths, as_region(region))
        if why is not None:
            raise _in_use(region.name, why)
        sidecar = read_sidecar(paths, region.name)
        if sidecar is None or sidecar.owner is None:
            return
        try:
            forget_contents(paths, region.name, sidecar, gid=region.gid)
        except OSError as error:
            raise from_os_error(error, f"forget what {region.name} keeps") from error


def _in_use(region: str, why: str) -> BusyError:
    return BusyError(
        f"{region} is in use and was left alone: {why}",
        reason="Leased",
        remedy="end its engine, and purge again",
    )


def _row(result: dict[str, Any]) -> tuple[str, ...]:
    if result["problem"]:
        said = result["problem"]
    elif result["zeroed"]:
        said = "forgotten, zeroed"
    elif result["forgotten"]:
        said = "forgotten; the agent or root's `hostprep prepare` zeroes it"
    else:
        said = "would be forgotten"
    age = "" if result["kept_s"] is None else format_seconds(result["kept_s"])
    return (result["region"], result["name"], format_bytes(result["size_bytes"]), age, said)
