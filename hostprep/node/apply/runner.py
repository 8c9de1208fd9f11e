"""Carrying out a plan, action by action; regions on different nodes at the same time."""

from __future__ import annotations

import contextlib
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import singledispatchmethod
from itertools import groupby
from typing import TYPE_CHECKING

from hostprep.api.pool_spec import PoolSpec
from hostprep.backing import GIB, Backing
from hostprep.client.handoff import Region
from hostprep.client.sidecar import make_state_folder
from hostprep.errors import BusyError
from hostprep.linux.files import atomic_write, remove_file
from hostprep.linux.threads import Halt, Stopped, undisturbed
from hostprep.node.apply.folder import (
    ensure_mount,
    make_pool,
    remove_mount,
    remove_pool,
    set_access,
)
from hostprep.node.apply.hugepages import HugePageControl
from hostprep.node.apply.progress import NoProgress, Progress
from hostprep.node.apply.publish import publish
from hostprep.node.apply.regions import create_region, mark_damaged, remove_region, scrub_region
from hostprep.node.facts import Facts
from hostprep.node.ledger import Record, Recorder, read_boot_ledger, read_record
from hostprep.node.observe.pools import as_region, observe_pool
from hostprep.node.plan.actions import (
    Action,
    AdoptRegion,
    CreateRegion,
    DropHandoff,
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
)
from hostprep.paths import PoolPaths

if TYPE_CHECKING:
    from hostprep.linux.threads import Stop


class _New:
    """Tells of bytes that were not there before: an interrupted run's are the first ones."""

    def __init__(self, there_bytes: int, on_done: Callable[[int], None]) -> None:
        self._left_bytes = there_bytes
        self._on_done = on_done
        self._lock = threading.Lock()

    def done(self, size_bytes: int) -> None:
        """Take note of a piece; from any thread."""
        with self._lock:
            old_bytes = min(size_bytes, self._left_bytes)
            self._left_bytes -= old_bytes
        if size_bytes > old_bytes:
            self._on_done(size_bytes - old_bytes)


@dataclass
class Runner:
    """Applies plans below one root. The adapters are fields, so that tests can put in others."""

    root: str
    facts: Facts
    specs: Sequence[PoolSpec]
    progress: Progress = field(default_factory=NoProgress)
    huge_pages: HugePageControl = field(default_factory=HugePageControl)
    write_handoff: Callable[..., None] = atomic_write
    stop: threading.Event = field(default_factory=threading.Event)
    """The caller's: once it is set, the piece in flight is the last. Never set here."""
    _recorders: dict[str, Recorder] = field(default_factory=dict)

    def run(self, plan: Plan) -> None:
        """Carry out the plan. Raises ShortfallError where to plan again, Stopped, HostprepError.

        Killed at any point, it leaves what the next run adopts or clears away.
        """
        for is_populate, group in groupby(
            plan.actions, key=lambda action: isinstance(action, CreateRegion)
        ):
            if is_populate:
                self._populate([action for action in group if isinstance(action, CreateRegion)])
            else:
                for action in group:
                    self._timed(action)

    def _populate(self, actions: Sequence[CreateRegion]) -> None:
        """Populate regions: one after the other on a node, all nodes at once."""
        lanes: dict[object, list[CreateRegion]] = {}
        for action in actions:
            lanes.setdefault(action.placement, []).append(action)
        undisturbed(lambda interrupted: self._run_lanes(list(lanes.values()), interrupted))

    def _run_lanes(self, lanes: Sequence[Sequence[CreateRegion]], interrupted: Stop) -> None:
        halt = Halt(self.stop, interrupted)
        with ThreadPoolExecutor(max_workers=len(lanes)) as pool:
            try:
                futures = [pool.submit(self._lane, lane, halt) for lane in lanes]
            except BaseException:
                halt.set()
                raise
        errors = [error for future in futures if (error := future.exception())]
        if errors:
            # The cause, not the Stopped of those that it stopped.
            raise next((error for error in errors if not isinstance(error, Stopped)), errors[0])

    def _lane(self, actions: Sequence[CreateRegion], halt: threading.Event) -> None:
        try:
            for action in actions:
                with self._told(action, halt):
                    new = _New(action.there_bytes, self._advance(action))
                    create_region(self._paths(action), action, on_done=new.done, stop=halt)
        except BaseException:
            halt.set()
            raise

    def _timed(self, action: Action) -> None:
        with self._told(action, self.stop):
            self._do(action, self._paths(action))

    @contextlib.contextmanager
    def _told(self, action: Action, stop: threading.Event) -> Iterator[None]:
        """Tell the progress of an action; begin none once it is time to stop."""
        if stop.is_set():
            raise Stopped
        self.progress.begin(action)
        begin_s = time.monotonic()
        yield
        self.progress.end(action, took_s=time.monotonic() - begin_s)

    def _paths(self, action: Action) -> PoolPaths:
        return PoolPaths(self.root, action.pool)

    def _advance(self, action: Action) -> Callable[[int], None]:
        return lambda size_bytes: self.progress.advance(action, size_bytes)

    @singledispatchmethod
    def _do(self, action: Action, paths: PoolPaths) -> None:
        raise TypeError(f"no way to do {type(action).__name__} for {paths.pool}")

    @_do.register
    def _(self, action: DropHandoff, paths: PoolPaths) -> None:
        _ = action
        mark_damaged(paths, observe_pool(paths))
        remove_file(paths.handoff)
        record = read_record(paths)
        if record is not None and record.boot_id != self.facts.kernel.boot_id:
            # Of another boot: its huge pages, leases and marks went with it.
            for folder in (paths.state, paths.tickets, paths.links, paths.devices):
                shutil.rmtree(folder, ignore_errors=True)
            remove_file(paths.ledger)

    @_do.register
    def _(self, action: MakePool, paths: PoolPaths) -> None:
        make_pool(paths, action)
        self._recorder(paths)
        set_access(paths, action, observe_pool(paths))

    @_do.register
    def _(self, action: ReserveHugePages, paths: PoolPaths) -> None:
        came = self.huge_pages.add(
            self._recorder(paths),
            node_id=action.node_id,
            page_bytes=action.page_bytes,
            pages=action.pages,
        )
        if came < action.pages:
            backing = Backing.HUGETLB_1GI if action.page_bytes == GIB else Backing.HUGETLB_2MI
            why = (
                f"node {action.node_id} gave {came} of {action.pages} pages, even after"
                " compacting its free memory"
            )
            raise ShortfallError(Shortfall(action.pool, backing, why, action.node_id))

    @_do.register
    def _(self, action: ReturnHugePages, paths: PoolPaths) -> None:
        self.huge_pages.give_back(
            self._recorder(paths),
            node_id=action.node_id,
            page_bytes=action.page_bytes,
            pages=action.pages,
        )

    @_do.register
    def _(self, action: MountMemory, paths: PoolPaths) -> None:
        ensure_mount(paths, action)

    @_do.register
    def _(self, action: UnmountMemory, paths: PoolPaths) -> None:
        remove_mount(paths, action.mount_dir)

    @_do.register
    def _(self, action: AdoptRegion, paths: PoolPaths) -> None:
        # Observing it was the work. What is beside it, though, may have been tampered with, and a
        # half-made namesake is in nobody's plan.
        make_state_folder(paths, action.region)
        for entry in os.listdir(paths.folder):
            if entry.startswith("mem"):
                remove_file(paths.part_of(entry, action.region))

    @_do.register
    def _(self, action: ScrubRegion, paths: PoolPaths) -> None:
        region = self._region(paths, action.region)
        if region is None:
            return
        try:
            scrub_region(paths, region, on_done=self._advance(action), stop=self.stop)
        except BusyError:
            # Claimed since: whoever holds it now had it scrubbed, or asked for its own bytes.
            return

    @_do.register
    def _(self, action: RemoveRegion, paths: PoolPaths) -> None:
        remove_region(paths, action, self._region(paths, action.region))

    @_do.register
    def _(self, action: PublishHandoff, paths: PoolPaths) -> None:
        spec = next(spec for spec in self.specs if spec.name == action.pool)
        publish(
            paths,
            self.facts,
            observe_pool(paths),
            self._recorder(paths),
            gid=spec.gid,
            sizing=spec.sizing,
            write=self.write_handoff,
        )

    @_do.register
    def _(self, action: RemovePool, paths: PoolPaths) -> None:
        _ = action
        remove_pool(paths)
        self._recorders.pop(paths.pool, None)

    def _region(self, paths: PoolPaths, name: str) -> Region | None:
        for region in observe_pool(paths).regions:
            if region.name == name and region.finished:
                return as_region(region)
        return None

    def _recorder(self, paths: PoolPaths) -> Recorder:
        """Return the pool's record, made if need be, with an interrupted change settled."""
        recorder = self._recorders.get(paths.pool)
        if recorder is None:
            boot_id = self.facts.kernel.boot_id
            uid = next((spec.uid for spec in self.specs if spec.name == paths.pool), "")
            record = read_record(paths)
            if record is None or record.boot_id != boot_id:
                at_boot = read_boot_ledger(paths, boot_id)
                record = self.huge_pages.adopt(Record(boot_id=boot_id, pool_uid=uid), at_boot)
            recorder = Recorder(paths, record)
            recorder.save(record)
            self.huge_pages.settle(recorder)
            self._recorders[paths.pool] = recorder
        return recorder


def roll_back(paths: PoolPaths, short: Shortfall, huge_pages: HugePageControl) -> None:
    """Remove the pool's unfinished regions of what was short, its mount if it is empty, its pages.

    Finished regions stay, and with them the pages under them: what is given back is never more
    than what this pool added and what lies free on the node. So does what other nodes have of it.
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
    record = read_record(paths)
    if record is None or not backing.is_hugetlb:
        return
    recorder = Recorder(paths, record)
    for entry in record.taken:
        if entry.page_bytes == backing.page_bytes and short.node_id in (None, entry.node_id):
            free = huge_pages.free_pages(entry.node_id, entry.page_bytes)
            huge_pages.give_back(
                recorder,
                node_id=entry.node_id,
                page_bytes=entry.page_bytes,
                pages=min(entry.pages, free),
            )
