"""`hostprep status` and `hostprep verify`: pools, regions, leases, and the gates of engines."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Iterator, Sequence
from typing import Any

import click

from hostprep.agent.last_status import read_last_status
from hostprep.api.node_resource import Phase, PoolStatus
from hostprep.cli.options import output_option, pool_alias_option, pool_argument, root_option
from hostprep.client.handoff import Region, read_handoff, verify_handoff
from hostprep.client.kept import KeptContents, kept_contents
from hostprep.client.sidecar import NO_PROCESS, current_command, mark_bad, read_sidecar
from hostprep.console import elide, print_json, print_table, say, warn
from hostprep.cuda.board_layout import READY
from hostprep.cuda.board_view import RankView
from hostprep.engines.idle import IdleMemory, SizedRegion, idle_memory
from hostprep.engines.main import pool_named
from hostprep.errors import FailedError, HostprepError, NotReadyError
from hostprep.linux.processes import boot_id, pid_here
from hostprep.node.facts import PoolFacts, RegionFacts
from hostprep.node.observe.cgroups import pod_of
from hostprep.node.observe.pools import closed_pools, missing_pool, observe_gate, observe_pools
from hostprep.paths import PoolPaths, check_pool_name
from hostprep.units import format_bytes, format_seconds

_COMMAND_LENGTH = 50
_KEPT_COLUMNS = (
    "POOL",
    "REGION",
    "KEPT",
    "SIZE",
    "SINCE",
    "BLOCKS",
    "RECOVERED",
    "LOADED",
    "REFUSED",
)
_CHANGE_COLUMNS = ("POOL", "PHASE", "REASON", "WAITS FOR")
_GATE_COLUMNS = ("POOL", "REGION", "GATE", "RANKS", "REGISTERED", "SINCE", "WHY")


@click.command(short_help="Show what is held, by whom it is leased, and the gates.")
@pool_argument
@pool_alias_option
@root_option
@click.option(
    "--state-dir",
    envvar="HOSTPREP_STATE_DIR",
    default="/var/lib/hostprep",
    show_default=True,
    help="The agent's folder: pools that it did not report as Ready are shown with the reason.",
)
@output_option
def status(
    pool: str | None, pool_option: str | None, root: str, state_dir: str, output: str
) -> None:
    """Show what is held on this node, in which state, by whom it is leased, and engines' gates.

    Root also sees what the agent last reported of pools that are not Ready, such as Blocked (a
    change waits for leases) and Releasing, and which processes and Pods that waits for.
    """
    pools = _chosen(root, pool_named(pool, pool_option))
    documents = [_pool_document(PoolPaths(root, facts.name), facts) for facts in pools]
    gates = [gate for facts in pools for gate in _gates(PoolPaths(root, facts.name), facts)]
    reported = read_last_status(state_dir, boot_id=boot_id())
    for document in documents:
        said = reported.pool(document["name"]) if reported else None
        document["agent"] = _agent_document(document, said) if said else None
        document["idle"] = [each.to_json() for each in _idle(document, pools, gates)]
    if output == "json":
        print_json({"root": root, "pools": documents, "gates": gates})
    elif not pools:
        say(f"no pools {'that can be seen ' if closed_pools(root) else ''}below {root}")
    else:
        print_table(
            "",
            ("POOL", "REGION", "SIZE", "BACKING", "PLACEMENT", "STATE", "HOLDER"),
            [row for pool in documents for row in _rows(pool)],
            flexible=("STATE",),
            elided="HOLDER",
        )
        changes = [row for pool in documents for row in _change_rows(pool)]
        if changes:
            say("")
            print_table("", _CHANGE_COLUMNS, changes, flexible=("WAITS FOR",))
        kept = [row for pool in documents for row in _kept_rows(pool)]
        if kept:
            say("")
            print_table("", _KEPT_COLUMNS, kept, flexible=("REFUSED",))
        if gates:
            say("")
            print_table("", _GATE_COLUMNS, [_gate_row(gate) for gate in gates], flexible=("WHY",))
        for document in documents:
            for idle in document["idle"]:
                warn(f"warning: {idle['what']}; {idle['remedy']}")


def _idle(
    document: dict[str, Any], pools: Sequence[PoolFacts], gates: Sequence[dict[str, Any]]
) -> Iterator[IdleMemory]:
    """Yield what each engine leaves of the memory that a sized pool has for it.

    A region that is free counts once, for the first engine that lacks it.
    """
    facts = next(pool for pool in pools if pool.name == document["name"])
    layouts = {region.name: json.loads(region.layout or "null") for region in facts.regions}
    regions = [
        SizedRegion(region["name"], region["size_bytes"], layouts[region["name"]])
        for region in document["regions"]
    ]
    free = {region["name"] for region in document["regions"] if region["leased"] is False}
    held: dict[str, list[str]] = {}
    for region in document["regions"]:
        if region["leased"] and region["holder"]:
            held.setdefault(region["holder"]["lease"], []).append(region["name"])
    for claimed in held.values():
        used_bytes = _registered_bytes(document["name"], claimed, gates)
        idle = idle_memory(document["name"], regions, claimed, free=free, used_bytes=used_bytes)
        if idle is not None:
            free -= set(idle.regions)
            yield idle


def _registered_bytes(
    pool: str, claimed: Sequence[str], gates: Sequence[dict[str, Any]]
) -> int | None:
    """Return what an engine's ranks have registered; None unless all have, and said how much."""
    total = 0
    for name in claimed:
        gate = next((g for g in gates if (g["pool"], g["region"]) == (pool, name)), None)
        ranks = gate["ranks"] if gate is not None else []
        if not ranks or any(rank["state"] != READY or not rank["size_bytes"] for rank in ranks):
            return None
        total += sum(rank["size_bytes"] for rank in ranks)
    return total


def _gates(paths: PoolPaths, pool: PoolFacts) -> list[dict[str, Any]]:
    """Return the gate of each engine that leases regions of the pool or reports beside them."""
    found = (_gate_document(paths, region.name, leased=region.leased) for region in pool.regions)
    return [gate for gate in found if gate is not None]


def _chosen(root: str, name: str | None) -> tuple[PoolFacts, ...]:
    """Return the pool of that name, or all. Raises NotReadyError where it is not there."""
    if name is not None:
        check_pool_name(name)
    pools = tuple(pool for pool in observe_pools(root) if name in (None, pool.name))
    if name is not None and not pools:
        raise missing_pool(root, name, remedy="run `hostprep prepare`")
    if name is None and (closed := closed_pools(root)):
        warn(f"not shown, for want of permission: {', '.join(closed)}; run it as root")
    return pools


def _pool_document(paths: PoolPaths, pool: PoolFacts) -> dict[str, Any]:
    return {
        "name": pool.name,
        "ready": pool.published,
        "error": pool.failure or None,
        "generation": pool.generation,
        "waiters": pool.waiters,
        "size_bytes": sum(region.size_bytes for region in pool.regions if region.finished),
        "huge_pages_taken": pool.taken,
        "regions": [_region_document(paths, pool, region) for region in pool.regions],
    }


def _region_document(paths: PoolPaths, pool: PoolFacts, region: RegionFacts) -> dict[str, Any]:
    path = f"{paths.folder}/{region.mount_dir}/{region.name}"
    if not region.finished:
        path = paths.part_of(region.mount_dir, region.name)
    # Whoever may not open a region cannot try its locks: nothing is known of its lease.
    is_known = os.access(path, os.R_OK)
    holder = read_sidecar(paths, region.name) if region.leased and is_known else None
    node_pid = pid_here(holder.holder) if holder else None
    return {
        "name": region.name,
        "path": path,
        "size_bytes": region.size_bytes,
        "resident_bytes": region.resident_bytes,
        "backing": region.backing,
        "placement": str(region.placement),
        "state": pool.state_of(region) if is_known or not region.finished else "Unknown",
        "leased": region.leased if is_known else None,
        "clean": region.clean,
        "damage": region.damage,
        "sized_for": _sized_for(region),
        "kept": _kept(paths, region) if is_known and region.finished else None,
        "holder": None
        if holder is None or holder.holder == NO_PROCESS
        else {
            "lease": holder.lease_id,
            "pid": holder.holder.pid,
            "command": current_command(holder),
            "node_pid": node_pid,
            "pod_uid": None if node_pid is None else pod_of(node_pid),
            "since_s": round(time.time() - holder.claimed_at_s, 1),
        },
    }


def _agent_document(pool: dict[str, Any], said: PoolStatus) -> dict[str, Any]:
    """Return what the agent said of a pool, and which of the leases it waited for still live."""
    regions = {region["name"]: region for region in pool["regions"]}
    leased = [name for name in said.blocked if regions.get(name, {}).get("leased")]
    return {
        "phase": said.phase.value,
        "reason": said.reason,
        "message": said.message,
        "waits_for": [{"region": name, "holder": regions[name]["holder"]} for name in leased],
    }


def _change_rows(pool: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    said = pool["agent"]
    if said is None or said["phase"] == Phase.READY.value:
        return
    leases = "; ".join(_lease_words(each["region"], each["holder"]) for each in said["waits_for"])
    yield pool["name"], said["phase"], said["reason"], leases or said["message"]


def _lease_words(region: str, holder: dict[str, Any] | None) -> str:
    if holder is None:
        return region
    pod = f", pod {holder['pod_uid']}" if holder["pod_uid"] else ""
    pid = holder["node_pid"] or holder["pid"]
    return f"{region} (process {pid}, {_brief(holder['command'])}{pod})"


def _kept(paths: PoolPaths, region: RegionFacts) -> dict[str, Any] | None:
    """Return what the region keeps for an owner; of a leased one, too: a kill would leave it."""
    kept: KeptContents | None = None if region.clean else kept_contents(paths, region.name)
    if kept is None:
        return None
    report = kept.report
    return {
        "name": kept.name,
        "since_s": round(max(0.0, time.time() - kept.since_s), 1),
        "size_bytes": region.size_bytes,
        "recovered_blocks": report and report.recovered_blocks,
        "recovered_bytes": report and report.recovered_bytes,
        "kept_blocks": report and report.kept_blocks,
        "loaded_blocks": report and report.loaded_blocks,
        "refused": dict(report.refused) if report else {},
    }


def _kept_rows(pool: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    for region in pool["regions"]:
        kept = region["kept"]
        if kept is None:
            continue
        refused = (
            f"{key}: {now}" + (f", kept {was}" if was else "")
            for key, (was, now) in kept["refused"].items()
        )
        blocks = (kept["kept_blocks"], kept["recovered_blocks"], kept["loaded_blocks"])
        yield (
            pool["name"],
            region["name"],
            kept["name"],
            format_bytes(kept["size_bytes"]),
            format_seconds(kept["since_s"]),
            *("" if count is None else str(count) for count in blocks),
            "; ".join(refused),
        )


def _sized_for(region: RegionFacts) -> str | None:
    """Return the model that the region's published layout is for; None without a layout."""
    model = json.loads(region.layout or "{}").get("model")
    return model if isinstance(model, str) else None


def _rows(pool: dict[str, Any]) -> list[tuple[str, ...]]:
    if pool["error"]:
        return [(pool["name"], f"(cannot be looked at: {pool['error']})", *[""] * 5)]
    if not pool["regions"]:
        return [(pool["name"], "(no region: run prepare or release again)", *[""] * 5)]
    return [_row(pool, region) for region in pool["regions"]]


def _brief(command: str) -> str:
    """Return a command, cut, without its program's folder: its arguments identify the engine."""
    program, _, arguments = command.partition(" ")
    return elide(f"{program.rpartition('/')[2]} {arguments}".strip(), _COMMAND_LENGTH)


def _row(pool: dict[str, Any], region: dict[str, Any]) -> tuple[str, ...]:
    holder = region["holder"]
    shown = ""
    if holder:
        command = _brief(holder["command"])
        shown = f"{holder['pid']} {command} ({format_seconds(holder['since_s'])})"
    return (
        pool["name"],
        region["name"],
        format_bytes(region["size_bytes"]),
        region["backing"].value,
        region["placement"],
        region["state"] + (f": {region['damage']}" if region["damage"] else ""),
        shown,
    )


@click.command(short_help="Check every claim of the handoff against the kernel.")
@pool_argument
@pool_alias_option
@root_option
@click.option("--pages", is_flag=True, help="Touch every page, so that a bad one is named.")
@output_option
def verify(pool: str | None, pool_option: str | None, root: str, pages: bool, output: str) -> int:
    """Check every claim of the handoff against the kernel: boot, identity, size, residency."""
    name = pool_named(pool, pool_option)
    pools = _chosen(root, name)
    if not pools:
        raise NotReadyError(f"there is no pool below {root}", remedy="run `hostprep prepare`")
    results = [
        result
        for facts in pools
        for result in _verdicts(
            PoolPaths(root, facts.name), facts, pages=pages, alone=name is not None
        )
    ]
    if output == "json":
        print_json({"ok": all(result["ok"] for result in results), "regions": results})
    else:
        print_table(
            "",
            ("POOL", "REGION", "SIZE", "VERDICT"),
            [
                (
                    r["pool"],
                    r["region"],
                    format_bytes(r["size_bytes"]) if r["region"] else "",
                    r["problem"] or "ok",
                )
                for r in results
            ],
            flexible=("VERDICT",),
        )
    return 0 if all(result["ok"] for result in results) else 1


def _verdicts(
    paths: PoolPaths, facts: PoolFacts, *, pages: bool, alone: bool
) -> Iterator[dict[str, Any]]:
    """Yield a verdict for each region; one for the pool where there is nothing to check it by.

    Raises BadInputError for a pool that may not be read, where it is the only one.
    """
    if facts.failure:
        why = FailedError(f"it cannot be looked at: {facts.failure}", reason="CannotLook")
        yield _verdict(paths.pool, "", 0, why)
        return
    try:
        handoff = read_handoff(paths)
    except HostprepError as error:
        if alone and not isinstance(error, NotReadyError):
            raise
        if error.reason == "NotPrepared":
            error = NotReadyError(
                f"pool {paths.pool} is not published: a prepare is at work or was interrupted",
                reason=error.reason,
                remedy="run `hostprep prepare` again",
            )
        yield _verdict(paths.pool, "", 0, error)
        return
    for region, problem in verify_handoff(paths, handoff, pages=pages):
        if problem is not None and problem.reason == "PoisonedPage":
            _mark_bad(paths, region, problem)
        yield _verdict(paths.pool, region.name, region.size_bytes, problem)


def _verdict(
    pool: str, region: str, size_bytes: int, problem: HostprepError | None
) -> dict[str, Any]:
    return {
        "pool": pool,
        "region": region,
        "size_bytes": size_bytes,
        "ok": problem is None,
        "reason": problem and problem.reason,
        "problem": problem and str(problem),
    }


def _mark_bad(paths: PoolPaths, region: Region, problem: HostprepError) -> None:
    """Mark the region as bad: prepare then rebuilds it alone."""
    with contextlib.suppress(HostprepError):
        if os.access(paths.state_of(region.name), os.W_OK):
            mark_bad(paths, region.name, problem.message, size_bytes=region.size_bytes)


def _gate_document(paths: PoolPaths, region: str, *, leased: bool) -> dict[str, Any] | None:
    """Return the gate of the engine at a region; None without one, or without permission.

    An engine runs while one of its ranks or its lease lives: a lease whose ranks have all ended is
    worth knowing of.
    """
    name = {"pool": paths.pool, "region": region}
    try:
        observed = observe_gate(paths, region, leased=leased)
    except HostprepError as error:
        if error.reason in ("NoBoard", "NoPermission"):
            return None
        return {**name, "state": "Unknown", "why": error.message, "ranks": []}
    if not observed.is_running:
        return None
    view = observed.view
    return {
        **name,
        "state": observed.state,
        "why": observed.why,
        "world": view.world,
        "generation": view.generation.hex(),
        "since_s": round(time.time() - view.created_at_s, 1),
        "ranks": [_rank(rank) for rank in view.ranks],
    }


def _rank(view: RankView) -> dict[str, Any]:
    slot = view.slot
    return {
        "rank": view.rank,
        "state": slot.state,
        "alive": view.alive,
        "reason": slot.reason,
        "pid": slot.process.pid,
        "took_s": slot.took_s,
        "done_bytes": slot.done_bytes,
        "passed_over_bytes": slot.mark_bytes - slot.done_bytes,
        "size_bytes": slot.size_bytes,
        "longest_chunk_s": slot.longest_chunk_s,
    }


def _gate_row(gate: dict[str, Any]) -> tuple[str, ...]:
    """Return the columns of one gate."""
    if "world" not in gate:
        return (gate["pool"], gate["region"], gate["state"], "", "", "", gate["why"])
    ranks = gate["ranks"]
    ready = sum(rank["state"] == READY and rank["alive"] for rank in ranks)
    ended = sum(not rank["alive"] for rank in ranks)
    notes = (
        f"rank {rank['rank']}: {rank['reason']}"
        for rank in ranks
        if rank["state"] == READY and rank["reason"]
    )
    done, over, size = (
        sum(rank[key] for rank in ranks)
        for key in ("done_bytes", "passed_over_bytes", "size_bytes")
    )
    return (
        gate["pool"],
        gate["region"],
        gate["state"],
        f"{ready} of {gate['world']} ready" + (f", {ended} ended" if ended else ""),
        (f"{format_bytes(done)} of {format_bytes(size)}" if size else "")
        + (f", {format_bytes(over)} passed over" if over else ""),
        format_seconds(gate["since_s"]),
        gate["why"] or next(notes, ""),
    )
