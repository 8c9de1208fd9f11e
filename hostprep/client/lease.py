"""A lease: an exclusive flock on the region file, held by one open file description."""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from hostprep.client.handoff import Handoff, Region, check_region, open_region
from hostprep.client.owner import Owner, OwnerRecord
from hostprep.client.scrub import (
    JOINED,
    LEASED,
    NOT_ENDED,
    WRITABLE,
    LastUsers,
    remove_stale_links,
    why_locked,
    why_not_quiescent,
)
from hostprep.client.sidecar import (
    add_member,
    has_state_folder,
    is_clean,
    mark_dirty,
    new_sidecar,
    read_kept_mark,
    read_sidecar,
    retire,
    write_sidecar,
)
from hostprep.client.untrusted import open_file, wrong_kind
from hostprep.errors import (
    BadInputError,
    FailedError,
    HostprepError,
    NotReadableError,
    NotReadyError,
)
from hostprep.linux.files import closing_fd, from_os_error
from hostprep.linux.locks import try_lock
from hostprep.linux.processes import is_ending, is_of_our_namespace, may_scrub
from hostprep.paths import PoolPaths
from hostprep.units import format_bytes, format_seconds

_OF_THE_GROUP = "run it as root, or as the pool's group"


@dataclass(frozen=True)
class Request:
    """A batch of `count` regions of at least `size_bytes` each, or the regions `names`."""

    count: int = 1
    size_bytes: int = 1
    numa_node: int | None = None
    names: tuple[str, ...] = ()
    owner: Owner | None = None

    def __post_init__(self) -> None:
        if self.count < 1 or self.size_bytes < 1:
            raise BadInputError("a claim needs at least one region of at least one byte")
        if len(set(self.names)) < len(self.names):
            raise BadInputError("a claim names a region twice")

    @property
    def wanted(self) -> int:
        """Number of regions that the claim takes."""
        return len(self.names) or self.count

    def candidates(self, handoff: Handoff) -> tuple[Region, ...]:
        """Return the regions that could serve, the best fitting first.

        Raises NotReadyError where the pool could never serve it as it stands.
        """
        for name in self.names:
            if handoff.region(name) is None:
                raise self._cannot(handoff, f"has no region {name}")
        fitting = sorted(
            (region for region in handoff.regions if self._fits(region)),
            key=lambda region: (region.size_bytes, region.name),
        )
        if len(fitting) < self.wanted:
            raise self._cannot(
                handoff,
                f"has {len(fitting)} region(s) that fit, {self.wanted} are needed"
                f" (at least {format_bytes(self.size_bytes)}"
                + ("" if self.numa_node is None else f" on NUMA node {self.numa_node}")
                + ")",
            )
        return tuple(fitting)

    def _fits(self, region: Region) -> bool:
        if self.names and region.name not in self.names:
            return False
        if self.numa_node is not None and region.numa_node not in (None, self.numa_node):
            return False
        return region.size_bytes >= self.size_bytes

    def _cannot(self, handoff: Handoff, what: str) -> NotReadyError:
        listed = ", ".join(
            f"{region.name} {format_bytes(region.size_bytes)}" for region in handoff.regions[:8]
        )
        return NotReadyError(
            f"pool {handoff.pool} {what}",
            reason="NoSuchRegion",
            remedy=f"the pool holds: {listed or 'nothing'}; ask for that, or enlarge the pool",
        )


@dataclass(frozen=True)
class Lease:
    """A region that this process (or an inheritor of `fd`) holds until the last `fd` closes."""

    paths: PoolPaths
    handoff: Handoff
    region: Region
    fd: int
    lease_id: str
    contents_kept: bool = False
    """True where the owner got its own bytes back; else the region is all zeros."""
    discarded: str | None = None
    """Why an owner's earlier bytes were not given back, naming the field that differs."""
    zeroed_s: float = 0.0
    """Seconds that the claim spent on zeroing the last owner's bytes; 0 for a clean region."""
    users_fd: int | None = None
    """With a joined lease: the shared lock that keeps the region from the next owner."""
    is_leader: bool = True
    """False for a process that joined: its end is not the lease's."""

    @property
    def path(self) -> str:
        """Absolute path of the region's file."""
        return self.paths.region_of(self.region.path)

    def retire(self) -> None:
        """Record that this process has unmapped the region and is about to close the lease."""
        with contextlib.suppress(HostprepError, OSError):
            if self.is_leader:
                gid = os.fstat(self.fd).st_gid
                retire(self.paths, self.region.name, self.lease_id, gid=gid)
            elif self.users_fd is not None:
                add_member(self.paths, self.region.name, leaving=True)

    def close(self) -> None:
        """Close our descriptors; the lease ends with the last one, mappings included."""
        for fd in (self.fd, self.users_fd):
            if fd is not None:
                with contextlib.suppress(OSError):
                    os.close(fd)


DIRTY = "dirty: waits to be scrubbed by the agent or by root"
"""Why a region is refused that nobody uses, where this process may not zero it."""


@dataclass(frozen=True)
class Held:
    """A region whose lock was taken in the first phase; `must_scrub` before it is handed on."""

    region: Region
    fd: int
    users_fd: int
    """The users lock, held exclusively until the region is ready: none joins or reads before."""
    must_scrub: bool
    contents_kept: bool = False
    discarded: str | None = None
    index: int = 0
    """Its place in the batch."""
    kept_since_s: float = 0.0
    """Where its contents are kept: when its owner first claimed it."""


class Taken:
    """The outcome of one attempt: the whole batch, or nothing and why."""

    def __init__(self, refusals: dict[str, str] | None = None) -> None:
        self.held: list[Held] = []
        self.refusals = refusals or {}
        self.ending: frozenset[str] = frozenset()
        """Regions kept for the claimer that processes of its last lease still use, as they end:
        nothing was taken, so that the claimer may wait for those."""
        self.own: frozenset[str] = frozenset()
        """Those, and the others whose bytes it would have got in the same batch."""

    def drop(self) -> None:
        """Close what was taken."""
        for held in self.held:
            os.close(held.fd)
            os.close(held.users_fd)
        self.held.clear()

    def let_join(self) -> None:
        """Release the users locks: the regions are ready for the engine's other processes."""
        for held in self.held:
            os.close(held.users_fd)


def take_all(
    paths: PoolPaths,
    request: Request,
    candidates: Sequence[Region],
    lease_id: str,
    last_users: LastUsers,
    *,
    may_wait: bool = False,
    waited_s: float = 0.0,
) -> Taken:
    """Take every region of the batch or none: the first phase, under the claim lock.

    `last_users` were looked up before the lock was taken. Only try-locks and small files: nothing
    here may wait. Clean marks go as the very last step, so that an attempt
    which fails leaves clean regions clean. With `may_wait`, an owner whose own bytes are in use by
    what is left of its dead engine gets nothing else instead (`Taken.ending`).
    `waited_s`: since the claim began, to be noted beside the regions.
    """
    taken = Taken()
    scrubber = may_scrub(os.stat(paths.claim_lock).st_uid)
    try:
        for region in _in_order(paths, request, candidates):
            if len(taken.held) == request.wanted:
                break
            outcome = _try_region(paths, request, region, last_users if scrubber else None)
            if isinstance(outcome, Held):
                taken.held.append(outcome)
            else:
                taken.refusals[region.name] = outcome
        kept = {held.region.name for held in taken.held if held.contents_kept}
        if len(taken.held) == request.wanted:
            taken.held = _all_kept_or_none(paths, taken.held)
        ending = _ending(paths, request, taken)
        taken.ending = ending if may_wait else frozenset()
        taken.own = ending | kept
        if len(taken.held) < request.wanted or taken.ending:
            taken.drop()
        taken.held = [_without(held, ending) for held in taken.held]
        for held in taken.held:
            _record_lease(paths, request, held, lease_id, waited_s)
    except BaseException:
        taken.drop()
        raise
    return taken


def _in_order(paths: PoolPaths, request: Request, candidates: Sequence[Region]) -> list[Region]:
    """Sort candidates: the owner's own bytes, clean ones, dirty ones, bytes kept for others.

    The owner's own in the order of its last batch, so that each of its ranks gets the region that
    it had; of what is kept for others the oldest gives way first.
    """

    def rank(region: Region) -> tuple[float, ...]:
        if is_clean(paths, region):
            return (1,)
        sidecar = read_sidecar(paths, region.name)
        if sidecar is None or sidecar.owner is None:
            return (2,)
        if request.owner and request.owner.is_same_as(sidecar.owner):
            return 0, sidecar.owner.index
        mark = read_kept_mark(paths, region.name, sidecar.lease_id)
        # One without a mark was let go in this moment, or no agent looks at this pool.
        return 3, math.inf if mark is None else mark.since_s, sidecar.claimed_at_s

    return sorted(candidates, key=rank)


def _try_region(
    paths: PoolPaths, request: Request, region: Region, last_users: LastUsers | None
) -> Held | str:
    """Return the region locked, or why it cannot be had now. `last_users`: for scrubbers."""
    clean = is_clean(paths, region)
    own, discarded = (False, None) if clean else _own_bytes(paths, request, region)
    if not clean and not own and last_users is None:
        return why_locked(paths, region) or DIRTY
    if last_users is not None:
        why = why_not_quiescent(paths, region, last_users)
        if why is not None:
            return why
    locked = _lock_both(paths, region)
    if isinstance(locked, str):
        return locked
    # Own bytes that were kept for too long are zeroed by the claimer: it may have them, and holds
    # both locks.
    kept = own and discarded is None
    must_scrub = not clean and not kept
    return Held(region, *locked, must_scrub, contents_kept=kept, discarded=discarded)


def _lock_both(paths: PoolPaths, region: Region) -> tuple[int, int] | str:
    """Return the region's and its users lock's descriptors, both locked, or why not."""
    try:
        fd = open_region(paths, region, writable=True)
    except NotReadyError as error:
        return error.message
    try:
        check_region(region, fd)
        users = open_users_lock(paths, region)
    except (NotReadyError, FailedError) as error:
        os.close(fd)
        return error.message
    except BaseException:
        os.close(fd)
        raise
    if not try_lock(fd, exclusive=True):
        why = LEASED
    elif not try_lock(users, exclusive=True):
        why = JOINED
    else:
        return fd, users
    os.close(fd)
    os.close(users)
    return why


def _own_bytes(paths: PoolPaths, request: Request, region: Region) -> tuple[bool, str | None]:
    """Tell whether the region's bytes are the claimer's own, and why it does not get them back.

    Bytes that were kept for longer than the pool allows are its own, and are not given back.
    """
    if request.owner is None:
        return False, None
    sidecar = read_sidecar(paths, region.name)
    if sidecar is None or sidecar.owner is None or not request.owner.is_same_as(sidecar.owner):
        return False, None
    difference = request.owner.difference(sidecar.owner)
    if difference is not None:
        return False, difference
    mark = read_kept_mark(paths, region.name, sidecar.lease_id)
    if mark is not None and mark.is_over(time.time()):
        return True, f"kept for longer than the pool allows ({format_seconds(mark.most_s or 0)})"
    return True, None


def _all_kept_or_none(paths: PoolPaths, taken: Sequence[Held]) -> list[Held]:
    """Return the batch with each region's place; its contents are kept only if all of them are.

    Where a region of the last batch is missing, the others' bytes would meet the wrong ranks or a
    rank without any: they are zeroed. That goes without the right to scrub as well: whoever may
    have the bytes and holds both locks may also zero them.
    """
    batch = [replace(held, index=index) for index, held in enumerate(taken)]
    if not any(held.contents_kept for held in batch):
        return batch
    sidecars = [read_sidecar(paths, held.region.name) for held in batch]
    whole = len(batch) == 1 or all(
        held.contents_kept and sidecar and sidecar.owner and sidecar.owner.index == held.index
        for held, sidecar in zip(batch, sidecars)
    )
    if whole:
        return [
            replace(held, kept_since_s=sidecar.kept_since_s if sidecar else 0.0)
            for held, sidecar in zip(batch, sidecars)
        ]
    why = "not all regions of the last batch can be had: all are kept, or none"
    return [
        replace(held, contents_kept=False, must_scrub=True, discarded=why)
        if held.contents_kept
        else held
        for held in batch
    ]


def _ending(paths: PoolPaths, request: Request, taken: Taken) -> frozenset[str]:
    """Return the refused regions with the claimer's own bytes whose last engine is about to end.

    None where the batch has its bytes without them. An engine that lives keeps its region: several
    of the same owner run side by side, each in regions of its own. So does one whose processes
    have numbers of another PID namespace, where they cannot be judged; once it is killed, all of
    that namespace ends with it.
    """
    kept = len(taken.held) == request.wanted and all(held.contents_kept for held in taken.held)
    if request.owner is None or kept:
        return frozenset()
    ending = set()
    for region, why in taken.refusals.items():
        sidecar = read_sidecar(paths, region)
        if sidecar is None or sidecar.owner is None:
            continue
        if not request.owner.is_same_as(sidecar.owner) or request.owner.difference(sidecar.owner):
            continue
        has_ended = is_of_our_namespace(sidecar.holder) and is_ending(sidecar.holder)
        if why == JOINED or (why in (LEASED, WRITABLE) and has_ended) or why.endswith(NOT_ENDED):
            ending.add(region)
    return frozenset(ending)


def _without(held: Held, ending: frozenset[str]) -> Held:
    """Say why the claimer's own bytes, in other regions, are not given back."""
    if held.contents_kept or held.discarded or not ending:
        return held
    why = f"{', '.join(sorted(ending))}: processes of the last engine have not ended"
    return replace(held, discarded=why)


def owner_record(request: Request, held: Held) -> OwnerRecord | None:
    """Return what the region's sidecar is to say of the claimer as its contents' owner."""
    if request.owner is None:
        return None
    return request.owner.record(since_s=held.kept_since_s or time.time(), index=held.index)


def _record_lease(
    paths: PoolPaths, request: Request, held: Held, lease_id: str, waited_s: float
) -> None:
    """Write the lease beside the region, while no process of an earlier lease can join.

    Joiners hold the users lock shared while they compare the lease's id: while we hold it
    exclusively, they see either the earlier lease (and we see them) or this one. The clean
    mark goes last of all and before the first byte can be written. A region that is yet to be
    scrubbed gets no owner: killed before the end, we would get another's bytes as our own the next
    time.
    """
    owner = None if held.must_scrub else owner_record(request, held)
    gid = os.fstat(held.fd).st_gid
    remove_stale_links(paths, held.region.name)
    sidecar = new_sidecar(lease_id, owner, waited_s=round(waited_s, 3))
    write_sidecar(paths, held.region.name, sidecar, gid=gid)
    mark_dirty(paths, held.region.name)


def open_users_lock(paths: PoolPaths, region: Region) -> int:
    """Open the region's users lock. Raises BadInputError or FailedError."""
    path = paths.users_lock(region.name)
    if os.path.lexists(paths.state_of(region.name)) and not has_state_folder(paths, region.name):
        raise FailedError(
            f"{paths.state_of(region.name)} is not a plain folder",
            remedy="root's `hostprep prepare`, or the agent, makes it again",
        )
    try:
        return open_file(path)
    except OSError as error:
        raise from_os_error(error, f"open {path}") from error
    except NotReadableError as error:
        if wrong_kind(path) is None:
            raise BadInputError(
                error.message, reason="NoPermission", remedy=_OF_THE_GROUP
            ) from error
        raise FailedError(
            error.message, remedy="root's `hostprep prepare`, or the agent, makes it again"
        ) from error


def new_lease_id() -> str:
    """Return a name for a lease: unguessable enough not to collide, short enough to read."""
    return os.urandom(6).hex()


def join_lease(
    paths: PoolPaths, handoff: Handoff, region: Region, lease_id: str, *, writable: bool = True
) -> Lease:
    """Join a lease that another process of the same engine leads.

    Holds the users lock shared: after the leader's end the region stays ours until we end too.
    Raises NotReadyError where that lease does not live any more.
    """
    users = open_users_lock(paths, region)
    try:
        if not try_lock(users, exclusive=False):
            raise _lease_over(region, lease_id)
        sidecar = read_sidecar(paths, region.name)
        if sidecar is None or sidecar.lease_id != lease_id:
            raise _lease_over(region, lease_id)
        fd = open_region(paths, region, writable=writable)
        try:
            with closing_fd(open_region(paths, region, writable=False)) as probe:
                if try_lock(probe, exclusive=False):
                    raise _lease_over(region, lease_id)
            check_region(region, fd)
            with contextlib.suppress(OSError):
                add_member(paths, region.name)
        except BaseException:
            os.close(fd)
            raise
    except BaseException:
        os.close(users)
        raise
    return Lease(
        paths, handoff, region, fd, lease_id, contents_kept=True, users_fd=users, is_leader=False
    )


def _lease_over(region: Region, lease_id: str) -> NotReadyError:
    return NotReadyError(
        f"lease {lease_id} of region {region.name} has ended",
        reason="LeaseOver",
        remedy="claim a region again",
    )
