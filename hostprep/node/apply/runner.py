"""Carrying out a plan, action by action; regions on different nodes at the same time."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial, singledispatchmethod
from typing import TYPE_CHECKING

from hostprep.api.pool_spec import PoolSpec
from hostprep.backing import GIB, Backing
from hostprep.client.sidecar import make_state_folder
from hostprep.errors import FailedError, HostprepError
from hostprep.linux.files import from_os_error, remove_file
from hostprep.linux.threads import CancelEvent, Stopped, Workers, shielded, working
from hostprep.node.apply.folder import (
    ensure_mount,
    make_pool,
    put_aside,
    remove_mount,
    remove_pool,
    set_access,
    strip_pool,
)
from hostprep.node.apply.hugepages import (
    add_pages,
    adopt_boot_pages,
    free_pages,
    give_back_pages,
    replay_ledger,
)
from hostprep.node.apply.publish import publish
from hostprep.node.apply.regions import (
    create_region,
    mark_damaged,
    populating_workers,
    remove_region,
    scrub_region,
)
from hostprep.node.facts import Facts
from hostprep.node.ledger import Ledger, LedgerWriter, read_boot_ledger, read_ledger
from hostprep.node.observe.pools import find_region, held_files, observe_pool
from hostprep.node.plan.actions import (
    Action,
    AdoptRegion,
    CreateRegion,
    DropHandoff,
    Lane,
    MakePool,
    MountMemory,
    Plan,
    PublishHandoff,
    RemovePool,
    RemoveRegion,
    ReserveHugePages,
    ReturnHugePages,
    ScrubRegion,
    Shortfall,
    ShortfallError,
    UnmountMemory,
    stages,
)
from hostprep.paths import PoolPaths

if TYPE_CHECKING:
    from hostprep.linux.threads import Stop

OnProgress = Callable[[str, int, int], None]
"""Takes the pool, the bytes done and the bytes to be done; called from several threads."""


class ProgressReporter:
    """Reports nothing by itself. Called from several threads."""

    def begin(self, action: Action) -> None:
        """Report that an action starts."""

    def advance(self, action: Action, size_bytes: int) -> None:
        """Report that so many more bytes of the action are done."""

    def end(self, action: Action, *, took_s: float) -> None:
        """Report that the action is done, after so many seconds."""


class ProgressTracker(ProgressReporter):
    """Tracks one pool's part of a plan: seconds by kind of step, bytes populated, bytes done.

    Keeps `scrubbing` at the (pool, region) pairs that are being zeroed now.
    """

    def __init__(self, pool: str, on_progress: OnProgress, scrubbing: set[tuple[str, str]]) -> None:
        self._pool = pool
        self._on_progress = on_progress
        self._scrubbing = scrubbing
        self._lock = threading.Lock()
        self._total_bytes = 0
        self._done_bytes = 0
        self._seconds: dict[str, float] = {}
        self._populating: tuple[float, float] | None = None
        self._populated: dict[Backing, int] = {}

    def expect(self, actions: tuple[Action, ...]) -> None:
        """Begin to count towards the bytes of these actions."""
        long = [a for a in actions if isinstance(a, CreateRegion | ScrubRegion)]
        self._total_bytes = sum(action.expected_bytes for action in long)
        self._done_bytes = 0

    @property
    def steps(self) -> tuple[tuple[str, float], ...]:
        """Seconds by kind of step, in the order in which they began.

        Regions are populated at the same time on several nodes: theirs is the time from the
        first one's begin to the last one's end.
        """
        seconds = dict(self._seconds)
        if self._populating is not None:
            seconds["Populate"] = self._populating[1] - self._populating[0]
        return tuple((kind, round(took_s, 3)) for kind, took_s in seconds.items())

    @property
    def populated(self) -> tuple[tuple[Backing, int], ...]:
        """Bytes made resident, by backing."""
        return tuple(self._populated.items())

    def upkeep_s(self, *, rebuilds: bool) -> float:
        """Return the seconds that scrubs took, and with `rebuilds` populating as well."""
        seconds = dict(self.steps)
        populate_s = seconds.get("Populate", 0.0) if rebuilds else 0.0
        return seconds.get(ScrubRegion.kind, 0.0) + populate_s

    def begin(self, action: Action) -> None:
        """Note when an action starts."""
        if isinstance(action, ScrubRegion):
            self._scrubbing.add((action.pool, action.region))
        if isinstance(action, CreateRegion):
            with self._lock:
                now_s = time.monotonic()
                self._populating = self._populating or (now_s, now_s)
                self._seconds.setdefault("Populate", 0.0)
            self._on_progress(self._pool, self._done_bytes, self._total_bytes)

    def advance(self, action: Action, size_bytes: int) -> None:
        """Count bytes."""
        with self._lock:
            self._done_bytes += size_bytes
            if isinstance(action, CreateRegion):
                done = self._populated.get(action.backing, 0)
                self._populated[action.backing] = done + size_bytes
                began_s = self._populating[0] if self._populating else time.monotonic()
                self._populating = (began_s, time.monotonic())
        self._on_progress(self._pool, self._done_bytes, self._total_bytes)

    def end(self, action: Action, *, took_s: float) -> None:
        """Add the seconds of an action, other than populating and adopting."""
        if isinstance(action, AdoptRegion | CreateRegion):
            return
        if isinstance(action, ScrubRegion):
            self._scrubbing.discard((action.pool, action.region))
        with self._lock:
            self._seconds[action.kind] = self._seconds.get(action.kind, 0.0) + took_s


class _NewBytes:
    """Counts bytes that were not resident before: an interrupted run's are the first ones."""

    def __init__(self, there_bytes: int, on_done: Callable[[int], None]) -> None:
        self._left_bytes = there_bytes
        self._on_done = on_done
        self._lock = threading.Lock()

    def done(self, size_bytes: int) -> None:
        """Count a piece. Called from any thread."""
        with self._lock:
            old_bytes = min(size_bytes, self._left_bytes)
            self._left_bytes -= old_bytes
        if size_bytes > old_bytes:
            self._on_done(size_bytes - old_bytes)


@contextlib.contextmanager
def _as_pools_error(action: Action) -> Iterator[None]:
    """Raise the system's errors as the pool's: an engine may delete a file that we just made."""
    try:
        yield
    except OSError as error:
        raise FailedError(f"pool {action.pool}: {error}", reason="SystemError") from error


@dataclass
class Runner:
    """Carries out plans below one root."""

    root: str
    facts: Facts
    specs: Sequence[PoolSpec]
    progress: ProgressReporter
    stop: threading.Event
    """The caller's: once it is set, the piece in flight is the last. Never set here."""
    _writers: dict[str, LedgerWriter] = field(default_factory=dict)
    _not_scrubbed: list[HostprepError] = field(default_factory=list)

    def run(self, plan: Plan) -> None:
        """Carry out the plan. Raises ShortfallError where to plan again, Stopped, HostprepError.

        Killed at any point, it leaves what the next run adopts or clears away. A region that cannot
        be scrubbed holds up no other: why is raised at the end.
        """
        for lanes in stages(plan.actions):
            if isinstance(lanes[0][0], CreateRegion):
                self._populate(lanes)
                continue
            for action in lanes[0]:
                with self._progress_of(action, self.stop):
                    self._do(action, PoolPaths(self.root, action.pool))
        if self._not_scrubbed:
            raise self._not_scrubbed[0]

    def _populate(self, lanes: Sequence[Lane]) -> None:
        """Populate regions: a lane's one after the other, all lanes at once."""
        queues = [[each for each in lane if isinstance(each, CreateRegion)] for lane in lanes]
        shielded(lambda interrupted: self._run_queues(queues, interrupted))

    def _run_queues(self, queues: Sequence[Sequence[CreateRegion]], interrupted: Stop) -> None:
        cancelled = CancelEvent(self.stop, interrupted)
        crews = [populating_workers(queue) for queue in queues]
        lanes = Workers(len(queues))

        def run_lane(lane: tuple[Sequence[CreateRegion], Workers]) -> None:
            try:
                for action in lane[0]:
                    self._create(action, lane[1], cancelled)
            except BaseException:
                cancelled.set()
                raise

        with working([lanes, *crews]):
            lanes.run(run_lane, zip(queues, crews, strict=True), cancelled)

    def _create(self, action: CreateRegion, workers: Workers, cancelled: threading.Event) -> None:
        with self._progress_of(action, cancelled):
            new = _NewBytes(action.there_bytes, partial(self.progress.advance, action))
            paths = PoolPaths(self.root, action.pool)
            create_region(paths, action, workers, on_done=new.done, stop=cancelled)

    @contextlib.contextmanager
    def _progress_of(self, action: Action, stop: threading.Event) -> Iterator[None]:
        """Report the progress of an action. Raises Stopped instead of beginning one."""
        if stop.is_set():
            raise Stopped
        self.progress.begin(action)
        begin_s = time.monotonic()
        with _as_pools_error(action):
            yield
        self.progress.end(action, took_s=time.monotonic() - begin_s)

    @singledispatchmethod
    def _do(self, action: Action, paths: PoolPaths) -> None:
        raise TypeError(f"cannot carry out {type(action).__name__} for {paths.pool}")

    @_do.register
    def _(self, action: DropHandoff, paths: PoolPaths) -> None:
        _ = action
        mark_damaged(paths, observe_pool(paths))
        remove_file(paths.handoff)
        ledger = read_ledger(paths)
        if ledger is not None and ledger.boot_id != self.facts.kernel.boot_id:
            # Of another boot: its huge pages, leases and marks went with it.
            for folder in (paths.state, paths.tickets, paths.links, paths.devices):
                put_aside(paths, folder)
            remove_file(paths.ledger)

    @_do.register
    def _(self, action: MakePool, paths: PoolPaths) -> None:
        make_pool(paths, action)
        self._writer(paths)
        set_access(paths, action, observe_pool(paths))

    @_do.register
    def _(self, action: ReserveHugePages, paths: PoolPaths) -> None:
        came = add_pages(self._writer(paths), action.entry)
        if came < action.pages:
            backing = Backing.HUGETLB_1GI if action.page_bytes == GIB else Backing.HUGETLB_2MI
            why = (
                f"node {action.node_id} gave {came} of {action.pages} pages, even after"
                " compacting its free memory"
            )
            raise ShortfallError(Shortfall(action.pool, backing, why, action.node_id))

    @_do.register
    def _(self, action: ReturnHugePages, paths: PoolPaths) -> None:
        give_back_pages(self._writer(paths), action.entry)

    @_do.register
    def _(self, action: MountMemory, paths: PoolPaths) -> None:
        ensure_mount(paths, action)

    @_do.register
    def _(self, action: UnmountMemory, paths: PoolPaths) -> None:
        remove_mount(paths, action.mount_dir)

    @_do.register
    def _(self, action: AdoptRegion, paths: PoolPaths) -> None:
        # The region itself was observed. Its state folder may have been tampered with, and a
        # half-made namesake is in no plan.
        try:
            make_state_folder(paths, action.region)
        except OSError as error:
            raise from_os_error(error, f"make the folder of {action.region}'s state") from error
        for entry in os.listdir(paths.folder):
            if entry.startswith("mem"):
                remove_file(paths.part_of(entry, action.region))

    @_do.register
    def _(self, action: ScrubRegion, paths: PoolPaths) -> None:
        region = find_region(paths, action.region)
        if region is not None:
            done = partial(self.progress.advance, action)
            try:
                with _as_pools_error(action):
                    scrub_region(
                        paths, region, on_done=done, stop=self.stop, threads=action.threads
                    )
            except HostprepError as error:
                # Leased: claimed since. Its holder had it scrubbed, or asked for its own bytes.
                if error.reason != "Leased":
                    self._not_scrubbed.append(error)

    @_do.register
    def _(self, action: RemoveRegion, paths: PoolPaths) -> None:
        region = find_region(paths, action.region, mount_dir=action.mount_dir)
        remove_region(paths, action, region)

    @_do.register
    def _(self, action: PublishHandoff, paths: PoolPaths) -> None:
        spec = next(spec for spec in self.specs if spec.name == action.pool)
        pool, writer = observe_pool(paths), self._writer(paths)
        publish(paths, self.facts, pool, writer, gid=spec.gid, sizing=spec.sizing)

    @_do.register
    def _(self, action: RemovePool, paths: PoolPaths) -> None:
        _ = action
        ledger = read_ledger(paths)
        has_pages = ledger and ledger.boot_id == self.facts.kernel.boot_id and ledger.taken
        # A kept file may have no pages: its mount stays all the same.
        if has_pages or held_files(paths):
            strip_pool(paths)
        else:
            remove_pool(paths)
        self._writers.pop(paths.pool, None)

    def _writer(self, paths: PoolPaths) -> LedgerWriter:
        """Return the writer of the pool's ledger, once an interrupted change is replayed."""
        writer = self._writers.get(paths.pool)
        if writer is None:
            boot_id = self.facts.kernel.boot_id
            uid = next((spec.uid for spec in self.specs if spec.name == paths.pool), "")
            ledger = read_ledger(paths)
            if ledger is None or ledger.boot_id != boot_id:
                at_boot = read_boot_ledger(paths, boot_id)
                ledger = adopt_boot_pages(Ledger(boot_id=boot_id, pool_uid=uid), at_boot)
            writer = LedgerWriter(paths, ledger)
            writer.save(ledger)
            replay_ledger(writer)
            self._writers[paths.pool] = writer
        return writer


def roll_back(paths: PoolPaths, short: Shortfall) -> None:
    """Undo an attempt with a backing that was short: unfinished regions, empty mount, free pages.

    Finished regions stay with the pages under them: what is given back is never more than what
    this pool added and what lies free on the node. Other nodes' regions of the backing stay too.
    """
    backing = short.backing
    for region in observe_pool(paths).regions:
        is_there = short.node_id is None or region.placement.node in (None, short.node_id)
        if region.backing is backing and not region.finished and is_there:
            remove_file(paths.part_of(region.mount_dir, region.name))
    pool = observe_pool(paths)
    used = {region.mount_dir for region in pool.regions}
    for mount in pool.mounts:
        mount_dir = os.path.basename(mount.path)
        is_hugetlb = mount.fs_type == "hugetlbfs"
        if mount_dir not in used and is_hugetlb == backing.is_hugetlb:
            remove_mount(paths, mount_dir)
    ledger = read_ledger(paths)
    if ledger is None or not backing.is_hugetlb:
        return
    writer = LedgerWriter(paths, ledger)
    for entry in ledger.taken:
        if entry.page_bytes == backing.page_bytes and short.node_id in (None, entry.node_id):
            free = free_pages(entry.node_id, entry.page_bytes)
            give_back_pages(writer, replace(entry, pages=min(entry.pages, free)))
