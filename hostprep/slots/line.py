"""A line of claims that wait for slots: who came first is served first, however much it needs.

Without one, a large claim beside small ones starves: whatever is released, a small one takes. Here
a claim that was refused for want of slots has those that it needs reserved, as they are released,
from all that came after it. Nothing runs in the background: whoever releases slots wakes those for
whom there is room now.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress

from hostprep.errors import BadInputError, BusyError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import TracebackType
    from typing import Protocol

    class _Pool(Protocol):
        def leave_line(self, ticket: Ticket) -> None: ...
        def quarantine_left_s(self) -> float: ...


MOST_WAITING = 1024
"""Places in a line: each claim adds up what those before it need, with the pool's lock held."""


class Ticket:
    """A place in a pool's line, for one claim: its success gives the place up, as `leave` does.

    So does the end of the ticket itself: one that nobody has any more holds nobody up. One thread
    at a time uses it.
    """

    __slots__ = (
        "__weakref__", "_notify", "_pool", "_woken", "is_early", "is_hopeless", "needs", "number",
    )  # fmt: skip

    def __init__(self, pool: _Pool, number: int) -> None:
        """Made by `SlotPool.line_up`."""
        self._pool = pool
        self.number = number
        self.needs: Sequence[int] = ()
        """By group: slots that it was refused for; empty while it was not, and nothing is
        reserved for it."""
        self.is_hopeless = False
        """It was refused for more slots than there are."""
        self.is_early = False
        """It was refused for more slots than are usable by now: nothing is reserved for it."""
        self._woken = threading.Lock()
        """Free when somebody woke it. No Event: the end of another ticket wakes it too, which may
        come between any two instructions, those of Event.set included."""
        self._woken.acquire()
        self._notify: Callable[[], object] | None = None

    def wait(self, timeout_s: float) -> bool:
        """Sleep until there may be room for what it was refused; False: the time is over.

        Then claim again: it may be refused again. Returns at once before the first try (True), and
        where it was refused for more slots than there are (False).
        """
        if not self.needs:
            return not self.is_hopeless
        # Nobody wakes it when slots come back from quarantine: the next claim takes them back.
        quarantine_s = self._pool.quarantine_left_s()
        asleep_s = min(max(0.0, timeout_s), quarantine_s, threading.TIMEOUT_MAX)
        return self._woken.acquire(timeout=asleep_s) or quarantine_s <= timeout_s

    async def wait_async(self, timeout_s: float) -> bool:
        """Wait as `wait` does, in an event loop."""
        import asyncio

        if not self.needs:
            return not self.is_hopeless
        quarantine_s = self._pool.quarantine_left_s()
        loop, woken = asyncio.get_running_loop(), asyncio.Event()
        self._notify = lambda: loop.call_soon_threadsafe(woken.set)
        try:
            if not self._woken.acquire(blocking=False):
                await asyncio.wait_for(woken.wait(), min(timeout_s, quarantine_s))
                self._woken.acquire(blocking=False)
        except asyncio.TimeoutError:
            return quarantine_s <= timeout_s
        finally:
            self._notify = None
        return True

    def wake(self) -> None:
        """End its sleep, or the next one at once."""
        if self._woken.locked():
            with suppress(RuntimeError):  # by another at the same moment
                self._woken.release()
        notify = self._notify
        if notify is not None:
            with suppress(RuntimeError):  # the event loop has ended
                notify()

    def leave(self) -> None:
        """Give the place up, if it has it still."""
        self._pool.leave_line(self)

    def __enter__(self) -> Ticket:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        where: TracebackType | None,
    ) -> None:
        self.leave()


class Line:
    """The tickets of one pool, in order of arrival. The pool holds its lock."""

    def __init__(self) -> None:
        self.tickets: dict[int, weakref.ref[Ticket]] = {}
        """By number; empty where nobody waits, as mostly."""
        self._last = 0

    def join(self, pool: _Pool) -> Ticket:
        """Return a place behind all others. Raises BusyError where there are too many."""
        if len(self.tickets) >= MOST_WAITING:
            raise BusyError(
                f"{MOST_WAITING} claims wait in line",
                reason="LineFull",
                remedy="leave the line with what is no longer wanted, or enlarge the pool",
            )
        self._last += 1
        ticket = Ticket(pool, self._last)
        self.put(ticket)
        return ticket

    def put(self, ticket: Ticket, needs: Sequence[int] = ()) -> None:
        """Have it in its place, if it is not there, with what is reserved for it."""
        number = ticket.number
        ticket.needs = needs
        if number not in self.tickets:
            self.tickets[number] = weakref.ref(ticket, lambda _: self._drop(number))
            if number < self._last:
                self.tickets = dict(sorted(self.tickets.items()))

    def _drop(self, number: int) -> None:
        """Forget a ticket that nobody has. Called between any two instructions, with no lock."""
        self.tickets.pop(number, None)
        for other, ref in list(self.tickets.items()):
            ticket = ref() if other > number else None
            if ticket is not None and ticket.needs:
                ticket.wake()

    def note_refused(
        self, ticket: Ticket, needs: Sequence[int], slots: Sequence[int], usable: Sequence[int]
    ) -> bool:
        """Reserve what a ticket was refused: by group, what it needs, all slots and those in use.

        Nothing is reserved for what has no room yet, however many others end: `wake_all` once there
        is more. Returns whether less is reserved for it now than before: others may have room.
        """
        before = () if ticket.is_early else ticket.needs
        ticket.is_hopeless = any(need > most for need, most in zip(needs, slots))
        ticket.is_early = any(need > now for need, now in zip(needs, usable))
        ticket.needs = () if ticket.is_hopeless else needs
        after = () if ticket.is_early else ticket.needs
        return any(was > now for was, now in zip(before, after or [0] * len(before)))

    def leave(self, ticket: Ticket) -> None:
        """Take a ticket out."""
        self.tickets.pop(ticket.number, None)
        ticket.needs = ()
        ticket.wake()

    def check(self, ticket: Ticket) -> None:
        """Raise BadInputError for a ticket that is not in this line."""
        if not isinstance(ticket, Ticket):
            raise BadInputError(f"ticket is {ticket!r}: line_up() gives one")
        known = self.tickets.get(ticket.number)
        if known is None or known() is not ticket:
            raise BadInputError(
                f"ticket {ticket.number} is not in this pool's line",
                reason="TicketUsed",
                remedy="a ticket serves one claim: line_up() gives the next one",
            )

    def reserved(self, groups: int, ticket: Ticket | None) -> list[int]:
        """Return by group what those need that came before; without a ticket, all in the line."""
        total = [0] * groups
        for other in self._in_order():
            if other is ticket:
                break
            for group, needed in enumerate(() if other.is_early else other.needs):
                total[group] += needed
        return total

    def wake_all(self) -> None:
        """Wake every ticket: there are more slots than before."""
        for ticket in self._in_order():
            ticket.wake()

    def wake(self, available: Sequence[int]) -> None:
        """Wake those for whom there is room: by group, so many slots are not claimed."""
        left = list(available)
        for ticket in self._in_order():
            if max(left) <= 0:
                return  # nothing for anybody behind
            needs = ticket.needs
            if not needs or ticket.is_early:
                continue  # it does not wait, or not for what others release
            left = [have - need for have, need in zip(left, needs)]
            if all(have >= 0 for have, need in zip(left, needs) if need):
                ticket.wake()

    def _in_order(self) -> Iterator[Ticket]:
        found = (ref() for ref in list(self.tickets.values()))
        return (ticket for ticket in found if ticket is not None)
