#!/usr/bin/env python3
"""`kubectl hostprep`: pools and nodes at a glance, doctor on a node, release with a look at leases.

One file that needs Python 3.9 and kubectl, nothing else: krew links it as kubectl-hostprep. All
requests go through kubectl, so contexts, credential plugins and proxies work as they do there.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import time
from calendar import timegm
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

VERSION = "0.1.0"
_GROUP = "hostprep.dev"
_POOLS = f"hostmemorypools.v1alpha1.{_GROUP}"
"""In the version that accepts every spelling: what is saved can be applied, however old it is."""
_NODES = f"hostmemorynodes.{_GROUP}"
_AGENTS = "app.kubernetes.io/name=hostprep,app.kubernetes.io/component=agent"
_WORST_FIRST = (
    *("Failed", "Degraded", "Unreported", "Blocked", "Releasing", "Resizing"),
    *("Preparing", "Pending", "Leaving", "Ready"),
)
"""Phases; those that are not known come first. Leaving is ours: no longer wanted, and kept yet."""
_SINCE = {"Blocked": "ResizeBlocked", "Releasing": "Releasing"}
"""The condition of the node that says since when; for other phases it is Ready."""
_SERVING = ("Leaving", "Ready")
_SHOWN = 10
_MESSAGE_CHARS = 80
_COUNTS = (
    "selected",
    "ready",
    "preparing",
    "blocked",
    "leaving",
    "releasing",
    "degraded",
    "failed",
)
_SELECTORS = ("allNodes", "nodeSelector", "nodeSelectorTerms")
_SERVER_FIELDS = (
    *("creationTimestamp", "generation", "managedFields", "resourceVersion", "uid"),
    *("deletionTimestamp", "deletionGracePeriodSeconds", "selfLink", "ownerReferences"),
    "finalizers",
)


class HostprepError(Exception):
    """What is wrong, and what to do. `exit_code`: 1 failed, 2 bad input (nothing was changed)."""

    def __init__(self, message: str, *, reason: str, remedy: str = "", exit_code: int = 2) -> None:
        super().__init__(message)
        self.message, self.reason, self.remedy = message, reason, remedy
        self.exit_code = exit_code


class Kubectl:
    """Runs kubectl with the options of its own that were given."""

    def __init__(self, options: Sequence[str]) -> None:
        self._command = [os.environ.get("KUBECTL", "kubectl"), *options]

    def run(self, *arguments: str, stdin: str | None = None) -> str:
        """Return what kubectl printed. Raises HostprepError with its message."""
        try:
            done = subprocess.run(
                [*self._command, *arguments],
                input=stdin,
                capture_output=True,
                encoding="utf-8",
                check=False,
            )
        except OSError as error:
            raise HostprepError(
                f"kubectl cannot be run: {error}",
                reason="NoKubectl",
                remedy="put kubectl into PATH, or name it in KUBECTL",
                exit_code=1,
            ) from error
        if done.returncode != 0:
            said = done.stderr.strip() or f"kubectl ended with {done.returncode}"
            raise _kubectl_error(said)
        return done.stdout

    def get(self, *arguments: str) -> Any:
        """Return what `kubectl get ... -o json` says."""
        return json.loads(self.run("get", *arguments, "-o", "json"))

    def pass_through(self, *arguments: str) -> int:
        """Run kubectl on this terminal; return its exit code."""
        return subprocess.call([*self._command, *arguments])


def _kubectl_error(said: str) -> HostprepError:
    if "the server doesn't have a resource type" in said:
        return HostprepError(
            "this cluster knows no HostMemoryPools",
            reason="NoDefinitions",
            remedy="check the context with kubectl config current-context, or install the chart",
        )
    if "(NotFound)" in said:
        return HostprepError(said, reason="NotFound", remedy="check the name")
    return HostprepError(said, reason="KubectlFailed", exit_code=1)


def status(kubectl: Kubectl, options: argparse.Namespace) -> int:
    """Print the pools, and the nodes, worst first."""
    pools, nodes = kubectl.get(_POOLS)["items"], kubectl.get(_NODES)["items"]
    now_s = time.time()
    rows = [
        row
        for node in nodes
        for row in _node_rows(node, now_s)
        if options.pool in (None, row["pool"])
    ]
    if options.pool and not rows:  # else it is one that was deleted, at the least
        kubectl.get(_POOLS, options.pool)
    rows.sort(key=lambda row: (_rank(row["phase"]), -(row["sinceSeconds"] or 0), row["node"]))
    names = {pool["metadata"]["name"]: pool for pool in pools}
    wanted = [options.pool] if options.pool else sorted(names.keys() | {r["pool"] for r in rows})
    summaries = [_pool_row(name, names.get(name), rows) for name in wanted]
    if options.output == "json":
        _write_json({"pools": summaries, "nodes": rows})
        return 0
    _write_pools(summaries)
    _write_nodes(rows, all_nodes=options.all)
    return 0


def _pool_row(name: str, pool: Mapping[str, Any] | None, rows: Iterable[Any]) -> dict[str, Any]:
    """Return a pool's counts; those of one that was deleted are counted from the nodes."""
    mine = [row for row in rows if row["pool"] == name]
    found: dict[str, Any] = {"name": name, "deleted": pool is None}
    said = ((pool or {}).get("status") or {}) if pool is not None else {}
    for count in _COUNTS:
        found[count] = said.get(count)
    if pool is None:
        found["leaving"] = sum(row["keptUntil"] != "" for row in mine)
        found["releasing"] = len(mine) - found["leaving"]
    spec = (pool or {}).get("spec") or {}
    share = f"{spec['percent']}%" if "percent" in spec else None
    size = spec.get("size") or share or spec.get("regionSize")
    found["size"] = None if size is None else str(size)  # bytes may be written as a number
    selected, ready = found["selected"], found["ready"]
    found["readyPercent"] = round(100 * (ready or 0) / selected, 1) if selected else None
    found["leasedNodes"] = sum(row["regionsLeased"] > 0 for row in mine)
    waiting = [row["sinceSeconds"] or 0 for row in mine if row["phase"] not in _SERVING]
    found["oldestSeconds"] = max(waiting, default=None)
    """For how long the node that is longest not Ready has not been so."""
    return found


def _node_rows(node: Mapping[str, Any], now_s: float) -> Iterable[dict[str, Any]]:
    """Yield each pool of a node: what was asked for, and what its agent reports."""
    said = node.get("status") or {}
    reports = {pool["name"]: pool for pool in said.get("pools") or ()}
    entries = {entry["name"]: entry for entry in (node.get("spec") or {}).get("pools") or ()}
    conditions = {c.get("type"): c for c in said.get("conditions") or ()}
    created = _seconds_since(node["metadata"].get("creationTimestamp"), now_s)
    for name in sorted(entries.keys() | reports.keys()):
        report = reports.get(name)
        if report is None and entries[name].get("state") == "Absent":
            report = {"phase": "Releasing", "reason": "NotReadYet"}
        report = report or {"phase": "Unreported", "message": "the agent has reported nothing"}
        until = _kept_until(entries.get(name) or {})
        if until and report.get("phase") in ("Ready", "Blocked"):
            message = f"no longer wanted: kept at least until {until}, then released"
            report = {**report, "phase": "Leaving", "reason": "GracePeriod", "message": message}
        phase = report.get("phase") or "Unreported"
        condition = conditions.get(_SINCE.get(phase, "Ready"), {})
        changed = _seconds_since(condition.get("lastTransitionTime"), now_s)
        ready = _seconds_since(report.get("readySince"), now_s)
        held = sum(int(region.get("sizeBytes") or 0) for region in report.get("regions") or ())
        yield {
            "node": node["metadata"]["name"],
            "pool": name,
            "phase": phase,
            "reason": report.get("reason") or "",
            "keptUntil": until,
            "sinceSeconds": _first(ready if phase in _SERVING else None, changed, created),
            "regionsLeased": int(report.get("regionsLeased") or 0),
            "regions": len(report.get("regions") or ()),
            "heldBytes": max(held, int(report.get("readyBytes") or 0)),
            "message": report.get("message") or "",
        }


def _write_pools(summaries: Sequence[Mapping[str, Any]]) -> None:
    heads = ["POOL", "SIZE", "READY", "SHARE", "PREPARING", "BLOCKED", "LEAVING", "RELEASING"]
    heads += ["DEGRADED", "FAILED", "LEASED", "OLDEST"]
    rows = []
    for pool in summaries:
        ready, selected = pool["ready"], pool["selected"]
        share = pool["readyPercent"]
        rows.append(
            [
                pool["name"] + (" (deleted)" if pool["deleted"] else ""),
                pool["size"] or "-",
                "-" if selected is None else f"{ready or 0}/{selected}",
                "-" if share is None else f"{share:g}%",
                *(_or_dash(pool[name]) for name in ("preparing", "blocked", "leaving")),
                *(_or_dash(pool[name]) for name in ("releasing", "degraded", "failed")),
                str(pool["leasedNodes"]),
                _age(pool["oldestSeconds"]),
            ]
        )
    _write_table(heads, rows, "no pools")


def _write_nodes(rows: Sequence[Mapping[str, Any]], *, all_nodes: bool) -> None:
    shown = list(rows) if all_nodes else [row for row in rows if row["phase"] != "Ready"][:_SHOWN]
    left = len(rows) - len(shown)
    sys.stdout.write("\n")
    heads = ["NODE", "POOL", "PHASE", "REASON", "SINCE", "LEASED", "HELD", "MESSAGE"]
    table = [
        [
            *(str(row[name]) for name in ("node", "pool", "phase")),
            row["reason"] or "-",
            _age(row["sinceSeconds"]),
            f"{row['regionsLeased']}/{row['regions']}",
            f"{row['heldBytes'] / (1 << 30):.1f} GiB",
            _cut(row["message"]),
        ]
        for row in shown
    ]
    _write_table(heads, table, "all nodes are Ready" if rows else "no nodes")
    if shown and left:
        sys.stdout.write(f"and {left} more; --all shows them\n")


def doctor(kubectl: Kubectl, options: argparse.Namespace) -> int:
    """Run `hostprep doctor` in the agent's Pod of a node; its exit code is ours."""
    where = ["-n", options.namespace] if options.namespace else ["--all-namespaces"]
    selector = ["-l", _AGENTS, "--field-selector", f"spec.nodeName={options.node}"]
    pods = kubectl.get("pods", *where, *selector)["items"]
    if not pods:
        kubectl.get("nodes", options.node)  # a clear message where the name is wrong
        raise HostprepError(
            f"no agent's Pod is on node {options.node}",
            reason="NoAgent",
            remedy="give its namespace with -n, or see why the DaemonSet leaves the node out",
        )
    running = [pod for pod in pods if (pod.get("status") or {}).get("phase") == "Running"]
    if not running:
        name = pods[0]["metadata"]["name"]
        raise HostprepError(
            f"the agent's Pod {name} on node {options.node} is not running",
            reason="AgentNotRunning",
            remedy=f"kubectl describe pod -n {pods[0]['metadata']['namespace']} {name}",
            exit_code=1,
        )
    metadata = running[0]["metadata"]
    command = ["hostprep", "doctor", *(["-o", "json"] if options.output == "json" else [])]
    target = ["-n", metadata["namespace"], metadata["name"], "-c", "agent"]
    return kubectl.pass_through("exec", *target, "--", *command)


def release(kubectl: Kubectl, options: argparse.Namespace) -> int:
    """Have a pool's memory released, on all nodes or on one, unless engines use it."""
    pool = kubectl.get(_POOLS, options.pool)
    nodes = kubectl.get(_NODES)["items"]
    rows = [row for node in nodes for row in _node_rows(node, time.time())]
    rows = [row for row in rows if row["pool"] == options.pool]
    if options.node:
        rows = [row for row in rows if row["node"] == options.node]
        label = _checked_label(kubectl, pool, options.node)
    leased = [row for row in rows if row["regionsLeased"]]
    if leased and "leased" not in options.force:
        raise _leased_error(options.pool, leased)
    if not options.node:
        _check_protection(pool)
    size = sum(row["heldBytes"] for row in rows)
    plan: dict[str, Any] = {
        "dryRun": options.dry_run,
        "pool": options.pool,
        "node": options.node,
        "nodes": [row["node"] for row in rows],
        "leasedNodes": [row["node"] for row in leased],
        "heldBytes": size,
        "saved": None,
    }
    where = f"node {options.node}" if options.node else f"{len(rows)} nodes"
    what = f"pool {options.pool} ({size / (1 << 30):.1f} GiB) of {where}"
    if not options.dry_run:
        if not options.yes:
            _confirm(what)
        if options.node:
            _unlabel(kubectl, options.pool, options.node)
        else:
            plan["saved"] = _save(pool, options.save)
            _delete(kubectl, pool, plan["saved"], although_leased="leased" in options.force)
    if options.output == "json":
        _write_json(plan)
        return 0
    if options.dry_run:
        sys.stdout.write(f"{what} would be released\n")
        return 0
    back = f"kubectl apply -f {plan['saved']}"
    if options.node:
        back = f"kubectl label node {options.node} {label}"
    sys.stdout.write(
        f"{what} is to be released, after the grace period of spec.release and within its "
        f"budget\nuntil then, and to have it again: {back}\nsee kubectl hostprep status\n"
    )
    return 0


def _leased_error(pool: str, leased: Sequence[Mapping[str, Any]]) -> HostprepError:
    first = [f"{r['node']} ({r['regionsLeased']} of {r['regions']})" for r in leased[:_SHOWN]]
    more = f" and {len(leased) - _SHOWN} more" if len(leased) > _SHOWN else ""
    return HostprepError(
        f"engines hold regions of pool {pool} on {len(leased)} nodes: {', '.join(first)}{more}",
        reason="Leased",
        remedy="stop these engines first; with --force leased each node releases when its last "
        "lease ends",
    )


def _check_protection(pool: Mapping[str, Any]) -> None:
    if (pool.get("spec") or {}).get("deletionProtection") == "Always":
        name = pool["metadata"]["name"]
        patch = '{"spec":{"deletionProtection":"WhileLeased"}}'
        raise HostprepError(
            f"pool {name} has deletionProtection Always",
            reason="Protected",
            remedy=f"kubectl patch hmp {name} --type merge -p '{patch}', then run this again",
        )


def _checked_label(kubectl: Kubectl, pool: Mapping[str, Any], node: str) -> str:
    """Return the pool's static label with its value; refuse unless the pool needs it there."""
    key, spec = _label(pool["metadata"]["name"]), pool.get("spec") or {}
    labels = kubectl.get("nodes", node)["metadata"].get("labels") or {}
    if key not in labels:
        raise HostprepError(
            f"node {node} has no label {key}",
            reason="NotSelected",
            remedy="see its labels with kubectl get node --show-labels",
        )
    terms = spec.get("nodeSelectorTerms") or ()
    by_terms = bool(terms) and all(_needs(term, key) for term in terms)
    if key not in (spec.get("nodeSelector") or {}) and not by_terms:
        raise HostprepError(
            f"pool {pool['metadata']['name']} does not select nodes by label {key}",
            reason="OtherSelector",
            remedy="change the labels that it selects by, or its selector",
        )
    return f"{key}={labels[key]}"


def _needs(term: Mapping[str, Any], key: str) -> bool:
    """Whether a term selects nodes with that label only."""
    return any(
        expression.get("key") == key and expression.get("operator") in ("In", "Exists")
        for expression in term.get("matchExpressions") or ()
    )


def _label(pool: str) -> str:
    return f"pool.{_GROUP}/{pool}"


def _unlabel(kubectl: Kubectl, pool: str, node: str) -> None:
    kubectl.run("label", "node", node, f"{_label(pool)}-")


def _delete(
    kubectl: Kubectl, pool: Mapping[str, Any], saved: str, *, although_leased: bool
) -> None:
    """Delete exactly this pool, not one that was created under its name meanwhile.

    The chart's policy keeps a pool in use: where that is accepted, its protection goes first, and
    comes back, with nothing saved, when the pool could not be deleted.
    """
    name, uid = pool["metadata"]["name"], pool["metadata"]["uid"]
    protection = (pool.get("spec") or {}).get("deletionProtection")

    def protect(word: str | None) -> None:
        patch = {"metadata": {"uid": uid}, "spec": {"deletionProtection": word}}
        kubectl.run("patch", _POOLS, name, "--type=merge", "-p", json.dumps(patch))

    options = {"kind": "DeleteOptions", "apiVersion": "v1", "preconditions": {"uid": uid}}
    path = f"/apis/{pool['apiVersion']}/hostmemorypools/{name}"
    try:
        if although_leased:
            protect("None")
        kubectl.run("delete", "--raw", path, "-f", "-", stdin=json.dumps(options))
    except HostprepError as error:
        error.remedy = f"see whether pool {name} is there still: its manifest is in {saved}"
        with contextlib.suppress(HostprepError):
            where = ("-o", "jsonpath={.metadata.uid}", "--ignore-not-found")
            if kubectl.run("get", _POOLS, name, *where) == uid:
                if although_leased:
                    protect(protection)
                os.remove(saved)
                error.remedy = "the pool is as it was; run this again when that is mended"
        raise


def _save(pool: Mapping[str, Any], path: str | None) -> str:
    """Write the pool's manifest to a new file; return its name.

    One of before the word `allNodes`, which selects every node by naming none, gets the word: it
    could not be created again without it.
    """
    stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
    path = path or f"hostmemorypool-{pool['metadata']['name']}-{stamp}.json"
    metadata = {k: v for k, v in pool["metadata"].items() if k not in _SERVER_FIELDS}
    spec = {**(pool.get("spec") or {})}
    if not any(spec.get(word) for word in _SELECTORS):
        spec = {k: v for k, v in spec.items() if k not in _SELECTORS}
        spec["allNodes"] = True
    manifest = {**pool, "metadata": metadata, "spec": spec}
    manifest.pop("status", None)
    try:
        with open(path, "x", encoding="utf-8") as file:
            json.dump(manifest, file, indent=2)
            file.write("\n")
    except OSError as error:
        raise HostprepError(
            f"the pool's manifest cannot be saved: {error}",
            reason="NotSaved",
            remedy="give another file with --save",
        ) from error
    return path


def _confirm(what: str) -> None:
    if not sys.stdin.isatty():
        raise HostprepError(
            f"this releases {what}, and there is no terminal to confirm it on",
            reason="NotConfirmed",
            remedy="check with --dry-run, then give --yes",
        )
    sys.stderr.write(f"Release {what}? [y/N] ")
    sys.stderr.flush()
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        raise HostprepError("not released", reason="NotConfirmed")


def _rank(phase: str) -> int:
    return _WORST_FIRST.index(phase) if phase in _WORST_FIRST else -1


def _kept_until(entry: Mapping[str, Any]) -> str:
    """Return until when an entry that is no longer wanted is kept, or nothing."""
    return str(entry.get("releaseAfter") or "") if entry.get("state") != "Absent" else ""


def _first(*seconds: int | None) -> int | None:
    return next((found for found in seconds if found is not None), None)


def _seconds_since(text: str | None, now_s: float) -> int | None:
    """Return whole seconds since a time as the API server writes it; None for none."""
    with contextlib.suppress(ValueError, TypeError):
        then_s = timegm(time.strptime((text or "")[:19], "%Y-%m-%dT%H:%M:%S"))
        return max(int(now_s - then_s), 0)
    return None


def _age(seconds: int | None) -> str:
    """Return a duration as kubectl writes ages."""
    if seconds is None:
        return "-"
    for unit, size in (("d", 86400), ("h", 3600), ("m", 60)):
        if seconds >= 2 * size:
            return f"{seconds // size}{unit}"
    return f"{seconds}s"


def _or_dash(count: int | None) -> str:
    return "-" if count is None else str(count)


def _cut(text: str) -> str:
    return text if len(text) <= _MESSAGE_CHARS else text[: _MESSAGE_CHARS - 1] + "…"


def _printable(text: str) -> str:
    """Return what others wrote without what a terminal would obey."""
    return "".join(c if c.isprintable() else "?" for c in text)


def _write_table(heads: Sequence[str], rows: Sequence[Sequence[str]], otherwise: str) -> None:
    if not rows:
        sys.stdout.write(f"{otherwise}\n")
        return
    lines = [list(heads), *([_printable(cell) for cell in row] for row in rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(heads))]
    for line in lines:
        cells = (cell.ljust(width) for cell, width in zip(line, widths))
        sys.stdout.write("   ".join(cells).rstrip() + "\n")


def _write_json(document: Any) -> None:
    json.dump(document, sys.stdout, indent=2)
    sys.stdout.write("\n")


def _parser() -> argparse.ArgumentParser:
    shared = argparse.ArgumentParser(add_help=False)
    shared.add_argument("--context", help="of the kubeconfig, as kubectl's")
    shared.add_argument("--kubeconfig", metavar="FILE", help="as kubectl's")
    shared.add_argument("-o", "--output", choices=["table", "json"], default="table")
    parser = argparse.ArgumentParser(
        prog="kubectl hostprep",
        description="Host memory pools for LLM engines' KV caches: see them, find what stands in "
        "the way on a node, release them.",
        epilog="exit codes: 0 done, 1 failed, 2 bad input or refused (nothing was changed)",
    )
    parser.add_argument("--version", action="version", version=VERSION)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    show = commands.add_parser("status", parents=[shared], help="pools, and nodes worst first")
    show.add_argument("pool", nargs="?", help="this one only")
    show.add_argument("--all", action="store_true", help="every node, Ready ones too")
    show.set_defaults(run=status)

    look = commands.add_parser(
        "doctor", parents=[shared], help="what stands in the way on a node, by its agent"
    )
    look.add_argument("node")
    look.add_argument("-n", "--namespace", help="of the agents; without: any")
    look.set_defaults(run=doctor)

    give = commands.add_parser(
        "release", parents=[shared], help="give a pool's memory back, unless engines use it"
    )
    give.add_argument("pool")
    give.add_argument("--node", help="only of this node: its label pool.hostprep.dev/POOL goes")
    give.add_argument(
        "--force",
        action="append",
        default=[],
        choices=["leased"],
        help="go on although engines use the memory, deletionProtection WhileLeased too: nodes "
        "release when the last lease ends",
    )
    give.add_argument("--dry-run", action="store_true", help="check, and say what would be done")
    give.add_argument("--yes", action="store_true", help="do not ask; needed without a terminal")
    give.add_argument("--save", metavar="FILE", help="for the deleted pool's manifest")
    give.set_defaults(run=release)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the plugin; return the exit code."""
    options = _parser().parse_args(arguments)
    given = ["--context", options.context] if options.context else []
    given += ["--kubeconfig", options.kubeconfig] if options.kubeconfig else []
    try:
        return int(options.run(Kubectl(given), options))
    except HostprepError as error:
        if options.output == "json":
            said = {"error": error.message, "reason": error.reason, "remedy": error.remedy or None}
            _write_json(said)
        tail = f"; {error.remedy}" if error.remedy else ""
        sys.stderr.write(f"hostprep: {_printable(error.message)}{tail}\n")
        return error.exit_code
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
