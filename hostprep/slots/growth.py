"""Which slots of a region that grows are handed out: each group's first ones, but for holes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from hostprep.errors import BadInputError
from hostprep.layout import Group


@dataclass(frozen=True)
class Usable:
    """By group, in the layout's order. A value: a pool changes from one to the next at once."""

    ends: tuple[int, ...]
    """The first slot that is not handed out yet."""
    holes: tuple[tuple[range, ...], ...]
    """Ascending, apart from each other and below the end: never handed out."""

    @property
    def counts(self) -> tuple[int, ...]:
        """How many slots are handed out."""
        return tuple(end - sum(map(len, gaps)) for end, gaps in zip(self.ends, self.holes))

    def since(self, before: Usable) -> Iterator[Sequence[range]]:
        """Return each group's slots that are handed out now, and were not before."""
        for start, end, gaps in zip(before.ends, self.ends, self.holes):
            runs, at = [], start
            for gap in gaps:
                if gap.stop > start:
                    runs.append(range(at, max(at, gap.start)))
                    at = gap.stop
            yield [*runs, range(at, end)]


def usable_slots(
    groups: Sequence[Group],
    ends: Sequence[int],
    holes: Sequence[Sequence[range]] = (),
    *,
    before: Usable | None = None,
) -> Usable:
    """Return a checked value; holes at or above a group's end are left out until it is there.

    Raises BadInputError for slots that there are not, and for what takes back what was handed out
    `before`, or adds to it below its end.
    """
    gaps = [tuple(gap for gap in each if gap) for each in holes] or [()] * len(groups)
    if len(ends) != len(groups) or len(gaps) != len(groups):
        raise BadInputError(f"{tuple(ends)} slots cannot be usable of {len(groups)} groups")
    for group, end, each in zip(groups, ends, gaps):
        edges = [0, *(edge for gap in each for edge in (gap.start, gap.stop))]
        if not 0 <= end <= group.slots or any(a > b for a, b in zip(edges, edges[1:])):
            raise BadInputError(
                f"{end} slots but for {each} cannot be usable of the {group.slots} of {group.name}"
            )
    cut = [
        tuple(range(gap.start, min(gap.stop, end)) for gap in each if gap.start < end)
        for end, each in zip(ends, gaps)
    ]
    usable = Usable(tuple(ends), tuple(cut))
    if before is not None:
        _check_grows(before, usable)
    return usable


def _check_grows(before: Usable, now: Usable) -> None:
    for end, then, gaps, those in zip(now.ends, before.ends, now.holes, before.holes):
        below = tuple(range(g.start, min(g.stop, then)) for g in gaps if g.start < then)
        if end < then or below != those:
            raise BadInputError(
                f"{now.ends} slots but for {now.holes} are usable, and {before.ends} but for "
                f"{before.holes} were: claims hold those"
            )
