"""The claim: wait in line, take all or nothing under the lock, then scrub and check outside."""

from __future__ import annotations

import contextlib
import json
import os
import time
from dataclasses import dataclass, replace

from hostprep.client.handoff import Handoff, Region, check_region, read_handoff
from hostprep.client.lease import Held, Lease, Request, Taken, new_lease_id, take_all
from hostprep.client.sidecar import forget_members, read_sidecar, short_command, write_sidecar
from hostprep.errors import BusyError, HostprepError, NotReadyError
from hostprep.linux.files import closing_fd, from_os_error, open_state_file, read_limited
from hostprep.linux.locks import hold_lock, try_lock
from hostprep.paths import PoolPaths

TYPE_CHECKING = False
if TYPE_CHECKING:
    from contextlib import AbstractContextManager


_LOCK_TIMEOUT_S = 10.0
_PAUSE_FIRST_S = 0.002
_PAUSE_MOST_S = 0.05


def claim(paths: PoolPaths, request: Request, *, wait_timeout_s: float = 0.0) -> list[Lease]:
    """Take all regions of the request, or none, waiting at most `wait_timeout_s` seconds.

    A pool that is not prepared yet is waited for as well. Waiters hold nothing but their ticket.
    Raises NotReadyError (memory not there, or not as promised), BusyError (others hold it),
    BadInputError. Every returned lease is verified and either zeroed or the owner's own.
    """
    deadline_s = time.monotonic() + wait_timeout_s
    pending = _PendingClaim(paths, request)
    pause_s = _PAUSE_FIRST_S
    try:
        while True:
            leases = pending.attempt(may_queue=time.monotonic() < deadline_s)
            if leases is not None:
                return leases
            if time.monotonic() >= deadline_s:
                raise pending.why()
            time.sleep(min(pause_s, max(0.0, deadline_s - time.monotonic())))
            pause_s = min(pause_s * 1.5, _PAUSE_MOST_S)
    finally:
        pending.leave()


def claim_lock(paths: PoolPaths) -> AbstractContextManager[int]:
    """Hold the pool-wide decision lock: for try-locks and small files only."""
    return hold_lock(
        paths.claim_lock,
        timeout_s=_LOCK_TIMEOUT_S,
        busy=BusyError(
            f"another process has held {paths.claim_lock} for {_LOCK_TIMEOUT_S:.0f} s",
            remedy="it should take milliseconds: see which one with `fuser`, and end it",
        ),
    )


class _PendingClaim:
    """A claim over its attempts: its ticket, and why it could not be served."""

    def __init__(self, paths: PoolPaths, request: Request) -> None:
        self.paths = paths
        self.request = request
        self.ticket: Ticket | None = None
        self.problem: HostprepError | None = None
        self.refusals: dict[str, str] = {}
        self.unfit: set[str] = set()
        """Regions that turned out bad once they were locked: they cost only themselves."""

    def attempt(self, *, may_queue: bool) -> list[Lease] | None:
        """Return the leases, or None if they cannot be had now."""
        lease_id = new_lease_id()
        try:
            handoff = read_handoff(self.paths)
            fitting = self.request.candidates(handoff)
            candidates = tuple(region for region in fitting if region.name not in self.unfit)
            with claim_lock(self.paths):
                taken = self._take_in_turn(candidates, lease_id, may_queue=may_queue)
            self.refusals = taken.refusals
            self.problem = self.problem if self.unfit else None
            return self._finish(handoff, taken, lease_id) if taken.held else None
        except (NotReadyError, BusyError) as error:
            self.problem = error
            return None

    def _take_in_turn(
        self, candidates: tuple[Region, ...], lease_id: str, *, may_queue: bool
    ) -> Taken:
        names = frozenset(region.name for region in candidates)
        left = left_by_earlier(self.paths, self.ticket, names)
        if len(left) >= self.request.wanted:
            mine = [region for region in candidates if region.name in left]
            taken = take_all(self.paths, self.request, mine, lease_id)
        else:
            taken = Taken(refusals={"queue": "others that came before are waiting"})
        if not taken.held and may_queue and self.ticket is None:
            self.ticket = draw_ticket(self.paths, names)
        return taken

    def _finish(self, handoff: Handoff, taken: Taken, lease_id: str) -> list[Lease]:
        """Second phase, outside the lock: check what we hold again, scrub where we must."""
        leases: list[Lease] = []
        try:
            for held in taken.held:  # a loop: the handler needs what was done so far
                leases.append(_lease(self.paths, handoff, self.request, held, lease_id))
        except BaseException as error:
            if isinstance(error, NotReadyError):
                self.unfit.add(taken.held[len(leases)].region.name)
            for lease in leases:
                lease.retire()
            taken.drop()
            raise
        taken.let_join()
        return leases

    def why(self) -> Exception:
        """Return the error for a wait in vain."""
        if self.problem is not None:
            return self.problem
        listed = "; ".join(
            f"{name}: {_by_whom(self.paths, name, why)}"
            for name, why in sorted(self.refusals.items())
        )
        return BusyError(
            f"no {self.request.wanted} region(s) of pool {self.paths.pool} are free ({listed})",
            remedy="wait longer (--wait), or see `hostprep status`; root's `hostprep prepare`"
            " scrubs what is dirty",
        )

    def leave(self) -> None:
        """Give the ticket up."""
        if self.ticket is not None:
            self.ticket.give_up()
            self.ticket = None


def _by_whom(paths: PoolPaths, region: str, why: str) -> str:
    """Add to a refusal which process holds the region, if the sidecar names it."""
    sidecar = read_sidecar(paths, region) if why == "leased" else None
    if sidecar is None:
        return why
    return f"leased by {short_command(sidecar, limit=200)} (process {sidecar.holder.pid})"


def _lease(
    paths: PoolPaths, handoff: Handoff, request: Request, held: Held, lease_id: str
) -> Lease:
    # A process that may write a region may also have shrunk it since it was verified: a mapping
    # beyond its end would kill the engine with SIGBUS.
    check_region(held.region, held.fd)
    lease = Lease(
        paths,
        handoff,
        held.region,
        held.fd,
        lease_id,
        contents_kept=held.contents_kept,
        discarded=held.discarded,
    )
    if held.must_scrub:
        try:
            _scrub(lease, request)
        except BaseException:
            lease.retire()
            raise
    return lease


def _scrub(lease: Lease, request: Request) -> None:
    from hostprep.client.scrub import scrub_file

    scrub_file(lease.region, lease.fd)
    forget_members(lease.paths, lease.region.name)
    sidecar = read_sidecar(lease.paths, lease.region.name)
    if request.owner is not None and sidecar is not None:
        gid = os.fstat(lease.fd).st_gid
        owned = replace(sidecar, owner=request.owner.record())
        write_sidecar(lease.paths, lease.region.name, owned, gid=gid)


@dataclass(frozen=True)
class Ticket:
    """A place in the queue; closing `fd` gives it up."""

    number: int
    path: str
    fd: int

    def give_up(self) -> None:
        """Leave the queue."""
        with contextlib.suppress(OSError):
            # The pool may have been released and made again: then another has that number.
            if os.stat(self.path).st_ino == os.fstat(self.fd).st_ino:
                os.unlink(self.path)
        os.close(self.fd)


def draw_ticket(paths: PoolPaths, candidates: frozenset[str]) -> Ticket:
    """Take the last place in the queue. Raises BadInputError without the right to write there."""
    number = max((number for number, _ in _numbers(paths)), default=0) + 1
    path = f"{paths.tickets}/{number:012d}"
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o660)
    except OSError as error:
        raise from_os_error(error, f"wait in {paths.tickets}") from error
    try_lock(fd, exclusive=True)
    os.fchmod(fd, 0o660)  # despite the umask: the rest of the group must be able to read it
    os.write(fd, json.dumps(sorted(candidates)).encode())
    return Ticket(number, path, fd)


def left_by_earlier(
    paths: PoolPaths, mine: Ticket | None, candidates: frozenset[str]
) -> frozenset[str]:
    """Return the candidates that no earlier, living waiter could use.

    Only those may be taken: a large batch is not starved by small ones, and a claim that other
    regions can serve need not wait. Tickets of dead processes are removed on the way.
    """
    left = candidates
    for number, path in _numbers(paths):
        if mine is not None and number >= mine.number:
            break
        wanted = _wanted_by(path)
        if wanted is not None:
            left = left - wanted if wanted else frozenset()
    return left


def has_waiters(paths: PoolPaths) -> bool:
    """Tell whether a living process waits in this pool."""
    return any(_wanted_by(path) is not None for _, path in _numbers(paths))


def _wanted_by(path: str) -> frozenset[str] | None:
    """Return the regions a living waiter can use (empty if unreadable: all); None if it is dead."""
    try:
        fd = open_state_file(path, os.O_RDONLY)
    except PermissionError:
        return frozenset()
    except OSError:
        return None
    with closing_fd(fd):
        if try_lock(fd, exclusive=True):
            with contextlib.suppress(OSError):
                os.unlink(path)
            return None
        try:
            return frozenset(str(name) for name in json.loads(read_limited(fd, 1 << 20)))
        except (ValueError, TypeError, RecursionError, HostprepError):
            return frozenset()


def _numbers(paths: PoolPaths) -> list[tuple[int, str]]:
    try:
        names = os.listdir(paths.tickets)
    except OSError:
        return []
    return sorted(
        (int(name), f"{paths.tickets}/{name}")
        for name in names
        if name.isascii() and name.isdigit() and len(name) <= 18
    )
