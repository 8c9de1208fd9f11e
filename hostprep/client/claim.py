"""The claim: wait in line, take all or nothing under the lock, then scrub and check outside."""

from __future__ import annotations

import contextlib
import json
import os
import time
from dataclasses import dataclass, replace

from hostprep.client.handoff import Handoff, Region, access_remedy, check_region, read_handoff
from hostprep.client.lease import (
    DIRTY,
    Held,
    Lease,
    Request,
    Taken,
    new_lease_id,
    owner_record,
    take_all,
)
from hostprep.client.owner import Owner, OwnerRecord
from hostprep.client.scrub import LastUsers, may_scrub_pool
from hostprep.client.sidecar import forget_members, read_sidecar, short_command, write_sidecar
from hostprep.client.untrusted import first_names, is_text, open_file, parse_json, wrong_kind
from hostprep.errors import (
    BadInputError,
    BusyError,
    HostprepError,
    NotReadableError,
    NotReadyError,
)
from hostprep.linux.files import closing_fd, from_os_error, read_limited, remove_file
from hostprep.linux.lock_holders import describe_holder
from hostprep.linux.locks import hold_lock, try_lock
from hostprep.paths import PoolPaths

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager


CLAIM_LOCK_HELD = "ClaimLockHeld"
_LOCK_TIMEOUT_S = 10.0
_BRIEF_TIMEOUT_S = 0.5
_HELD_REMEMBERED_S = 10.0
_ENDING_S = 60.0
"""How long an owner waits for the end of its killed engine's processes, even without --wait: they
let hundreds of GiB go, pinned ones at some 20 to 50 GiB/s."""
_TICKET_DIGITS = 12
_LAST_TICKET = 10**_TICKET_DIGITS - 1
_MOST_TICKETS = 4096
"""Tickets that are looked at: 100 times what the processes of a node leave. Any number may lie
there, and each claim, and each round of the agent, looks through them."""
_MAX_TICKET_BYTES = 256 << 10
_MOST_NAMES = 4096
_PAUSE_FIRST_S = 0.002
_PAUSE_MOST_S = 0.05


def claim(
    paths: PoolPaths,
    request: Request,
    *,
    wait_timeout_s: float = 0.0,
    on_ending: Callable[[frozenset[str]], None] | None = None,
) -> list[Lease]:
    """Take all regions of the request, or none, waiting at most `wait_timeout_s` seconds.

    A pool that is not prepared yet is waited for as well. Waiters hold nothing but their ticket.
    An owner whose bytes are still used by what is left of its killed engine waits up to a minute
    for that in any case: other regions would be empty. `on_ending` is called with those regions,
    once.
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
            if pending.ending and on_ending is not None:
                on_ending(pending.ending)
                on_ending = None
            until_s = max(deadline_s, pending.ending_until_s) if pending.ending else deadline_s
            if time.monotonic() >= until_s:
                raise pending.why()
            time.sleep(min(pause_s, max(0.0, until_s - time.monotonic())))
            pause_s = min(pause_s * 1.5, _PAUSE_MOST_S)
    except BadInputError as error:
        if error.reason != "NoPermission":
            raise
        raise BadInputError(
            error.message, reason=error.reason, remedy=access_remedy(paths)
        ) from error
    finally:
        pending.leave()


def claim_lock(paths: PoolPaths) -> AbstractContextManager[int]:
    """Hold the pool-wide decision lock: for try-locks and small files only.

    Raises BusyError after ten seconds, naming the process that holds it.
    """
    return hold_lock(
        paths.claim_lock,
        timeout_s=_LOCK_TIMEOUT_S,
        busy=lambda: _lock_held(paths, f" for {_LOCK_TIMEOUT_S:.0f} s"),
    )


def claim_lock_briefly(paths: PoolPaths) -> AbstractContextManager[int]:
    """Hold the same lock, for who works at the pools of others as well and must not wait.

    Whoever may claim can hold it for ever. That costs the caller half a second, and for the next
    ten seconds one try each time. Raises BusyError (ClaimLockHeld), naming the process.
    """
    path = paths.claim_lock
    until_s, known = _held.get(path, (0.0, None))
    if known is not None and time.monotonic() < until_s:
        return hold_lock(path, timeout_s=0.0, busy=lambda: known)

    def busy() -> BusyError:
        error = _lock_held(paths)
        _held[path] = time.monotonic() + _HELD_REMEMBERED_S, error
        return error

    return hold_lock(path, timeout_s=_BRIEF_TIMEOUT_S, busy=busy)


_held: dict[str, tuple[float, BusyError]] = {}
"""Claim locks that were found held: until when (monotonic) they are only tried, and the error."""


def _lock_held(paths: PoolPaths, how_long: str = "") -> BusyError:
    return BusyError(
        f"{describe_holder(paths.claim_lock)} has held {paths.claim_lock}{how_long}",
        reason=CLAIM_LOCK_HELD,
        remedy="it should take milliseconds: end that process; `hostprep release --force` does"
        " without the lock",
    )


class _PendingClaim:
    """A claim over its attempts: its ticket, and why it could not be served."""

    def __init__(self, paths: PoolPaths, request: Request) -> None:
        self.paths = paths
        self.request = request
        self.begin_s = time.monotonic()
        self.ticket: Ticket | None = None
        self.problem: HostprepError | None = None
        self.refusals: dict[str, str] = {}
        self.unfit: set[str] = set()
        """Regions that turned out bad once they were locked: they cost only themselves."""
        self.ending: frozenset[str] = frozenset()
        """Its own regions, where it waits for processes of its killed engine to let them go."""
        self.ending_until_s = 0.0
        """Until when it does (monotonic); 0: it did not yet."""

    def attempt(self, *, may_queue: bool) -> list[Lease] | None:
        """Return the leases, or None if they cannot be had now."""
        lease_id = new_lease_id()
        try:
            handoff = read_handoff(self.paths)
            fitting = self.request.candidates(handoff)
            candidates = tuple(region for region in fitting if region.name not in self.unfit)
            last_users = LastUsers(self.paths)
            if may_scrub_pool(self.paths):
                last_users.look_up(region.name for region in candidates)
            with claim_lock(self.paths):
                taken = self._take_in_turn(candidates, lease_id, last_users, may_queue=may_queue)
            self.refusals = taken.refusals
            self.problem = self.problem if self.unfit else None
            return self._finish(handoff, taken, lease_id) if taken.held else None
        except (NotReadyError, BusyError) as error:
            self.problem = error
            return None
        except OSError as error:
            # The pool's group may delete and replace what a claim reads and writes, at any instant.
            self.problem = from_os_error(error, f"claim a region of pool {self.paths.pool}")
            return None

    def _take_in_turn(
        self,
        candidates: tuple[Region, ...],
        lease_id: str,
        last_users: LastUsers,
        *,
        may_queue: bool,
    ) -> Taken:
        names = frozenset(region.name for region in candidates)
        left = left_by_earlier(self.paths, self.ticket, names)
        if len(left) >= self.request.wanted:
            mine = [region for region in candidates if region.name in left]
            may_wait = not self.ending_until_s or time.monotonic() < self.ending_until_s
            taken = take_all(
                self.paths,
                self.request,
                mine,
                lease_id,
                last_users,
                may_wait=may_wait,
                waited_s=time.monotonic() - self.begin_s,
            )
        else:
            taken = Taken(refusals={"queue": "others that came before are waiting"})
        if taken.ending and not self.ending_until_s:
            self.ending_until_s = time.monotonic() + _ENDING_S
        if bool(taken.ending) != bool(self.ending):
            self.leave()  # while it waits for its own regions, others may have the rest
        self.ending = taken.ending
        if not taken.held and (may_queue or taken.ending) and self.ticket is None:
            # Without a place it goes on trying, behind all that have one.
            with contextlib.suppress(NotReadyError):
                wanted = taken.own if taken.ending else names
                self.ticket = draw_ticket(self.paths, wanted, self.request.owner)
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
        if self.refusals and set(self.refusals.values()) == {DIRTY}:
            names = ", ".join(sorted(self.refusals))
            return BusyError(
                f"no region of pool {self.paths.pool} is clean ({names}): each has the bytes of "
                "its last owner, and only root, which sees all processes, may scrub it",
                remedy="where an agent runs, it does so within seconds: give --wait 60; elsewhere "
                "have root repeat its `hostprep prepare`",
            )
        listed = "; ".join(
            f"{name}: {_by_whom(self.paths, name, why)}"
            for name, why in sorted(self.refusals.items())
        )
        wanted, pool = self.request.wanted, self.paths.pool
        what = (
            f"no region of pool {pool} is free"
            if wanted == 1
            else f"pool {pool} has no {wanted} free regions"
        )
        remedy = "wait longer (--wait), or see `hostprep status`"
        if DIRTY in self.refusals.values():
            remedy += "; root's `hostprep prepare` scrubs what is dirty"
        return BusyError(f"{what} ({listed})", remedy=remedy)

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
        begin_s = time.perf_counter()
        try:
            _scrub(lease, owner_record(request, held))
            lease = replace(lease, zeroed_s=time.perf_counter() - begin_s)
        except BaseException:
            lease.retire()
            raise
    return lease


def _scrub(lease: Lease, owner: OwnerRecord | None) -> None:
    from hostprep.client.scrub import scrub_file

    scrub_file(lease.region, lease.fd)
    forget_members(lease.paths, lease.region.name)
    remove_file(lease.paths.warm_report(lease.region.name))
    sidecar = read_sidecar(lease.paths, lease.region.name)
    if owner is not None and sidecar is not None:
        gid = os.fstat(lease.fd).st_gid
        owned = replace(sidecar, owner=owner)
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


def draw_ticket(paths: PoolPaths, candidates: frozenset[str], owner: Owner | None = None) -> Ticket:
    """Take the last place in the queue. The owner's own regions do not give way to it.

    Raises BadInputError without the right to write there, NotReadyError without room, or where
    there is no place behind the last one: numbers start again once the queue is empty, only
    malice gets there.
    """
    number = max((number for number, _ in _numbers(paths)), default=0) + 1
    if number > _LAST_TICKET:
        raise NotReadyError(
            f"the last place of the queue in {paths.tickets} is taken",
            reason="QueueFull",
            remedy="see which process has that file open with `fuser`, and end it",
        )
    while True:
        path = f"{paths.tickets}/{number:0{_TICKET_DIGITS}d}"
        try:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o660)
            break
        except FileExistsError:  # beyond those that are looked at
            number += 1
        except OSError as error:
            raise from_os_error(error, f"wait in {paths.tickets}") from error
    ticket = Ticket(number, path, fd)
    try:
        try_lock(fd, exclusive=True)
        os.fchmod(fd, 0o660)  # despite the umask: the rest of the group must be able to read it
        wanted: list[object] = [*sorted(candidates)]
        if owner is not None:
            record = owner.record()
            wanted.append({"token_sha256": record.token_sha256, "name": record.name})
        os.write(fd, json.dumps(wanted).encode())
    except OSError as error:
        ticket.give_up()  # an empty one would count as a wish for every region
        raise from_os_error(error, f"wait in {paths.tickets}") from error
    return ticket


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
    return bool(waiters(paths))


@dataclass(frozen=True)
class Waiter:
    """A living process that waits, as its ticket names it."""

    regions: frozenset[str] = frozenset()
    """Those that it could use; empty: any."""
    token_sha256: str = ""
    name: str = ""

    def could_take(self, region: str, owner: OwnerRecord) -> bool:
        """Tell whether it would take the region from its owner; never if it is that owner."""
        if (owner.token_sha256, owner.name) == (self.token_sha256, self.name):
            return False
        return not self.regions or region in self.regions


def waiters(paths: PoolPaths) -> list[Waiter]:
    """Return the living processes that wait in this pool, in order of arrival."""
    found = (_waiter(path) for _, path in _numbers(paths))
    return [waiter for waiter in found if waiter is not None]


def _wanted_by(path: str) -> frozenset[str] | None:
    """Return the regions a living waiter can use (empty if unreadable: all); None if it is dead."""
    waiter = _waiter(path)
    return None if waiter is None else waiter.regions


def _waiter(path: str) -> Waiter | None:
    """Return who waits; None if that process is dead. Who cannot be read wants any region."""
    try:
        fd = open_file(path)
    except FileNotFoundError:
        return None
    except NotReadableError:
        if wrong_kind(path) is None:
            return Waiter()  # another user's, who may live
        with contextlib.suppress(OSError):
            (os.rmdir if os.path.isdir(path) else os.unlink)(path)
        return None
    with closing_fd(fd):
        if try_lock(fd, exclusive=True):
            with contextlib.suppress(OSError):
                os.unlink(path)
            return None
        try:
            names = parse_json(read_limited(fd, _MAX_TICKET_BYTES))
        except (HostprepError, OSError):
            return Waiter()
    names = names if isinstance(names, list) else []
    who = names[-1] if names and isinstance(names[-1], dict) else {}
    token, name = who.get("token_sha256"), who.get("name")
    return Waiter(
        frozenset(name for name in names[:_MOST_NAMES] if is_text(name)),
        str(token) if is_text(token) else "",
        str(name) if is_text(name) else "",
    )


def _numbers(paths: PoolPaths) -> list[tuple[int, str]]:
    """Return tickets in order; where there are too many, any of them: the dead ones then go."""
    try:
        names = first_names(paths.tickets, _MOST_TICKETS)
    except OSError:
        return []
    return sorted(
        (int(name), f"{paths.tickets}/{name}")
        for name in names
        if name.isascii() and name.isdigit() and len(name) == _TICKET_DIGITS
    )
