"""The workers: each reconciles a key by the pure core and carries out its writes."""

from __future__ import annotations

import time
from collections.abc import Iterator

import structlog

from hostprep.errors import HostprepError
from hostprep.kube.client import HOST_MEMORY_NODES, NODES, POOLS, KubeClient
from hostprep.kube.errors import ConflictError
from hostprep_operator.deletion_check import DeletionCheck
from hostprep_operator.events import Recorder, Regarding
from hostprep_operator.metrics import Metrics
from hostprep_operator.queue import KeyedQueue, QueueClosed
from hostprep_operator.reconcile.changes import (
    EventNote,
    Grants,
    NodeChanges,
    NodeFacts,
    NodeView,
    PatchNode,
    PatchNodeStatus,
    Settings,
    Write,
)
from hostprep_operator.reconcile.kept import KeptNews
from hostprep_operator.reconcile.node import reconcile_node
from hostprep_operator.reconcile.pool import reconcile_pool
from hostprep_operator.records import (
    AgentRecord,
    PoolRecord,
    Record,
)
from hostprep_operator.store import Cache, EventHandler, Key, Kind
from hostprep_operator.writer import Writer

_log = structlog.get_logger("controller")

_TRIES = 4
"""In a row for a node whose objects change meanwhile; then it waits for its turn again."""
_SOONEST_RECHECK_S = 0.5


class Controller:
    """Reconciles keys, several at once, each by one worker at a time."""

    def __init__(
        self,
        *,
        kube: KubeClient,
        cache: Cache,
        queue: KeyedQueue[Key],
        handler: EventHandler,
        recorder: Recorder,
        metrics: Metrics,
        settings: Settings,
    ) -> None:
        self._kube = kube
        self._cache = cache
        self._queue = queue
        self._handler = handler
        self._recorder = recorder
        self._metrics = metrics
        self._settings = settings
        self._writer = Writer(kube, handler)
        self._deletion_check = DeletionCheck(kube, handler)
        self._grants: dict[str, Grants] = {}
        """Pool to the nodes on which its rollout lets something begin now."""
        self._kept_news: dict[str, KeptNews] = {}
        """By node."""
        metrics.queue_depth.set_function(lambda: float(len(queue)))

    async def work(self) -> None:
        """Work as one worker, until the queue is closed."""
        while True:
            try:
                key = await self._queue.get()
            except QueueClosed:
                return
            try:
                await self._reconcile(key)
            finally:
                self._queue.done(key)

    async def _reconcile(self, key: Key) -> None:
        began_s = time.perf_counter()
        try:
            await (self._node(key) if key.kind == "node" else self._pool(key))
        except ConflictError:
            self._queue.retry(key)  # ordinary where several write to a Node
        except HostprepError as error:
            self._failed(key, error.reason, str(error), getattr(error, "retry_after_s", 0.0))
        except Exception as error:
            _log.exception("look failed", key=key)
            self._failed(key, type(error).__name__, str(error), 0.0)
        else:
            self._queue.forget_failures(key)
        self._metrics.reconcile.labels(key.kind).observe(time.perf_counter() - began_s)

    def _failed(self, key: Key, reason: str, message: str, at_least_s: float) -> None:
        self._metrics.errors.labels(key.kind, reason).inc()
        delay_s = self._queue.retry(key, at_least_s=at_least_s)
        _log.warning(
            "look failed; it comes again",
            kind=key.kind,
            name=key.name,
            reason=reason,
            error=message,
            in_s=round(delay_s, 1),
        )

    async def _node(self, key: Key) -> None:
        for _ in range(_TRIES):
            changes = reconcile_node(self._view(key.name))
            if changes.unknown_pools and await self._are_known(key, changes.unknown_pools):
                continue
            try:
                await self._write(key, changes)
            except ConflictError:
                await self._refresh(key.name)
                continue
            self._report_kept(key.name)
            if changes.recheck_at_s is not None:
                delay_s = changes.recheck_at_s - time.time()
                self._queue.add_after(key, max(delay_s, _SOONEST_RECHECK_S))
            return
        raise ConflictError(f"{key.name} keeps changing")

    def _view(self, name: str) -> NodeView:
        return NodeView(
            node=self._cache.nodes.get(name),
            hmn=self._cache.host_memory_nodes.get(name),
            pools=tuple(self._cache.pools.values()),
            gone_pools=frozenset(self._handler.gone_pools),
            former_pools=self._handler.former_pools,
            agent=_current_agent(self._cache.agents_of(name)),
            agent_missing_since_s=self._handler.agent_gone_s.get(name),
            granted=frozenset(
                pool
                for pool, grants in self._grants.items()
                if name in grants.nodes and grants.hold(self._cache.pools.get(pool))
            ),
            settings=self._settings,
            now_s=time.time(),
        )

    async def _are_known(self, key: Key, pools: frozenset[str]) -> bool:
        """Ask the API server about the pools; False where the answer takes another reconcile."""
        for pool in sorted(pools):
            wait_s = await self._deletion_check.check(pool)
            if wait_s > 0.0:
                self._queue.add_after(key, wait_s)
            elif pool in self._handler.gone_pools:
                self._handler.enqueue_pool(pool)  # it gives the turns to release
        return pools <= self._handler.gone_pools | self._cache.pools.keys()

    async def _refresh(self, name: str) -> None:
        """Read again what is out of date, as a conflict showed."""
        for kind, resource in ((Kind.NODE, NODES), (Kind.HOST_MEMORY_NODE, HOST_MEMORY_NODES)):
            known = self._cache.stores[kind].get(name)
            document = await self._kube.get(resource, name)
            if document is not None:
                self._handler.observed(kind, document)
            elif known is not None:
                self._handler.vanished(
                    kind, name, uid=known.uid, resource_version=known.resource_version
                )

    async def _write(self, key: Key, changes: NodeChanges) -> None:
        """Carry out the writes, and report a change once its write has succeeded.

        In a storm of reboots all taints come before all the rest: a key with writes left goes
        back to the queue, and its next reconcile finds what is still to be done.
        """
        if not changes.writes:
            self._report_node(key, changes)
            return
        last, by_kind = changes.writes[-1], {type(write): write for write in changes.writes}
        # The marks, else the condition: after it, another reconcile would not report the same.
        reported_after = by_kind.get(PatchNode) or by_kind.get(PatchNodeStatus) or last

        def after(write: Write) -> bool:
            if write is reported_after:
                self._report_node(key, changes)
            if write is last or not self._queue.has_urgent():
                return True
            self._queue.add(key)
            return False

        await self._writer.carry_out(key.name, changes.writes, go_on=after)

    def _report_node(self, key: Key, changes: NodeChanges) -> None:
        node = self._cache.nodes.get(key.name)
        if node is not None:
            self._post("Node", node, changes.events)
        self._count(key.name, changes.facts)

    def _report_kept(self, name: str) -> None:
        """Post what the node's agent reports of kept contents, each thing once."""
        hmn = self._cache.host_memory_nodes.get(name)
        if hmn is None:
            self._kept_news.pop(name, None)
            return
        news = self._kept_news.setdefault(name, KeptNews())
        self._post("HostMemoryNode", hmn, news.take(hmn.status, now_s=time.monotonic()))

    def _post(self, kind: str, record: Record, notes: tuple[EventNote, ...]) -> None:
        about = Regarding(kind=kind, name=record.name, uid=record.uid)
        for note in notes:
            _log.info(note.reason, kind=about.kind, name=about.name, message=note.message)
            self._recorder.record(about, note)

    def _count(self, name: str, facts: NodeFacts) -> None:
        self._metrics.node_state(name, facts.state, facts.closed_since_s)
        if facts.opened:
            self._metrics.openings.inc()
        if facts.closed_cause:
            self._metrics.closings.labels(facts.closed_cause).inc()
        if facts.seconds_to_ready is not None:
            self._metrics.node_ready.observe(facts.seconds_to_ready)
        if facts.deadline_exceeded:
            self._metrics.deadlines.inc()
        if facts.reboot_detected:
            self._metrics.reboots.inc()

    async def _pool(self, key: Key) -> None:
        name = key.name
        pool = self._cache.pools.get(name)
        now_s = time.time()
        members = list(self._members(name, now_s))
        if pool is None:
            if name not in self._handler.gone_pools:
                if not members:
                    self._metrics.drop_pool(name)
                return  # missed by the cache alone: whoever needs it asks the API server
            pool = self._handler.former_pools.get(name, PoolRecord(name=name, uid="").as_gone())
        if pool.gone and not members:
            self._handler.former_pools.pop(name, None)
            self._grants.pop(name, None)
            self._metrics.drop_pool(name)
            return
        began_s = time.perf_counter()
        former = self._grants.get(name, Grants())
        changes = reconcile_pool(
            pool,
            members,
            pools=tuple(self._cache.pools.values()),
            grants=former if former.hold(pool) else Grants(),
            settings=self._settings,
            now_s=now_s,
        )
        self._handler.pool_reconciled(name, time.perf_counter() - began_s)
        self._metrics.show_pool(name, changes.counts, changes.since_s, paused=pool.rollout.paused)
        self._grants[name] = changes.grants
        is_same = (former.uid, former.generation) == (
            changes.grants.uid,
            changes.grants.generation,
        )
        for node in changes.grants.nodes - (former.nodes if is_same else frozenset()):
            self._queue.add(Key("node", node))
        if changes.recheck_at_s is not None:
            self._queue.add_after(key, max(changes.recheck_at_s - time.time(), _SOONEST_RECHECK_S))
        if changes.status_patch is not None:
            answer = await self._kube.patch(POOLS, name, changes.status_patch, subresource="status")
            if answer is not None:
                self._handler.observed(Kind.POOL, answer)
        self._post("HostMemoryPool", pool, changes.events)

    def _members(self, pool: str, now_s: float) -> Iterator[NodeView]:
        """Yield the nodes that the pool selects, and those that still have an entry of it."""
        holders = self._cache.host_memory_nodes
        for name in self._cache.selected(pool) | set(self._cache.nodes_with_entry(pool)):
            node = self._cache.nodes.get(name)
            if node is not None:
                yield NodeView(
                    node=node,
                    hmn=holders.get(name),
                    agent=_current_agent(self._cache.agents_of(name)),
                    agent_missing_since_s=self._handler.agent_gone_s.get(name),
                    settings=self._settings,
                    now_s=now_s,
                )


def _current_agent(agents: list[AgentRecord]) -> AgentRecord | None:
    """Return the living one of a node's agent Pods: an update leaves two for a while."""
    return max(
        agents, key=lambda a: (not a.deleting, a.ready, a.ready_since_s, a.name), default=None
    )
