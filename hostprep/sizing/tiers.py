"""Dividing memory among groups, so that no one of them runs out before the others do."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hostprep.api.slot_layout import GROUP_ALIGN_BYTES, SLOT_ALIGN_BYTES, round_up
from hostprep.errors import BadInputError
from hostprep.layout import MAX_SLOTS
from hostprep.sizing.floor import min_slots, slots_of_request
from hostprep.sizing.groups import CacheGroup
from hostprep.sizing.limits import Limits
from hostprep.units import format_bytes

__all__ = ["GroupSlots", "Tier", "floor_of", "tier_of_bytes", "tier_of_tokens"]

_STEPS = 256
"""Fractions of a request that are divided: finer than any group's slots matter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupSlots:
    """What one group has in one tier of memory."""

    group: CacheGroup
    min_slots: int
    per_request: int
    """Slots that a usual request holds."""
    slots: int

    @property
    def size_bytes(self) -> int:
        """Bytes of all slots, as they lie in a region."""
        return self.slots * round_up(self.group.slot_bytes, SLOT_ALIGN_BYTES)

    @property
    def requests(self) -> int:
        """Usual requests that it has slots for at once."""
        return self.slots // self.per_request


@dataclass(frozen=True, slots=True, kw_only=True)
class Tier:
    """One kind of memory of one rank: the GPU's or the host's."""

    groups: tuple[GroupSlots, ...]

    @property
    def size_bytes(self) -> int:
        """Bytes that it takes: each group from a page's beginning on."""
        end = 0
        for group in self.groups:
            end = round_up(end, GROUP_ALIGN_BYTES) + group.size_bytes
        return end

    @property
    def limiting(self) -> GroupSlots:
        """The group that is full first with usual requests."""
        return min(self.groups, key=lambda group: group.slots / group.per_request)

    def share(self, group: GroupSlots) -> float:
        """Return a group's part of all bytes."""
        return group.size_bytes / sum(one.size_bytes for one in self.groups)


def floor_of(groups: Sequence[CacheGroup], limits: Limits) -> Tier:
    """Return the fewest slots that serve the limits. See hostprep.sizing.floor.

    Raises BadInputError for more slots than a layout can count.
    """
    return _tier(groups, limits, 0)


def tier_of_bytes(
    groups: Sequence[CacheGroup], limits: Limits, size_bytes: int, *, option: str
) -> Tier:
    """Return what so many bytes hold: the floor, and then as many usual requests as fit.

    Memory beyond what `max_batch_size` requests use keeps the blocks of finished ones, in the
    same proportion. Raises BadInputError, naming the option and what would do, where the floor
    does not fit.
    """
    least = floor_of(groups, limits)
    if least.size_bytes > size_bytes:
        raise _too_little(groups, limits, size_bytes, least.size_bytes, option)
    low, high = 0, 1
    while high < MAX_SLOTS * _STEPS and _fits(groups, limits, high, size_bytes):
        low, high = high, high * 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if _fits(groups, limits, middle, size_bytes) else (low, middle)
    return _tier(groups, limits, low)


def tier_of_tokens(groups: Sequence[CacheGroup], limits: Limits, tokens: int) -> Tier:
    """Return what holds so many tokens of usual requests, and the floor at least."""
    return _tier(groups, limits, -(-tokens * _STEPS // limits.typical))


def _fits(groups: Sequence[CacheGroup], limits: Limits, steps: int, size_bytes: int) -> bool:
    try:
        return _tier(groups, limits, steps).size_bytes <= size_bytes
    except BadInputError:  # more slots than can be counted
        return False


def _tier(groups: Sequence[CacheGroup], limits: Limits, steps: int) -> Tier:
    """Return the floor, or slots for so many 256ths of a usual request where that is more."""
    found = []
    for group in groups:
        least = min_slots(group, limits)
        usual = slots_of_request(group, limits, limits.typical)
        slots = max(least, -(-steps * usual // _STEPS))
        if slots > MAX_SLOTS:
            raise BadInputError(
                f"group {group.name} would have {slots} slots, and {MAX_SLOTS} can be",
                remedy="give fewer tokens or less memory, or more --tokens-per-block",
            )
        found.append(GroupSlots(group=group, min_slots=least, per_request=usual, slots=slots))
    return Tier(groups=tuple(found))


def _too_little(
    groups: Sequence[CacheGroup], limits: Limits, size_bytes: int, least_bytes: int, option: str
) -> BadInputError:
    """Say what would do: more memory, fewer requests at once, or shorter ones."""
    ways = [f"give {option} {-(-least_bytes >> 20)}Mi"]
    batch = _largest(limits.max_batch_size, groups, size_bytes, limits.for_batch)
    length = _largest(limits.max_seq_len, groups, size_bytes, limits.for_length)
    alone = limits.for_batch(1)
    if batch:
        ways.append(f"or --max-batch-size {batch}")
    elif length:
        ways.append(f"or --max-seq-len {length}")
    elif length := _largest(limits.max_seq_len, groups, size_bytes, alone.for_length):
        ways.append(f"or --max-batch-size 1 and --max-seq-len {length}")
    return BadInputError(
        f"{option}: {format_bytes(size_bytes)} a rank is less than the {format_bytes(least_bytes)} "
        "without which requests can wait for ever",
        remedy=" ".join(ways),
    )


def _largest(
    most: int,
    groups: Sequence[CacheGroup],
    size_bytes: int,
    limits_for: Callable[[int], Limits],
) -> int:
    """Return the largest number whose floor fits; 0 where none does."""
    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        if floor_of(groups, limits_for(middle)).size_bytes <= size_bytes:
            low = middle
        else:
            high = middle - 1
    return low
