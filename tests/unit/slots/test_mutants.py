"""The checks can fail: a pool with one thing broken does not get through the random play."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from hostprep.slots import Claim, Request, ShortageError, SlotPool, batch, matching
from hostprep.slots.claim import BatchClaim
from hostprep.slots.eviction import EvictionOrder, Ghosts
from hostprep.slots.group import READY, SlotGroup
from hostprep.slots.index import HashIndex, Keys
from tests.unit.slots.play import play_at_random

pytestmark = pytest.mark.unit

Patch = pytest.MonkeyPatch
_SEEDS = 400


def claims_do_not_protect(patch: Patch) -> None:
    patch.setattr(EvictionOrder, "unlink", lambda self, slots: None)


def one_request_after_the_other(patch: Patch) -> None:
    """Count, then take: what a later request matches is evicted by an earlier one."""
    whole = SlotPool.claim_batch

    def claim(self: SlotPool, requests: Sequence[Request], **options: Any) -> BatchClaim:
        if len(requests) < 2 or options["token_budget"] is not None:
            return whole(self, requests, **options)
        claims: list[Any] = []
        before = self._totals
        try:
            for request in requests:
                claims += whole(self, [request]).claims
        except ShortageError:
            for one in claims:
                one.release()
            self._totals = before
            raise
        return BatchClaim(tuple(claims))

    patch.setattr(SlotPool, "claim_batch", claim)


def credit_by_differences(patch: Patch) -> None:
    """The seed's: totals before the batch, so that later requests get earlier ones' blocks."""
    own = Claim.sums
    seen: list[tuple[int, ...]] = []

    def sums(self: Claim) -> tuple[int, ...]:
        before = seen[-1] if seen else (0,) * 12
        seen.append(own(self))
        return (*seen[-1][:2], seen[-1][2] + before[2], *seen[-1][3:])

    patch.setattr(Claim, "sums", sums)


def evictions_go_to_the_last(patch: Patch) -> None:
    patch.setattr("hostprep.slots.batch._TakenSlots.account", lambda self: (self._evicted, []))


def shortage_keeps_its_claims(patch: Patch) -> None:
    patch.setattr(batch, "_give_up", lambda groups, drafts: None)


def shared_blocks_get_two_slots(patch: Patch) -> None:
    patch.setattr("hostprep.slots.batch._fill_or_share", _fill_each)


def _fill_each(group: SlotGroup, part: Any, keys: Keys, given: Any) -> None:
    for number, block in enumerate(part.missing):
        (slot,) = given.take(1)
        group.fill(keys.part(number, number + 1), (slot,))
        part.slots[block] = slot


def unwritten_counts_as_written(patch: Patch) -> None:
    own = SlotGroup.fill

    def fill(self: SlotGroup, keys: Keys, slots: Sequence[int]) -> None:
        own(self, keys, slots)
        self.mark(slots, READY)

    patch.setattr(SlotGroup, "fill", fill)


def first_blocks_go_first(patch: Patch) -> None:
    own = SlotGroup.settle
    patch.setattr(SlotGroup, "settle", lambda self, idle: own(self, idle[::-1]))


def removed_keys_still_match(patch: Patch) -> None:
    own = HashIndex._in_a_row

    def in_a_row(self: HashIndex, keys: Keys, number: int, slot: int) -> int:
        held, self._held = self._held, bytearray(b"\1") * len(self._held)
        try:
            return own(self, keys, number, slot)
        finally:
            self._held = held

    patch.setattr(HashIndex, "_in_a_row", in_a_row)


def a_window_too_short(patch: Patch) -> None:
    real = matching.needed_from

    def needed(group: Any, tokens_per_block: int, blocks: int) -> int:
        return min(blocks, real(group, tokens_per_block, blocks) + 1)

    patch.setattr(matching, "needed_from", needed)


def groups_do_not_agree(patch: Patch) -> None:
    patch.setattr(matching, "_agree", lambda looks, begin, wanted: looks[0].reusable(begin, wanted))


def given_up_is_never_written(patch: Patch) -> None:
    patch.setattr("hostprep.slots.batch._take_abandoned", lambda group, part: None)


def used_again_is_not_noted(patch: Patch) -> None:
    patch.setattr(SlotGroup, "hold", lambda self, first, present: self.order.unlink(first))


def what_comes_back_is_new(patch: Patch) -> None:
    patch.setattr(Ghosts, "returned", lambda self, keys: 0)


def new_contents_keep_the_mark(patch: Patch) -> None:
    own = SlotGroup.fill

    def fill(self: SlotGroup, keys: Keys, slots: Sequence[int]) -> None:
        marks = bytes(self.order.again)
        own(self, keys, slots)
        self.order.again[:] = marks

    patch.setattr(SlotGroup, "fill", fill)


MUTANTS: list[Callable[[Patch], None]] = [
    claims_do_not_protect,
    one_request_after_the_other,
    credit_by_differences,
    evictions_go_to_the_last,
    shortage_keeps_its_claims,
    shared_blocks_get_two_slots,
    unwritten_counts_as_written,
    first_blocks_go_first,
    removed_keys_still_match,
    a_window_too_short,
    groups_do_not_agree,
    given_up_is_never_written,
    used_again_is_not_noted,
    what_comes_back_is_new,
    new_contents_keep_the_mark,
]


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.__name__)
def test_a_broken_pool_is_found(mutant: Callable[[Patch], None], monkeypatch: Patch) -> None:
    mutant(monkeypatch)
    caught = next((seed for seed in range(_SEEDS) if _played(seed) is not None), None)
    assert caught is not None, f"{_SEEDS} plays, and nothing was noticed"


def _played(seed: int) -> BaseException | None:
    try:
        play_at_random(seed)
    except (Exception, pytest.fail.Exception) as error:  # an assertion, or its own state breaks
        return error
    return None
