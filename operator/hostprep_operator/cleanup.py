"""`hostprep-operator cleanup`: releases all memory, and leaves no trace on any node.

First it checks everything that could stop it half way, and changes nothing until all checks pass.
Then it keeps the pools in a ConfigMap, deletes them, and has the nodes release, a tenth of them at
a time. It does the operator's part itself, whether an operator runs beside it or not: a conflict
only means that the other was faster. Killed at any point and run again it ends the same way.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Literal

import click
import structlog

from hostprep.api.names import AGENT_COMPONENT, COMPONENT_LABEL
from hostprep.console import print_json, print_table, warn
from hostprep.errors import BadInputError, FailedError
from hostprep.kube.client import (
    HOST_MEMORY_NODES,
    NODES,
    POOLS,
    Json,
    KubeClient,
    Resource,
    pods,
)
from hostprep.kube.errors import ConflictError, NoSuchResourceError, RefusedError
from hostprep.units import format_bytes
from hostprep_operator.pools_backup import (
    BACKUP_NAME,
    Backup,
    BackupStore,
    RestoreResult,
    manifest_of,
    manifests_without_room,
    patch_before_deleting,
    refused_text,
    restore,
    too_large,
)
from hostprep_operator.preflight import (
    SHOWN,
    Holder,
    Refusal,
    check_leased,
    check_protected,
    check_rights,
    check_unreachable,
    entries_after,
    reachable_nodes,
    share_of,
    turns,
    why_left,
)
from hostprep_operator.reconcile.changes import Settings, Write
from hostprep_operator.reconcile.node_conditions import listed, nodes_of
from hostprep_operator.reconcile.taint_and_labels import strip_node
from hostprep_operator.records import AgentRecord, NodeRecord
from hostprep_operator.writer import Writer

_log = structlog.get_logger("cleanup")

_POLL_S = 1.0
_AGENTS_EVERY_S = 15.0
_PAGE = 250
_AT_ONCE = 8
_SHOWN = 5
_ROUNDS = 10
"""So often a pool may change between its backup and its deletion."""
_INVALID = 422
_RIGHTS_WITHIN_S = 10.0
"""Argo CD creates the hook's Job and its rights at once, in no order."""
_RUNNING_SHOWS_WITHIN_S = 3.0
"""A running operator creates a HostMemoryNode again at once."""
_AGENT_SELECTOR = f"app.kubernetes.io/name=hostprep,{COMPONENT_LABEL}={AGENT_COMPONENT}"
_NAMESPACES = Resource("Namespace", "/api/v1/namespaces")
_REVIEWS = Resource(
    "SelfSubjectAccessReview", "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class CleanupOptions:
    """The command line's options."""

    namespace: str = "hostprep-system"
    """Of the agents' Pods and the backup."""
    liveness: Literal["pods", "off"] = "pods"
    """Whether an agent lives while its Pod is Ready, or is not looked at."""
    force: frozenset[str] = frozenset()
    """What is accepted as it is: keys of FORCE_WORDS."""
    keep_memory: bool = False
    dry_run: bool = False
    timeout_s: float = 600.0
    taint_keys: frozenset[str] | None = None
    """Keys of the taints that may be removed; None: any of ours."""
    kubeconfig: str | None = None

    @property
    def settings(self) -> Settings:
        """Those of an operator that does this."""
        return Settings(liveness="off", taint_keys=self.taint_keys)


@dataclass(frozen=True, slots=True)
class Left:
    """A node that still holds memory."""

    node: str
    why: str
    size_bytes: int


@dataclass(slots=True)
class CleanupResult:
    """What was done, or would be."""

    dry_run: bool
    refused: list[Refusal] = field(default_factory=list)
    """Checks that failed: nothing was changed."""
    accepted: list[Refusal] = field(default_factory=list)
    """Checks that failed and were accepted by --force."""
    backup: str = ""
    """Where the pools are kept, as namespace/name; empty where there were none."""
    pools_kept: list[str] = field(default_factory=list)
    """The pools in the backup."""
    pools_deleted: list[str] = field(default_factory=list)
    host_memory_nodes_deleted: list[str] = field(default_factory=list)
    nodes_cleaned: list[str] = field(default_factory=list)
    released_bytes: int = 0
    """Given back by the nodes; with `dry_run`, what they hold."""
    still_holding: list[str] = field(default_factory=list)
    """Nodes that had not given their memory back when the time was over."""
    left: list[Left] = field(default_factory=list)
    """The same with their reasons, and nodes whose memory --force unreachable gave up."""


@dataclass(slots=True)
class _State:
    """The objects to clean up."""

    nodes: dict[str, NodeRecord]
    holders: dict[str, Holder]
    reachable: frozenset[str]
    """Nodes whose agent can act now."""
    coming: frozenset[str]
    """Nodes with an agent's Pod that is not Ready, or not yet."""
    settings: Settings

    @property
    def marked(self) -> list[str]:
        """Nodes with any of our marks."""
        return sorted(name for name, node in self.nodes.items() if strip_node(node, self.settings))


async def run_cleanup(
    options: CleanupOptions, *, as_json: bool, confirm: Callable[[str], None] | None
) -> int:
    """Clean up and print what was done.

    Returns 0, 1 when nodes still hold memory, or 2 when a check refused and nothing was changed.
    `confirm` is given the API server's address, and raises where that is not to be. Raises
    BadInputError without a way to the API server or without the namespace, and FailedError when
    others work against it.
    """
    kube = await KubeClient.connect(options.kubeconfig, name="hostprep-operator")
    if confirm is not None and not options.dry_run:
        confirm(str(kube.configuration.host))
    cleanup = _Cleanup(kube, options)
    try:
        await cleanup.run()
    finally:
        await kube.close()
    _print(cleanup.result, as_json=as_json)
    if cleanup.result.refused:
        return 2
    return 1 if cleanup.result.still_holding else 0


async def run_restore(
    *,
    namespace: str,
    names: frozenset[str],
    dry_run: bool,
    as_json: bool,
    kubeconfig: str | None,
) -> int:
    """Restore the pools of the last clean-up, and print what was done.

    Returns 0, or 1 when the API server refused some of them: the others are restored.
    Raises BadInputError where there is nothing to restore, and ApiError.
    """
    kube = await KubeClient.connect(kubeconfig, name="hostprep-operator")
    try:
        result = await restore(kube, namespace, names, dry_run=dry_run)
    finally:
        await kube.close()
    if as_json:
        print_json(asdict(result))
    else:
        _print_restored(result)
    for name, why in result.refused.items():
        warn(refused_text(name, why, namespace))
    return 1 if result.refused else 0


def _print_restored(result: RestoreResult) -> None:
    would = "would be " if result.dry_run else ""
    done = {
        f"{would}created": result.created,
        f"{would}put back": result.put_back,
        "there already": result.unchanged,
        "there, but different": result.different,
        "refused": list(result.refused),
    }
    rows = [[what, str(len(pools)), listed(pools, _SHOWN)] for what, pools in done.items()]
    print_table("", ["POOLS", "COUNT", "WHICH"], rows)


class _Cleanup:
    """One run of the command."""

    def __init__(self, kube: KubeClient, options: CleanupOptions) -> None:
        self._kube = kube
        self._options = options
        self._writer = Writer(kube)
        self._store = BackupStore(kube, options.namespace)
        self._kept_pools: frozenset[str] = frozenset()
        self._given_up: frozenset[str] = frozenset()
        self._last_line = ""
        self._known: set[str] = set()
        """Kinds that could be listed: one that vanishes meanwhile is no sign of success."""
        self._unknown: set[str] = set()
        self.result = CleanupResult(dry_run=options.dry_run)

    async def run(self) -> None:
        """Clean up; the result says what was done. Raises BadInputError, ApiError, FailedError."""
        if not self._options.keep_memory:
            ends_s = time.monotonic() + _RIGHTS_WITHIN_S
            while missing := check_rights(await self._missing_rights()):
                if time.monotonic() >= ends_s:
                    self.result.refused = [missing]
                    return
                await asyncio.sleep(_POLL_S)
        pools = await self._pools()
        found = await self._backup_to_go_on_with()
        self._kept_pools = _retained([*found.manifests.values(), *map(manifest_of, pools)])
        before = await self._state()
        if not self._options.keep_memory:
            await self._preflight(pools, before)
        if self._options.dry_run or self.result.refused:
            self._plan(pools, before)
            return
        if self._options.keep_memory:
            await self._each(sorted(before.holders), partial(self._delete, before))
        else:
            await self._delete_pools(pools)
            await self._release(before)
        await self._strip()
        if self._options.keep_memory:
            await self._check_that_it_lasts()
        # Done by this command or by an operator beside it: this is what is gone.
        after = await self._state()
        gone = before.holders.keys() - after.holders.keys()
        self.result.host_memory_nodes_deleted = sorted(gone)
        self.result.nodes_cleaned = sorted(set(before.marked) - set(after.marked))
        if not self._options.keep_memory and not self.result.still_holding:
            await self._store.mark(await self._store.read(), "complete")

    async def _backup_to_go_on_with(self) -> Backup:
        """Return what an interrupted run kept; empty where none was."""
        if self._options.keep_memory:
            return Backup(self._options.namespace)
        if await self._kube.get(_NAMESPACES, self._options.namespace) is None:
            raise BadInputError(
                f"namespace {self._options.namespace} does not exist: pools are kept there, and "
                "agents' Pods looked for",
                reason="NoNamespace",
                remedy="give --namespace of the release; where it was deleted, create it again",
            )
        backup = await self._store.read()
        return backup if backup.state == "open" else Backup(self._options.namespace)

    async def _preflight(self, pools: Sequence[Json], before: _State) -> None:
        """Check everything that could stop this half way; the result gets what failed."""
        holders = [before.holders[name] for name in sorted(before.holders)]
        manifests = [manifest_of(pool) for pool in pools]
        checks = (
            check_protected(manifests),
            check_leased(holders, before.nodes),
            check_unreachable(holders, before.reachable),
        )
        for refusal in checks:
            if refusal is not None:
                accepted = refusal.check in self._options.force
                (self.result.accepted if accepted else self.result.refused).append(refusal)
        if any(refusal.check == "unreachable" for refusal in self.result.accepted):
            self._given_up = frozenset(
                h.name for h in holders if h.held and h.name not in before.reachable
            )
        if large := manifests_without_room(manifests):
            raise too_large(large)

    async def _missing_rights(self) -> list[str]:
        """Return the rights that this account lacks, such as `delete hostmemorypools`."""
        group, missing = "hostprep.dev", []
        for verb, api_group, resource, name in (
            *((verb, group, "hostmemorypools", "") for verb in ("list", "patch", "delete")),
            *((verb, group, "hostmemorynodes", "") for verb in ("list", "patch", "delete")),
            *((verb, "", "nodes", "") for verb in ("list", "patch")),
            ("patch", "", "nodes/status", ""),
            ("get", "", "namespaces", self._options.namespace),
            ("list", "", "pods", ""),
            ("create", "", "configmaps", ""),
            *((verb, "", "configmaps", BACKUP_NAME) for verb in ("get", "patch", "delete")),
        ):
            is_ours = resource in {"namespaces", "pods", "configmaps"}
            attributes = {
                "verb": verb,
                "group": api_group,
                "resource": resource.partition("/")[0],
                "subresource": resource.partition("/")[2],
                "name": name,
                "namespace": self._options.namespace if is_ours else "",
            }
            review = {
                "apiVersion": "authorization.k8s.io/v1",
                "kind": "SelfSubjectAccessReview",
                "spec": {"resourceAttributes": attributes},
            }
            answer = await self._kube.create(_REVIEWS, review)
            if not ((answer or {}).get("status") or {}).get("allowed"):
                where = f" in {self._options.namespace}" if is_ours else ""
                missing.append(f"{verb} {resource}{where}")
        return missing

    def _plan(self, pools: Sequence[Json], before: _State) -> None:
        """Have the result say what would be done; nothing where a check refused."""
        if self.result.refused:
            return
        self.result.nodes_cleaned = before.marked
        self.result.host_memory_nodes_deleted = sorted(before.holders)
        if not self._options.keep_memory:
            names = [pool["metadata"]["name"] for pool in pools]
            self.result.pools_deleted = self.result.pools_kept = names
            self.result.backup = f"{self._options.namespace}/{BACKUP_NAME}" if names else ""
            self.result.released_bytes = sum(h.size_bytes for h in before.holders.values())

    async def _delete_pools(self, pools: Sequence[Json]) -> None:
        """Keep all pools in the backup, then delete them, each in the version that was kept."""
        if not pools:
            return
        backup = await self._store.begin()
        await self._store.keep(backup, map(manifest_of, pools))
        self.result.backup = f"{self._options.namespace}/{BACKUP_NAME}"
        self.result.pools_kept = sorted(backup.manifests)
        names = listed(self.result.pools_kept, _SHOWN)
        self._progress(f"kept in ConfigMap {self.result.backup}: {names}")
        for pool in pools:
            if await self._delete_pool(backup, pool):
                self.result.pools_deleted.append(pool["metadata"]["name"])

    async def _delete_pool(self, backup: Backup, pool: Json) -> bool:
        """Let a pool go and delete it; False when it was gone already."""
        name, found = pool["metadata"]["name"], pool
        for _ in range(_ROUNDS):
            if manifest_of(found) != backup.manifests.get(name):  # people changed it meanwhile
                await self._store.keep(backup, [manifest_of(found)])
            try:
                if await self._kube.patch(POOLS, name, patch_before_deleting(found)) is None:
                    return False
                return await self._kube.delete(POOLS, name, uid=found["metadata"]["uid"])
            except RefusedError as error:
                if error.status != _INVALID:
                    raise
                # Written under rules that were tightened since: it cannot be changed any more,
                # and whether it may be deleted as it is is the server's to say.
                _log.info("deleted unchanged", pool=name, error=str(error))
                return await self._kube.delete(POOLS, name, uid=found["metadata"]["uid"])
            except ConflictError:  # mostly the operator's own writes of status
                current = await self._kube.get(POOLS, name)
                if current is None:
                    return False
                found = current
        raise FailedError(
            f"pool {name} changes all the time",
            reason="PoolChanges",
            remedy="stop who writes it (an operator of GitOps?), then run this again",
        )

    async def _release(self, before: _State) -> None:
        """Wait until every node has given its memory back, and tell them when it is their turn."""
        ends_s = time.monotonic() + self._options.timeout_s
        agents_at_s = time.monotonic()
        state, total = replace(before), len(before.holders)
        size_bytes = sum(holder.size_bytes for holder in before.holders.values())
        at_once = share_of(sum(bool(holder.held) for holder in before.holders.values()))
        while True:
            if pools := [pool["metadata"]["name"] for pool in await self._pools()]:
                raise FailedError(
                    f"pools were created meanwhile: {listed(pools, _SHOWN)}",
                    remedy="find out who creates them (Argo CD, Flux?), then run this again",
                )
            state.holders = await self._holders()
            if time.monotonic() - agents_at_s > _AGENTS_EVERY_S:
                await self._find_agents(state)
                agents_at_s = time.monotonic()
            holders = [state.holders[name] for name in sorted(state.holders)]
            due = turns(holders, reachable=state.reachable, at_once=at_once)
            names = {h.name for h in due} | {h.name for h in holders if _is_stale(h, state)}
            await self._each(sorted(names), partial(self._step, state))
            left = {n: h for n, h in state.holders.items() if n not in self._given_up}
            left_bytes = sum(holder.size_bytes for holder in left.values())
            given_up = len(state.holders) - len(left)
            self.result.released_bytes = max(
                size_bytes - sum(h.size_bytes for h in state.holders.values()), 0
            )
            if left:
                self._progress(
                    f"{total - given_up - len(left)} of {nodes_of(total - given_up)} released, "
                    f"{format_bytes(left_bytes)} still held"
                )
            ended = time.monotonic() >= ends_s
            if ended:
                self.result.still_holding = sorted(left)
            if ended or not left:
                self.result.left = [
                    Left(name, why_left(holder, state.reachable), holder.size_bytes)
                    for name, holder in sorted(state.holders.items())
                ]
                return
            await asyncio.sleep(_POLL_S)

    async def _step(self, state: _State, name: str) -> None:
        """Have a node release: take our marks off it, then change or delete its HostMemoryNode."""
        holder, node = state.holders[name], state.nodes.get(name)
        if node is None:
            found = await self._kube.get(NODES, name)
            node = NodeRecord.from_json(found) if found else None
        if node is None or holder.owner_uid != node.uid:
            await self._delete(state, name)
            return
        if strip_node(node, state.settings):
            await self._strip_one(node)
        entries = entries_after(holder)
        unheard = not holder.held and name not in state.reachable | state.coming
        try:
            if not entries or unheard:
                await self._kube.delete(
                    HOST_MEMORY_NODES, name, uid=holder.uid, resource_version=holder.version
                )
            elif entries != holder.entries:
                patch = {
                    "metadata": {"resourceVersion": holder.version},
                    "spec": {"pools": [dict(entry) for entry in entries]},
                }
                await self._kube.patch(HOST_MEMORY_NODES, name, patch)
        except ConflictError:  # the next round sees what it is now
            return

    async def _strip(self) -> None:
        """Remove the marks that are left on nodes, except on those that still hold memory."""
        state = await self._state()
        names = [name for name in state.marked if name not in self.result.still_holding]
        await self._each(names, lambda name: self._strip_one(state.nodes[name]))

    async def _strip_one(self, node: NodeRecord) -> None:
        current: NodeRecord | None = node
        settings = self._options.settings
        while current is not None:
            if await self._write(current.name, strip_node(current, settings)):
                return
            document = await self._kube.get(NODES, node.name)
            current = NodeRecord.from_json(document) if document else None

    async def _delete(self, state: _State, name: str) -> None:
        await self._kube.delete(HOST_MEMORY_NODES, name, uid=state.holders[name].uid)

    async def _check_that_it_lasts(self) -> None:
        """Raise FailedError when an operator puts everything back."""
        await asyncio.sleep(_RUNNING_SHOWS_WITHIN_S)
        state = await self._state()
        if state.holders or state.marked:
            raise FailedError(
                "an operator is running and puts back what was taken away",
                reason="OperatorRunning",
                remedy="scale its Deployment to 0, then run this again",
            )

    async def _write(self, name: str, writes: tuple[Write, ...]) -> bool:
        """Write it; False when another client wrote first."""
        try:
            await self._writer.carry_out(name, writes)
        except ConflictError:
            return False
        return True

    async def _each(self, names: list[str], work: Callable[[str], Awaitable[None]]) -> None:
        """Run `work` for all, several at once; raise the first failure when all have ended."""
        slots = asyncio.Semaphore(_AT_ONCE)

        async def one(name: str) -> None:
            async with slots:
                await work(name)

        results = await asyncio.gather(*(one(name) for name in names), return_exceptions=True)
        for error in results:
            if isinstance(error, BaseException):
                raise error

    async def _state(self) -> _State:
        holders = await self._holders()
        nodes = [NodeRecord.from_json(item) async for item in self._all(NODES)]
        by_name = {node.name: node for node in nodes}
        state = _State(by_name, holders, frozenset(), frozenset(), self._options.settings)
        await self._find_agents(state)
        return state

    async def _holders(self) -> dict[str, Holder]:
        found = [
            Holder.from_json(item, self._kept_pools) async for item in self._all(HOST_MEMORY_NODES)
        ]
        return {holder.name: holder for holder in found}

    async def _find_agents(self, state: _State) -> None:
        """Have the state say where agents can act."""
        agents: dict[str, bool] | None = None
        if self._options.liveness == "pods" and not self._options.keep_memory:
            agents = {}
            ours = pods(self._options.namespace)
            async for page in self._kube.pages(ours, limit=_PAGE, label_selector=_AGENT_SELECTOR):
                for pod in map(AgentRecord.from_json, page.items):
                    ready = pod.ready and not pod.deleting
                    agents[pod.node_name] = agents.get(pod.node_name, False) or ready
        state.reachable = reachable_nodes(state.holders.values(), state.nodes, agents)
        state.coming = frozenset(agents or ()) - state.reachable

    async def _pools(self) -> list[Json]:
        return [item async for item in self._all(POOLS)]

    async def _all(self, resource: Resource) -> AsyncIterator[Json]:
        """Yield every object; none where the resource's definition is gone already."""
        try:
            async for page in self._kube.pages(resource, limit=_PAGE):
                for item in page.items:
                    yield item
                self._known.add(resource.kind)
        except NoSuchResourceError:
            if resource.kind in self._known:
                raise
            if resource.kind not in self._unknown:
                self._progress(f"no {resource.kind} is known here: what agents hold stays")
            self._unknown.add(resource.kind)

    def _progress(self, line: str) -> None:
        if line != self._last_line:
            click.echo(f"hostprep-operator: {line}", err=True)
            self._last_line = line


def _retained(manifests: Sequence[Mapping[str, Json]]) -> frozenset[str]:
    """Return the pools whose memory is to stay; of two manifests of one, the later counts."""
    policies = {
        str(m["metadata"]["name"]): (m.get("spec") or {}).get("deletionPolicy") for m in manifests
    }
    return frozenset(name for name, policy in policies.items() if policy == "Retain")


def _is_stale(holder: Holder, state: _State) -> bool:
    """Whether the object has served: its Node is gone, or all that it told has been done."""
    node = state.nodes.get(holder.name)
    return (
        node is None
        or node.uid != holder.owner_uid
        or (holder.told and entries_after(holder) != holder.entries)
        or not holder.entries
    )


def _print(result: CleanupResult, *, as_json: bool) -> None:
    if as_json:
        print_json(asdict(result))
    for refusal in result.accepted:
        warn(f"accepted: {refusal.text}")
    for refusal in result.refused:
        warn(refusal.text)
    if result.refused:
        warn("nothing was changed")
        return
    if not as_json:
        _print_table(result)
    if given_up := [left for left in result.left if left.node not in result.still_holding]:
        warn(f"given up, their memory stays taken: {_lines(given_up)}")
    if result.still_holding:
        left = [item for item in result.left if item.node in result.still_holding]
        warn(
            f"{nodes_of(len(left))} still holding memory: {_lines(left)}; they go on releasing by "
            "themselves while agents run: run this again, which goes on from here"
        )


def _print_table(result: CleanupResult) -> None:
    would = "would be " if result.dry_run else ""
    done = {
        f"pools {would}kept": result.pools_kept,
        f"pools {would}deleted": result.pools_deleted,
        f"HostMemoryNodes {would}deleted": result.host_memory_nodes_deleted,
        f"nodes {would}cleaned": result.nodes_cleaned,
    }
    rows = [[what, str(len(names)), listed(names, _SHOWN)] for what, names in done.items()]
    size = format_bytes(result.released_bytes)
    rows.append([f"memory {would}released", size, ""])
    if result.backup:
        rows.append(["backup", "", f"ConfigMap {result.backup}"])
    print_table("", ["WHAT", "COUNT", "WHICH"], rows)


def _lines(left: Sequence[Left]) -> str:
    shown = [f"{it.node} ({format_bytes(it.size_bytes)}, {it.why})" for it in left[:SHOWN]]
    more = len(left) - len(shown)
    return ", ".join(shown) + (f" and {more} more" if more else "")
