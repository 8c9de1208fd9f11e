"""Making, scrubbing and removing region files."""

from __future__ import annotations

import contextlib
import os
import re
import threading
from collections.abc import Callable, Iterator, Sequence

from hostprep.backing import MIB, Backing
from hostprep.client.claim import claim_lock_briefly
from hostprep.client.handoff import Region, open_region
from hostprep.client.lease import open_users_lock
from hostprep.client.scrub import LastUsers, remove_stale_links, scrub_file, why_not_quiescent
from hostprep.client.sidecar import (
    forget_members,
    make_state_folder,
    mark_bad,
    mark_clean,
    mark_dirty,
    read_bad_mark,
)
from hostprep.errors import BusyError, FailedError, HostprepError
from hostprep.linux.files import closing_fd, from_os_error, open_state_file, remove_file
from hostprep.linux.locks import try_lock
from hostprep.linux.memory import address_of, explain, map_shared, populate
from hostprep.linux.numa import bind_memory, interleave_memory
from hostprep.linux.threads import Workers, pieces_of
from hostprep.node.apply.folder import clear_debris, put_aside
from hostprep.node.apply.held import discard_file
from hostprep.node.facts import PoolFacts
from hostprep.node.plan.actions import CreateRegion, RemoveRegion, Shortfall, ShortfallError
from hostprep.node.plan.estimate import PIECE_BYTES
from hostprep.paths import PoolPaths

_MIN_HUGE_SHARE = 0.95


def populating_workers(actions: Sequence[CreateRegion]) -> Workers:
    """Return threads for these regions of one placement, near it and with its memory."""
    first = actions[0]
    place = interleave_memory if first.placement.node is None else bind_memory

    def prepare() -> None:
        if first.cpus:
            os.sched_setaffinity(0, first.cpus)
        place(first.node_ids)

    return Workers(max(action.threads for action in actions), prepare)


def create_region(
    paths: PoolPaths,
    action: CreateRegion,
    workers: Workers,
    *,
    on_done: Callable[[int], None],
    stop: threading.Event,
) -> None:
    """Make one region: under a temporary name until it is populated, checked and marked clean.

    A temporary file that a killed run left is continued: what is resident stays. It was never
    published, so it is zero.
    Raises ShortfallError when pages ran out, Stopped, HostprepError.
    """
    part = paths.part_of(action.mount_dir, action.region)
    try:
        fd = open_state_file(part, os.O_RDWR | os.O_CREAT)
    except OSError as error:
        raise from_os_error(error, f"create {part}") from error
    with closing_fd(fd):
        os.ftruncate(fd, action.size_bytes)
        try:
            _populate(fd, action, workers, on_done, stop)
            _check_resident(fd, action)
        except ShortfallError:
            remove_file(part)
            raise
        try:
            _finish(paths, action, fd)
        except OSError as error:
            raise from_os_error(error, f"make the files beside {action.region}") from error
    path = f"{paths.folder}/{action.mount_dir}/{action.region}"
    clear_debris(path)
    try:
        os.rename(part, path)
    except OSError as error:
        raise from_os_error(error, f"put the region at {path}") from error


def _populate(
    fd: int,
    action: CreateRegion,
    workers: Workers,
    on_done: Callable[[int], None],
    stop: threading.Event,
) -> None:
    try:  # on hugetlbfs this reserves all pages, and fails where they are not
        mapping = map_shared(fd, action.size_bytes)
    except HostprepError as error:
        raise _as_shortfall(error, action) from error
    with mapping:
        address = address_of(mapping)

        def work(piece: tuple[int, int]) -> None:
            offset, length = piece
            try:
                if action.large_folios:
                    os.posix_fallocate(fd, offset, length)
                populate(address + offset, length, write=True)
            except OSError as error:
                explained = explain(error.errno, f"populating {action.region}")
                raise _as_shortfall(explained, action) from error
            on_done(length)

        workers.run(work, pieces_of(action.size_bytes, PIECE_BYTES[action.backing]), stop)
        if action.backing is Backing.THP:
            _check_huge(address, action)


def _as_shortfall(explained: HostprepError, action: CreateRegion) -> HostprepError:
    """Return the error to raise: a shortfall where pages ran out, for the next plan to avoid."""
    if explained.reason in ("OutOfPages", "OutOfMemory"):
        return _shortfall(action, explained.message)
    return explained


def _shortfall(action: CreateRegion, why: str) -> ShortfallError:
    return ShortfallError(Shortfall(action.pool, action.backing, why, action.placement.node))


def _check_resident(fd: int, action: CreateRegion) -> None:
    resident = os.fstat(fd).st_blocks * 512
    if resident < action.size_bytes:
        raise FailedError(
            f"{action.region} has {resident} of {action.size_bytes} bytes after populating",
            reason="RegionNotResident",
            remedy="run prepare again",
        )


def _check_huge(address: int, action: CreateRegion) -> None:
    """Refuse a THP region that the kernel filled with base pages: it would not attach fast."""
    with open("/proc/self/smaps", encoding="ascii", errors="replace") as file:
        text = file.read()
    start = text.find(f"\n{address:x}-")
    match = re.compile(r"ShmemPmdMapped:\s+(\d+) kB").search(text, max(start, 0))
    huge_bytes = int(match[1]) * 1024 if match else 0
    if huge_bytes < action.size_bytes * _MIN_HUGE_SHARE:
        raise _shortfall(
            action, f"only {huge_bytes // MIB} of {action.size_bytes // MIB} MiB became 2 MiB pages"
        )


def _finish(paths: PoolPaths, action: CreateRegion, fd: int) -> None:
    """Set the region's access and make its state files; the clean mark names this inode."""
    gid = -1 if action.gid is None else action.gid
    make_state_folder(paths, action.region)
    users = paths.users_lock(action.region)
    marks = (paths.bad_mark, paths.sidecar, paths.warm_report, paths.kept_mark)
    for path in (users, *(mark(action.region) for mark in marks)):
        remove_file(path)
    # Exclusive: the pool's group may write to this folder, and plant links for root to follow.
    flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC
    with closing_fd(os.open(users, flags, 0o600)) as lock:
        for open_fd in (lock, fd):
            os.fchown(open_fd, -1, gid)
            os.fchmod(open_fd, action.mode)
    status = os.fstat(fd)
    mark_clean(paths, action.region, st_dev=status.st_dev, st_ino=status.st_ino, gid=status.st_gid)


def mark_damaged(paths: PoolPaths, pool: PoolFacts) -> None:
    """Mark damaged regions before the handoff that shows the damage is replaced.

    A region that was shrunk looks sound by itself: only the handoff has its size.
    """
    for region in pool.regions:
        if region.finished and region.damage and read_bad_mark(paths, region.name) is None:
            with contextlib.suppress(HostprepError):
                size_bytes = region.place_bytes or region.size_bytes
                mark_bad(paths, region.name, region.damage, size_bytes=size_bytes)


def scrub_region(
    paths: PoolPaths,
    region: Region,
    *,
    on_done: Callable[[int], None],
    stop: threading.Event,
    threads: int | None = None,
) -> None:
    """Zero a dirty region that is not in use, keep claimers away meanwhile, and mark it clean.

    `threads` None: as many as a claim that scrubs by itself has. Raises BusyError if it is in use.
    """
    with _held_alone(paths, region, "scrubbed") as fd:
        # Before the first zero: a kill in between must leave no owner's name on half its bytes.
        remove_stale_links(paths, region.name)
        remove_file(paths.sidecar(region.name))
        remove_file(paths.warm_report(region.name))
        remove_file(paths.kept_mark(region.name))
        mark_dirty(paths, region.name)
        scrub_file(region, fd, threads=threads, on_done=on_done, stop=stop)
        forget_members(paths, region.name)
        status = os.fstat(fd)
        mark_clean(
            paths, region.name, st_dev=status.st_dev, st_ino=status.st_ino, gid=status.st_gid
        )


@contextlib.contextmanager
def _held_alone(paths: PoolPaths, region: Region, done: str) -> Iterator[int]:
    """Yield a quiescent region's descriptor with both of its locks held.

    No process can claim, join or read it meanwhile. Raises BusyError if it is in use (Leased), or
    if the pool's claim lock is held (ClaimLockHeld).
    """
    with contextlib.ExitStack() as stack:
        last_users = LastUsers(paths)
        last_users.look_up([region.name])
        with claim_lock_briefly(paths):
            try:  # a link in its place would have us write elsewhere
                make_state_folder(paths, region.name)
            except OSError as error:
                raise from_os_error(error, f"make the folder of {region.name}'s state") from error
            why = why_not_quiescent(paths, region, last_users)
            if why is None:
                fd = stack.enter_context(closing_fd(open_region(paths, region, writable=True)))
                users = stack.enter_context(closing_fd(open_users_lock(paths, region)))
                if not (try_lock(fd, exclusive=True) and try_lock(users, exclusive=True)):
                    why = "it was taken in this instant"
            if why is not None:
                raise BusyError(
                    f"region {region.name} cannot be {done}: {why}",
                    reason="Leased",
                    remedy="end its user, or use --force",
                )
        yield fd


def remove_region(paths: PoolPaths, action: RemoveRegion, region: Region | None) -> None:
    """Delete a region's file and its state. Raises BusyError if it is in use.

    `region` is None for what was never finished. With `force` a holder keeps its pages until it
    ends; nothing is ever truncated under it.
    """
    if region is None or action.force:
        _delete(paths, action)
        return
    with _held_alone(paths, region, "removed") as fd:
        _delete(paths, action, fd)


def _delete(paths: PoolPaths, action: RemoveRegion, fd: int | None = None) -> None:
    remove_stale_links(paths, action.region)
    discard_file(f"{paths.folder}/{action.mount_dir}/{action.region}", fd)
    discard_file(paths.part_of(action.mount_dir, action.region))
    put_aside(paths, paths.state_of(action.region))
