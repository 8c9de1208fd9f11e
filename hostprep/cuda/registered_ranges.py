"""What one registration holds registered, and which ranges this process has in hand at all."""

from __future__ import annotations

import os
import threading

from hostprep.cuda.driver import Driver, DriverError
from hostprep.errors import BadInputError, HostprepError

__all__ = ["Pins"]


class Pins:
    """A range of this process's memory, and the chunks of it that are registered.

    While any is, the range's mapping is kept, whatever the attachment and its views do: the
    driver would go on copying to and from pages that are somebody else's by then.
    """

    def __init__(self, name: str, keep: memoryview, address: int, size_bytes: int) -> None:
        self.name = name
        self._keep: memoryview | None = keep
        self.start = address
        self.end = address + size_bytes
        self._chunks: list[int] = []

    @property
    def count(self) -> int:
        """How many chunks are registered."""
        return len(self._chunks)

    def claim(self) -> None:
        """Take the range for ourselves. Raises BadInputError, naming it, if part of it is taken.

        The driver would refuse the second registration of a byte as well, but only at that
        chunk, after having registered all before it.
        """
        with _state.lock:
            for other in _state.live:
                start, end = max(self.start, other.start), min(self.end, other.end)
                if start < end:
                    raise BadInputError(
                        f"{self.name}: [{start:#x}, {end:#x}), {end - start} bytes, belong to "
                        f"another registration of this process ({other.name})",
                        reason="Overlap",
                        remedy="close that one first, or register slices that share no page",
                    )
            _state.live.append(self)

    def register(self, driver: Driver, offset_bytes: int, size_bytes: int, flags: int) -> None:
        """Register one chunk of the range. Raises DriverError."""
        address = self.start + offset_bytes
        # Noted before: Ctrl-C during the call is raised as soon as it has done its work.
        self._chunks.append(address)
        try:
            driver.register(address, size_bytes, flags)
        except HostprepError:
            self._chunks.pop()
            raise

    def undo(self, driver: Driver) -> HostprepError | None:
        """Unregister all chunks, the last one first; return the first error, after all.

        In reverse, as in every roll-back: at any moment what is left is a range without holes
        from its start on. A context that is gone took its registrations with it.
        """
        first_error: DriverError | None = None
        stuck: list[int] = []
        while self._chunks:
            address = self._chunks.pop()
            try:
                driver.unregister(address)
            except DriverError as error:
                if not error.is_gone:
                    stuck.append(address)
                    first_error = first_error or error
        self._chunks = stuck[::-1]
        return first_error

    def forget(self) -> None:
        """Take all chunks as gone: their context is."""
        self._chunks = []

    def release(self) -> None:
        """Let go of the range and its mapping; not while a chunk of it is registered."""
        if self._chunks:
            return
        self._keep = None
        with _state.lock:
            if self in _state.live:
                _state.live.remove(self)


class _State:
    """The ranges in hand. Strong references: what is registered is not forgotten by accident."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.live: list[Pins] = []


_state = _State()
_of_parents: list[_State] = []


def _after_fork() -> None:
    """Begin anew in a forked child: it has registered nothing, and these ranges are not mapped.

    The parent's objects are kept as they are: nothing may be unmapped on their account here.
    """
    global _state  # noqa: PLW0603
    _of_parents.append(_state)
    _state = _State()


os.register_at_fork(after_in_child=_after_fork)
