"""What the pools hold now: regions, leases, ledgers, gates, whether the handoff is right."""

from __future__ import annotations

import contextlib
import os
import stat
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace

from hostprep.api.pool_spec import Placement
from hostprep.api.slot_layout import layout_text
from hostprep.backing import Backing
from hostprep.client.claim import Waiter, claim_lock_briefly, waiters
from hostprep.client.handoff import Handoff, Region, access_remedy, read_handoff
from hostprep.client.scrub import LastUsers, may_scrub_pool, why_locked, why_not_quiescent
from hostprep.client.sidecar import (
    KeptMark,
    Sidecar,
    is_clean,
    mark_kept,
    read_bad_mark,
    read_bad_size,
    read_kept_mark,
    read_sidecar,
)
from hostprep.client.untrusted import first_names
from hostprep.cuda.board_layout import OPEN, READY, generation_of
from hostprep.cuda.board_view import BoardView, read_board
from hostprep.cuda.gate import Verdict, judge
from hostprep.errors import BadInputError, FailedError, HostprepError, NotReadyError
from hostprep.linux.files import open_own_folder
from hostprep.linux.processes import may_scrub
from hostprep.node.facts import LedgerEntry, Mount, PoolFacts, RegionFacts
from hostprep.node.ledger import read_ledger
from hostprep.node.observe.host import read_mounts
from hostprep.paths import POOL_MARKS, PoolPaths, check_pool_name, region_of_held

_PART = ".part"
_MOST_FILES = 4096
"""Of a pool's region files, half made and kept ones included: four times the regions that it may
have. Each costs a round some milliseconds."""


def observe_pools(
    root: str, *, limits: Mapping[str, float | None] | None = None
) -> tuple[PoolFacts, ...]:
    """Return the facts of every pool below the root, by name; none where there is no root.

    A pool that cannot be observed has its `failure`, and costs the others nothing. `limits`: for
    how long pools keep contents, in seconds, to be noted beside what they keep.
    Raises BadInputError for a root that is a symbolic link or a file, or that other users own or
    may write to.
    """
    names = pool_names(root)
    mounts = read_mounts() if names else ()
    return tuple(_try_observe(PoolPaths(root, name), mounts, limits or {}) for name in names)


def _try_observe(
    paths: PoolPaths, mounts: tuple[Mount, ...], limits: Mapping[str, float | None]
) -> PoolFacts:
    try:
        return observe_pool(paths, mounts, limits=limits)
    except Exception as error:  # whatever a pool's folder holds: only it is lost
        return unobserved(paths.pool, error)


def unobserved(name: str, error: Exception) -> PoolFacts:
    """Return the facts of a pool that cannot be observed."""
    return PoolFacts(
        name=name,
        boot_id=None,
        generation=0,
        published=False,
        regions=(),
        taken=(),
        mounts=(),
        failure=pool_error(name, error).message,
    )


def pool_error(name: str, error: Exception) -> HostprepError:
    """Return an exception that a pool's folder caused as an error about that pool.

    One that is none of ours nor the system's is a defect: its traceback goes to standard error.
    """
    if isinstance(error, HostprepError):
        return error
    if isinstance(error, OSError):
        return FailedError(f"pool {name}: {error}", reason="SystemError")
    sys.excepthook(type(error), error, error.__traceback__)
    return FailedError(
        f"pool {name}: {type(error).__name__}: {error}",
        reason="Unexpected",
        remedy="report it, with the traceback that was logged",
    )


def pool_names(root: str) -> tuple[str, ...]:
    """Return the names of the pools below the root, in order.

    Raises BadInputError for a root that is a symbolic link or a file, or that other users own or
    may write to.
    """
    if not os.path.lexists(root):
        return ()
    os.close(open_own_folder(root))
    names = []
    for name in sorted(os.listdir(root)):
        with contextlib.suppress(HostprepError):
            check_pool_name(name)
            # The agent or the boot script left its mark in it.
            if any(os.path.lexists(f"{root}/{name}/{mark}") for mark in POOL_MARKS):
                names.append(name)
    return tuple(names)


def closed_pools(root: str) -> tuple[str, ...]:
    """Return the names of folders below the root that may be pools, and that we may not enter."""
    try:
        names = sorted(os.listdir(root))
    except OSError:
        return ()
    found = []
    for name in names:
        with contextlib.suppress(HostprepError):
            check_pool_name(name)
            if os.path.isdir(f"{root}/{name}") and not os.access(f"{root}/{name}", os.X_OK):
                found.append(name)
    return tuple(found)


def missing_pool(
    root: str, name: str, *, remedy: str, closed_remedy: str | None = None
) -> HostprepError:
    """Return why there is no such pool for us: none below the root, or one that is closed to us.

    `closed_remedy` is for what members of the pool's group may not do either.
    """
    if name in closed_pools(root):
        return BadInputError(
            f"cannot look into {root}/{name}: no permission",
            reason="NoPermission",
            remedy=closed_remedy or access_remedy(PoolPaths(root, name)),
        )
    return NotReadyError(
        f"there is no pool {name} below {root}", reason="NotPrepared", remedy=remedy
    )


def observe_pool(
    paths: PoolPaths,
    mounts: tuple[Mount, ...] | None = None,
    *,
    repair: bool = True,
    limits: Mapping[str, float | None] | None = None,
) -> PoolFacts:
    """Return the facts of one pool's folder. With `repair` lost lock files are made again.

    `limits` as in `observe_pools`; of a pool that is not in it the limit stays as it is noted.
    """
    mounts = read_mounts() if mounts is None else mounts
    own_mounts = tuple(
        _with_room(entry) for entry in mounts if os.path.dirname(entry.path) == paths.folder
    )
    handoff = try_read_handoff(paths)
    folders = _mem_folders(paths)
    _check_number(paths, folders)
    last_users, now_s = LastUsers(paths), time.time()
    if may_scrub_pool(paths):
        last_users.look_up(name for folder in folders for name in _region_names(paths, folder))
    with contextlib.ExitStack() as stack:
        # Probing a lock takes it for an instant: under the claim lock no claimer can notice. Where
        # one keeps that to itself, its own pool's claimers may notice.
        waiting: list[Waiter] | None = None
        with contextlib.suppress(HostprepError):
            stack.enter_context(claim_lock_briefly(paths))
            waiting = waiters(paths)
        regions = tuple(
            region
            for folder in folders
            for region in _Folder(
                paths, folder, own_mounts, handoff, repair, last_users, now_s, limits or {}
            ).regions()
        )
        if any(region.retained for region in regions):
            regions = _give_way(paths, regions, waiters(paths) if waiting is None else waiting)
    ledger = read_ledger(paths)
    return PoolFacts(
        name=paths.pool,
        boot_id=ledger.boot_id if ledger else None,
        generation=ledger.generation if ledger else 0,
        published=_is_published(handoff, regions),
        regions=regions,
        taken=ledger.taken if ledger else (),
        mounts=own_mounts,
        held=held_pages(paths, ledger.taken if ledger else ()),
        held_in=_held_in(paths),
        has_handoff=os.path.lexists(paths.handoff),
        waiters=None if waiting is None else len(waiting),
    )


def _give_way(
    paths: PoolPaths, regions: tuple[RegionFacts, ...], waiting: list[Waiter]
) -> tuple[RegionFacts, ...]:
    """Return the regions, of which the one that was kept longest gives way to who waits.

    One at a time: the next look shows whether a claim still waits. None where another dirty region
    is to be scrubbed anyway, and none to its own owner, who may wait for a rank's end.
    """
    if not waiting:
        return regions
    free = [region for region in regions if region.finished and not region.leased]
    if any(not region.clean and not region.retained for region in free):
        return regions
    oldest = min(
        (region for region in free if region.retained and _is_wanted(paths, region, waiting)),
        key=lambda region: region.kept_order,
        default=None,
    )
    return tuple(
        replace(region, retained=False) if region is oldest else region for region in regions
    )


def _is_wanted(paths: PoolPaths, region: RegionFacts, waiting: list[Waiter]) -> bool:
    sidecar = read_sidecar(paths, region.name)
    owner = sidecar.owner if sidecar else None
    return owner is None or any(waiter.could_take(region.name, owner) for waiter in waiting)


def _with_room(mount: Mount) -> Mount:
    """Return a mount of limited size with what is left of it; nothing where that is unknown."""
    if mount.limit_bytes is None:
        return mount
    try:
        status = os.statvfs(mount.path)
    except OSError:
        return mount
    return replace(mount, free_bytes=status.f_bfree * status.f_bsize)


def as_region(facts: RegionFacts) -> Region:
    """Return an observed region the way a handoff names it."""
    return Region(
        name=facts.name,
        path=f"{facts.mount_dir}/{facts.name}",
        st_dev=facts.device,
        st_ino=facts.inode,
        size_bytes=facts.size_bytes,
        backing=facts.backing,
        page_bytes=facts.backing.page_bytes,
        placement=str(facts.placement),
        pinned=True,
    )


def find_region(paths: PoolPaths, name: str, *, mount_dir: str | None = None) -> Region | None:
    """Return one finished region as its file is now; None where there is none of that name.

    Takes the same time however many other regions the pool has, and with `mount_dir`, the folder
    to look in, however many entries the pool's folder has. Its locks are not tried.
    """
    mounts = read_mounts()
    for folder in _mem_folders(paths) if mount_dir is None else [mount_dir]:
        found = _region_file(paths, folder, name, mounts)
        if found is not None and found[0].finished:
            return as_region(found[0])
    return None


def try_read_handoff(paths: PoolPaths) -> Handoff | None:
    """Return the pool's handoff; None where none of this boot can be read."""
    try:
        return read_handoff(paths)
    except HostprepError:
        return None


def _is_published(handoff: Handoff | None, regions: tuple[RegionFacts, ...]) -> bool:
    if handoff is None:
        return False
    promised = {(region.name, region.st_dev, region.st_ino) for region in handoff.regions}
    present = {
        (region.name, region.device, region.inode)
        for region in regions
        if region.finished and region.damage is None
    }
    return promised == present and bool(present)


def _region_names(paths: PoolPaths, folder: str) -> list[str]:
    try:
        names = os.listdir(f"{paths.folder}/{folder}")
    except OSError:
        return []
    return [name for name in names if not name.startswith(".")]


def _mem_folders(paths: PoolPaths) -> list[str]:
    try:
        names = os.listdir(paths.folder)
    except OSError:
        return []
    return sorted(name for name in names if name == "mem" or name.startswith("mem-"))


def _check_number(paths: PoolPaths, folders: list[str]) -> None:
    """Raise FailedError where others, who must be root, put too much in place of regions."""
    number = len(folders)
    for folder in folders:
        with contextlib.suppress(OSError):
            number += len(first_names(f"{paths.folder}/{folder}", _MOST_FILES + 1))
    if number > _MOST_FILES:
        raise FailedError(
            f"more than {_MOST_FILES} files lie in {paths.mem}: delete what is not hostprep's",
            reason="TooManyFiles",
        )


def _region_file(
    paths: PoolPaths, mount_dir: str, file_name: str, mounts: tuple[Mount, ...]
) -> tuple[RegionFacts, int] | None:
    """Return what a region's file itself says, and its owner's uid; None for another file.

    Its locks and its state are not looked at: it counts as free and dirty.
    """
    finished = not (file_name.startswith(".") and file_name.endswith(_PART))
    name = file_name if finished else file_name[1 : -len(_PART)]
    known = Placement.of_region(name)
    try:
        status = os.stat(f"{paths.folder}/{mount_dir}/{file_name}", follow_symlinks=False)
    except OSError:
        return None
    if known is None or not stat.S_ISREG(status.st_mode):
        return None
    region = RegionFacts(
        name=name,
        mount_dir=mount_dir,
        backing=_backing_at(f"{paths.folder}/{mount_dir}", mounts),
        placement=known[0],
        size_bytes=status.st_size,
        resident_bytes=status.st_blocks * 512,
        device=status.st_dev,
        inode=status.st_ino,
        gid=status.st_gid,
        mode=stat.S_IMODE(status.st_mode),
        finished=finished,
        leased=False,
        clean=False,
    )
    return region, status.st_uid


def _backing_at(path: str, mounts: tuple[Mount, ...]) -> Backing:
    here = [entry for entry in mounts if entry.path == path]
    if not here:
        return Backing.BASE
    other = Backing.HUGETLB_2MI if here[-1].fs_type == "hugetlbfs" else Backing.BASE
    return here[-1].backing or other


def held_files(paths: PoolPaths) -> list[str]:
    """Return the files of removed regions that were kept since processes had them open."""
    found = []
    for folder in _mem_folders(paths):
        with contextlib.suppress(OSError):
            for name in sorted(os.listdir(f"{paths.folder}/{folder}")):
                if region_of_held(name) is not None:
                    found.append(f"{paths.folder}/{folder}/{name}")
    return found


def _held_in(paths: PoolPaths) -> tuple[str, ...]:
    folders = {os.path.basename(os.path.dirname(path)) for path in held_files(paths)}
    return tuple(sorted(folders))


def held_pages(paths: PoolPaths, taken: tuple[LedgerEntry, ...]) -> tuple[LedgerEntry, ...]:
    """Return at most how many pages of each entry's node and size such files have."""
    held = []
    for path in held_files(paths):
        place = Placement.of_region(region_of_held(os.path.basename(path)) or "")
        with contextlib.suppress(OSError):
            page_bytes, used_bytes = os.statvfs(path).f_bsize, os.lstat(path).st_blocks * 512
            for entry in taken:
                on_node = place is None or place[0].node in (None, entry.node_id)
                if entry.page_bytes == page_bytes and on_node:
                    held.append(LedgerEntry(entry.node_id, page_bytes, used_bytes // page_bytes))
    return tuple(held)


@dataclass(frozen=True, slots=True)
class _Folder:
    """One `mem` folder of a pool."""

    paths: PoolPaths
    name: str
    mounts: tuple[Mount, ...]
    handoff: Handoff | None
    repair: bool
    last_users: LastUsers
    now_s: float
    """By the clock; one for all regions, so that those first seen together are equally old."""
    limits: Mapping[str, float | None]

    def regions(self) -> list[RegionFacts]:
        path = f"{self.paths.folder}/{self.name}"
        try:
            names = sorted(os.listdir(path))
        except OSError:
            return []
        found = (self._region(name) for name in names)
        return [region for region in found if region is not None]

    def _region(self, file_name: str) -> RegionFacts | None:
        found = _region_file(self.paths, self.name, file_name, self.mounts)
        if found is None:
            return None
        region, owner_uid = found
        return self._with_state(region, owner_uid) if region.finished else region

    def _with_state(self, region: RegionFacts, owner_uid: int) -> RegionFacts:
        probe = as_region(region)
        clean = is_clean(self.paths, probe)
        scrubbable = may_scrub(owner_uid)
        if scrubbable:
            why = why_not_quiescent(self.paths, probe, self.last_users, repair=self.repair)
        else:
            why = why_locked(self.paths, probe)
        sidecar = read_sidecar(self.paths, region.name)
        kept = not clean and sidecar is not None and sidecar.owner is not None
        mark = self._kept_mark(region, sidecar) if kept and why is None and sidecar else None
        published = self.handoff.region(region.name) if self.handoff else None
        same = published if published and published.st_ino == region.inode else None
        bad_mark = read_bad_mark(self.paths, region.name)
        damage = _damage(region, published) or bad_mark
        place_bytes = 0
        if damage:
            place_bytes = same.size_bytes if same else read_bad_size(self.paths, region.name)
        return replace(
            region,
            leased=why is not None,
            clean=clean,
            scrubbable=scrubbable,
            retained=kept,
            kept_s=self.now_s - mark.since_s if mark else None,
            kept_is_over=mark is not None and mark.is_over(self.now_s),
            claimed_at_s=sidecar.claimed_at_s if kept and sidecar else 0.0,
            damage=damage,
            # As handoff.check_pages words it: marks of other damage look the same.
            has_bad_pages="bad page" in (bad_mark or ""),
            place_bytes=place_bytes,
            layout=layout_text(same.layout) if same and same.layout is not None else "",
        )

    def _kept_mark(self, region: RegionFacts, sidecar: Sidecar) -> KeptMark:
        """Return since when a region without a holder is kept; the first look begins to count.

        Its holder may have been killed: nobody wrote when it let go. A time to come is no time.
        The limit lies beside it, for claims: an owner may come before the next scrub.
        """
        found = read_kept_mark(self.paths, region.name, sidecar.lease_id)
        since_s = self.now_s if found is None else min(found.since_s, self.now_s)
        noted_s = found.most_s if found is not None else None
        mark = KeptMark(since_s, self.limits.get(self.paths.pool, noted_s))
        if mark != found and self.repair and may_scrub_pool(self.paths):
            with contextlib.suppress(HostprepError, OSError):
                mark_kept(self.paths, region.name, sidecar.lease_id, mark, gid=region.gid)
        return mark


def _damage(region: RegionFacts, published: Region | None) -> str | None:
    """Return why a region may not be handed out, from its own size and the published one."""
    if region.resident_bytes < region.size_bytes or region.size_bytes == 0:
        missing = region.size_bytes - region.resident_bytes
        return f"lacks {missing} of {region.size_bytes} bytes of its memory"
    if published is None:
        return None
    if published.st_ino != region.inode:
        return "is another file than the one published"
    if published.size_bytes != region.size_bytes:
        return f"has {region.size_bytes} bytes, {published.size_bytes} were published"
    return None


@dataclass(frozen=True, slots=True)
class GateFacts:
    """One engine's gate, as its board shows it now."""

    state: str
    """Closed, Open or Degraded."""
    why: str
    is_running: bool
    """One of its ranks lives, or its lease does: a lease all of whose ranks ended is a run too."""
    view: BoardView

    @property
    def is_announced(self) -> bool:
        """Whether the engine's own gate announced it: that is final."""
        return self.view.gate is not None


def observe_gate(paths: PoolPaths, region: str, *, leased: bool) -> GateFacts:
    """Return the gate of the present or last run at a region; changes nothing.

    Raises NotReadyError where there is no board (NoBoard), or none that can be understood
    (BadBoard, OtherBoardVersion), HostprepError.
    """
    view = read_board(paths.board(region))
    verdict = _verdict(view)
    is_running = view.alive or (leased and _is_of_lease(paths, region, view))
    return GateFacts(verdict.state, verdict.why, is_running, view)


def _verdict(view: BoardView) -> Verdict:
    # What the engine's gate announced goes first: it may know of ranks on other nodes.
    if view.gate is not None:
        return Verdict(view.gate.state, view.gate.reason)
    ready = [rank for rank in view.ranks if rank.slot.state == READY]
    if len(ready) == view.world:
        return Verdict(OPEN)  # and stays so: ranks end one by one when the engine does
    return judge(view.world, {}, view)


def _is_of_lease(paths: PoolPaths, region: str, view: BoardView) -> bool:
    sidecar = read_sidecar(paths, region)
    if sidecar is None or not sidecar.lease_id:
        return False
    return generation_of(sidecar.lease_id) == view.generation
