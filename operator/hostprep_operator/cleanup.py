"""`hostprep-operator cleanup`: releases all memory, and leaves no trace on any node.

It uses the operator's own pure core on a cluster in which no pool exists. So it does the same
whether an operator runs beside it or not: both compute the same writes, and a conflict only means
that the other was faster.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial

import click
import structlog

from hostprep.console import print_json, print_table, warn
from hostprep.errors import FailedError
from hostprep.kube.client import HOST_MEMORY_NODES, NODES, POOLS, Json, KubeClient, Resource
from hostprep.kube.errors import ConflictError, NoSuchResourceError, RefusedError
from hostprep_operator.reconcile.changes import NodeView, Settings, Write
from hostprep_operator.reconcile.node import reconcile_node
from hostprep_operator.reconcile.node_conditions import listed, nodes_of
from hostprep_operator.reconcile.taint_and_labels import strip_node
from hostprep_operator.records import HostMemoryNodeRecord, NodeRecord
from hostprep_operator.writer import Writer

_log = structlog.get_logger("cleanup")

_POLL_S = 1.0
_PAGE = 250
_AT_ONCE = 8
_SHOWN = 5
_RUNNING_SHOWS_WITHIN_S = 3.0
"""A running operator creates a HostMemoryNode again at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CleanupOptions:
    """The command line's options."""

    keep_memory: bool = False
    dry_run: bool = False
    timeout_s: float = 600.0
    taint_keys: frozenset[str] | None = None
    """Keys of the taints that may be removed; None: any."""
    kubeconfig: str | None = None

    @property
    def settings(self) -> Settings:
        """Those of an operator that does this."""
        return Settings(liveness="off", taint_keys=self.taint_keys)


@dataclass(slots=True)
class CleanupResult:
    """What was done, or would be."""

    dry_run: bool
    pools_deleted: list[str] = field(default_factory=list)
    host_memory_nodes_deleted: list[str] = field(default_factory=list)
    nodes_cleaned: list[str] = field(default_factory=list)
    still_holding: list[str] = field(default_factory=list)
    """Nodes that had not given their memory back when the time was over."""


@dataclass(frozen=True, slots=True)
class _State:
    """The objects to clean up."""

    nodes: dict[str, NodeRecord]
    holders: dict[str, HostMemoryNodeRecord]
    settings: Settings

    @property
    def marked(self) -> list[str]:
        """Nodes with any of our marks."""
        return sorted(name for name, node in self.nodes.items() if strip_node(node, self.settings))


async def run_cleanup(
    options: CleanupOptions, *, as_json: bool, confirm: Callable[[str], None] | None
) -> int:
    """Clean up and print what was done. Returns 0, or 1 when nodes still hold memory.

    `confirm` is given the API server's address, and raises where that is not to be. Raises
    BadInputError without a way to the API server, FailedError when an operator works against it
    or a right is missing.
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
    return 1 if cleanup.result.still_holding else 0


class _Cleanup:
    """One run of the command."""

    def __init__(self, kube: KubeClient, options: CleanupOptions) -> None:
        self._kube = kube
        self._options = options
        self._writer = Writer(kube)
        self._last_line = ""
        self.result = CleanupResult(dry_run=options.dry_run)

    async def run(self) -> None:
        """Clean up; the result says what was done. Raises ApiError and FailedError."""
        before = await self._state()
        if self._options.dry_run:
            self.result.nodes_cleaned = before.marked
            self.result.host_memory_nodes_deleted = sorted(before.holders)
            if not self._options.keep_memory:
                self.result.pools_deleted = [name for name, _ in await self._pools()]
            return
        if self._options.keep_memory:
            await self._each(sorted(before.holders), partial(self._delete, before))
        else:
            for name, uid in await self._pools():
                if await self._kube.delete(POOLS, name, uid=uid):
                    self.result.pools_deleted.append(name)
            await self._release()
        await self._strip()
        if self._options.keep_memory:
            await self._check_that_it_lasts()
        # Done by this command or by an operator beside it: this is what is gone.
        after = await self._state()
        gone = before.holders.keys() - after.holders.keys()
        self.result.host_memory_nodes_deleted = sorted(gone)
        self.result.nodes_cleaned = sorted(set(before.marked) - set(after.marked))

    async def _release(self) -> None:
        """Wait until every node has given its memory back, and do the operator's part of it."""
        ends_s = time.monotonic() + self._options.timeout_s
        while True:
            if pools := [name for name, _ in await self._pools()]:
                raise FailedError(
                    f"pools were created meanwhile: {listed(pools, _SHOWN)}",
                    remedy="find out who creates them, then run this again",
                )
            state = await self._state()
            names = sorted(state.holders.keys() | set(state.marked))
            await self._each(names, partial(self._step, state))
            left = sorted((await self._state()).holders)
            if not left:
                return
            self._progress(_holding(left))
            if time.monotonic() >= ends_s:
                self.result.still_holding = left
                return
            await asyncio.sleep(_POLL_S)

    async def _step(self, state: _State, name: str) -> None:
        """Write what an operator would for this node, now that there is no pool."""
        if name not in state.nodes:
            await self._delete(state, name)
            return
        view = NodeView(
            node=state.nodes[name],
            hmn=state.holders.get(name),
            settings=self._options.settings,
            now_s=time.time(),
        )
        changes = reconcile_node(view)
        if changes.unknown_pools:  # known here: the list of pools was read, and is empty
            changes = reconcile_node(replace(view, gone_pools=changes.unknown_pools))
        try:
            await self._write(name, changes.writes)
        except RefusedError as error:  # without the right an operator has to do it
            _log.info("left to the operator", node=name, error=str(error))

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
        holders = [
            HostMemoryNodeRecord.from_json(item) async for item in self._all(HOST_MEMORY_NODES)
        ]
        nodes = [NodeRecord.from_json(item) async for item in self._all(NODES)]
        by_name = {node.name: node for node in nodes}
        return _State(by_name, {h.name: h for h in holders}, self._options.settings)

    async def _pools(self) -> list[tuple[str, str]]:
        return [
            (item["metadata"]["name"], item["metadata"]["uid"]) async for item in self._all(POOLS)
        ]

    async def _all(self, resource: Resource) -> AsyncIterator[Json]:
        """Yield every object; none where the resource's definition is gone already."""
        try:
            async for page in self._kube.pages(resource, limit=_PAGE):
                for item in page.items:
                    yield item
        except NoSuchResourceError:
            return

    def _progress(self, line: str) -> None:
        if line != self._last_line:
            click.echo(f"hostprep-operator: {line}", err=True)
            self._last_line = line


def _holding(names: Sequence[str]) -> str:
    return f"{nodes_of(len(names))} still holding memory: {listed(names, _SHOWN)}"


def _print(result: CleanupResult, *, as_json: bool) -> None:
    if as_json:
        print_json(asdict(result))
        return
    would = "would be " if result.dry_run else ""
    done = {
        f"pools {would}deleted": result.pools_deleted,
        f"HostMemoryNodes {would}deleted": result.host_memory_nodes_deleted,
        f"nodes {would}cleaned": result.nodes_cleaned,
    }
    rows = [[what, str(len(names)), listed(names, _SHOWN)] for what, names in done.items()]
    print_table("", ["WHAT", "COUNT", "WHICH"], rows)
    if result.still_holding:
        warn(
            f"{_holding(result.still_holding)}; look at their agents, then run this again, "
            "or with --keep-memory"
        )
