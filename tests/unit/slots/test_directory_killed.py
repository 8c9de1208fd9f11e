"""Random plays of engines that are killed at any word that they write, and broken ones.

The model is the region's slots: what bytes each really has. After every step what the
records say is compared with that.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from struct import Struct
from typing import Any
from zlib import crc32

import pytest
from hypothesis import given, strategies

from hostprep.slots import Directory, Group, Layout, Request, ShortageError, SlotPool
from tests.unit.slots import test_directory

pytestmark = pytest.mark.unit

_SLOTS = 12
_LAYOUT = Layout(1, (Group("kv", _SLOTS, 1),))
_KEY_BYTES = 8
_WORD_BYTES = 8
"""The least that a copy into memory is cut into: the C library copies words, or whole bytes in
their order. A record's check and its state lie in one word."""
_QUARANTINE_S = 60.0
_Content = tuple[int, int] | None
"""A block's number, and the weights by which it was computed; None: neither one's nor whole."""


class _Play:
    """One region, and the engines that have it one after the other."""

    def __init__(self, seed: int, patch: pytest.MonkeyPatch) -> None:
        self.choose = random.Random(seed)
        self.memory = bytearray(Directory.size_bytes_for(_SLOTS, _KEY_BYTES))
        self.held: dict[int, _Content] = {}
        self.weights = 0
        self.now_s = 0.0
        self.landing: list[tuple[int, _Content]] = []
        """Copies of dead engines that are still under way."""
        self.checks = 0
        patch.setattr("hostprep.slots.pool.time.monotonic", lambda: self.now_s)
        self.start()

    def start(self) -> None:
        """A new engine; now and then one with other weights, or one that is killed at once."""
        self.weights += self.choose.random() < 0.2
        identity = {"weights": str(self.weights)}
        while True:
            self.directory = Directory(memoryview(self.memory), _LAYOUT, key_bytes=_KEY_BYTES)
            if self.directory.identity == identity:
                break
            self._torn(lambda: self.directory.reset(identity))
        self.pool = SlotPool(_LAYOUT, hash_bytes=_KEY_BYTES, spare=0, directory=self.directory)
        self.pool.recover(_QUARANTINE_S)
        self.claims: list[tuple[Any, int]] = []
        """And the weights by which each one's blocks are computed."""

    def kill(self) -> None:
        """Its copies still land, for less than the quarantine lasts."""
        for claim, weights in self.claims:
            for block in claim.unwritten[0]:
                if self.choose.random() < 0.5:
                    content = (_number(claim.request.hashes[block]), weights)
                    self.landing.append((claim.uses[0].slots[block], content))
        self.start()

    def wait(self) -> None:
        """All copies of the dead land, then their slots are handed out again."""
        while self.landing:
            self.land()
        self.now_s += _QUARANTINE_S + 1

    def land(self) -> None:
        """One copy of a dead engine lands."""
        if self.landing:
            slot, content = self.landing.pop(self.choose.randrange(len(self.landing)))
            self.held[slot] = content

    def claim(self) -> None:
        numbers = self.choose.sample(range(30), self.choose.randrange(1, 5))
        hashes = [number.to_bytes(_KEY_BYTES, "big") for number in numbers]
        keep, claims = self.choose.random() < 0.9, []

        def claim_some() -> None:
            if self.choose.random() < 0.5:
                claims.append(self.pool.claim_blocks(hashes, keep=keep))
                return
            request = Request(
                "r",
                1 + len(hashes),
                hashes,
                computed_tokens=1,
                first_block=1,
                reuse_limit_tokens=0,
                keep=keep,
            )
            claims.extend(self.pool.claim_batch([request]).claims)

        try:
            if self._torn(claim_some):
                self.kill()
                return
        except ShortageError:
            return
        (claim,) = claims
        for block in claim.unwritten[0]:  # copies begin
            self.held[claim.uses[0].slots[block]] = None
        self.claims.append((claim, self.weights))

    def commit(self) -> None:
        """Its copies have ended; the kill may come while the records are written."""
        if not self.claims:
            return
        claim, weights = self.choose.choice(self.claims)
        for block in claim.unwritten[0]:
            self.held[claim.uses[0].slots[block]] = (_number(claim.request.hashes[block]), weights)
        if self._torn(claim.commit):
            self.kill()

    def release(self) -> None:
        if self.claims:
            self.claims.pop(self.choose.randrange(len(self.claims)))[0].release()

    def update_weights(self) -> None:
        """As a trainer does: what is being computed is of the old ones, or of both."""
        if self._torn(self.pool.forget_unclaimed):
            self.kill()
            return
        self.weights += 1
        if self._torn(lambda: self.directory.reset({"weights": str(self.weights)})):
            self.kill()

    def _torn(self, step: Callable[[], object]) -> bool:
        """Do it, or a part: the process is killed with any of its words written."""
        before = bytes(self.memory)
        step()
        if self.choose.random() < 0.8:
            return False
        for at in range(0, len(before), _WORD_BYTES):
            if self.choose.random() < 0.5:
                self.memory[at : at + _WORD_BYTES] = before[at : at + _WORD_BYTES]
        return True

    def check(self) -> None:
        """What would be believed now is what is there."""
        found = Directory(memoryview(self.memory), _LAYOUT, key_bytes=_KEY_BYTES)
        (kept,) = found.read()
        for key, slot in kept.slots.items():
            assert found.identity == {"weights": str(self.weights)}
            assert self.held[slot] == (_number(key), self.weights)
            assert slot not in kept.writing
            self.checks += 1


def _number(key: bytes) -> int:
    return int.from_bytes(key, "big")


def _play(seed: int) -> int:
    """Return how many records were believed."""
    with pytest.MonkeyPatch.context() as patch:
        play = _Play(seed, patch)
        steps = (play.claim, play.claim, play.claim, play.commit, play.commit, play.release,
                 play.release, play.land)  # fmt: skip
        for _ in range(60):
            seldom = play.choose.random()
            if seldom < 0.03:
                play.kill()
            elif seldom < 0.05:
                play.wait()
            elif seldom < 0.06:
                play.update_weights()
            else:
                play.choose.choice(steps)()
            play.check()
        return play.checks


@given(strategies.integers(0, 1 << 32))
def test_whatever_is_believed_is_what_the_slots_hold(seed: int) -> None:
    _play(seed)


def test_much_is_believed() -> None:
    assert sum(map(_play, range(20))) > 20 * 50


def validated_before_the_copy(patch: pytest.MonkeyPatch) -> None:
    own = Directory.begin

    def begin(self: Directory, group: int, slots: Sequence[int], generation: int) -> None:
        own(self, group, slots, generation)
        keys = [number.to_bytes(_KEY_BYTES, "big") for number in range(90, 90 + len(slots))]
        self.finish(group, slots, keys, generation)

    patch.setattr(Directory, "begin", begin)


def not_void_before_reuse(patch: pytest.MonkeyPatch) -> None:
    own = Directory.begin

    def begin(self: Directory, group: int, slots: Sequence[int], generation: int) -> None:
        before = bytes(self._records)
        own(self, group, slots, generation)
        self._records[:] = before

    patch.setattr(Directory, "begin", begin)


def generation_not_compared_by_writers(patch: pytest.MonkeyPatch) -> None:
    own = Directory.finish

    def finish(
        self: Directory,
        group: int,
        slots: Sequence[int],
        keys: Sequence[bytes],
        generation: int,
        *rest: Any,
    ) -> None:
        self.begin(group, slots, generation)
        own(self, group, slots, keys, generation, *rest)

    patch.setattr(Directory, "finish", finish)


_HEAD = Struct("<IBBHIIQ")
"""As docs/directory.md has it: check, state, the key's length, flags, epoch, 0, generation."""
_RECORD_BYTES = 64
_VALID = 2


def _reads(patch: pytest.MonkeyPatch, **fields: bool) -> None:
    """Have readers find these fields as they should be, whatever lies there: not compared."""
    own = Directory.read

    def read(self: Directory) -> Any:
        for number in range(_SLOTS):
            _mend(self, number, **fields)
        return own(self)

    patch.setattr(Directory, "read", read)


def _mend(
    found: Directory,
    number: int,
    *,
    check: bool = False,
    epoch: bool = False,
    generation: bool = False,
) -> None:
    at = number * _RECORD_BYTES
    fields = list(_HEAD.unpack_from(found._records, at))
    key = bytes(found._records[at + _HEAD.size : at + _HEAD.size + _KEY_BYTES])
    is_right = fields[0] == _check_of(fields, key, number)
    if fields[1] != _VALID or not (is_right or check):
        return
    if epoch:
        fields[4] = int.from_bytes(found._header[32:36], "little")
    if generation:
        fields[6] = 1
    fields[0] = _check_of(fields, key, number)
    _HEAD.pack_into(found._records, at, *fields)


def _check_of(fields: Sequence[int], key: bytes, number: int) -> int:
    return crc32(key, crc32(_HEAD.pack(*fields)[4:])) ^ number


def torn_records_count(patch: pytest.MonkeyPatch) -> None:
    _reads(patch, check=True)


def epoch_not_compared(patch: pytest.MonkeyPatch) -> None:
    _reads(patch, epoch=True)


def generation_not_compared_by_readers(patch: pytest.MonkeyPatch) -> None:
    _reads(patch, generation=True)


def no_quarantine(patch: pytest.MonkeyPatch) -> None:
    own = Directory.read
    patch.setattr(Directory, "read", lambda self: [replace(one, writing=[]) for one in own(self)])


_Mutant = Callable[[pytest.MonkeyPatch], None]


@pytest.mark.parametrize(
    "mutant",
    [
        validated_before_the_copy,
        not_void_before_reuse,
        torn_records_count,
        no_quarantine,
    ],
)
def test_a_play_finds_what_is_broken(mutant: _Mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    mutant(monkeypatch)
    assert any(_fails(_play, seed) for seed in range(200))


@pytest.mark.parametrize(
    ("mutant", "test"),
    [
        (
            generation_not_compared_by_writers,
            test_directory.test_a_late_writer_records_nothing_in_a_slot_that_another_began,
        ),
        (
            generation_not_compared_by_readers,
            test_directory.test_of_two_records_of_one_key_the_newest_counts,
        ),
        (
            epoch_not_compared,
            test_directory.test_records_that_a_late_writer_left_of_another_epoch_count_for_nothing,
        ),
        (
            no_quarantine,
            test_directory.test_nothing_is_valid_before_its_commit_and_its_slot_is_quarantined,
        ),
    ],
)
def test_a_test_finds_what_is_broken(
    mutant: _Mutant, test: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    mutant(monkeypatch)
    arguments = (monkeypatch,) if test.__code__.co_argcount else ()
    assert _fails(test, *arguments)


def _fails(test: Callable[..., object], *arguments: object) -> bool:
    try:
        test(*arguments)
    except (AssertionError, KeyError):
        return True
    return False
