"""Exceptions from outside: a pool whose steps are interrupted anywhere, and what must hold then."""

from __future__ import annotations

import dis
import functools
import sys
from collections.abc import Callable
from functools import partial
from types import CodeType, FrameType
from typing import Any

import pytest

from hostprep.slots import (
    OUTSIDE,
    REUSED,
    STORED,
    Claim,
    Directory,
    Group,
    Layout,
    Request,
    ShortageError,
    SlotPool,
)
from hostprep.slots.group import ABANDONED, MISSING, PENDING, READY, SlotGroup
from hostprep.slots.index import HashIndex
from hostprep.slots.step import Step
from tests.unit.slots.play import HASH_BYTES, TOKENS_PER_BLOCK, request_of

WINDOWS = Layout(
    TOKENS_PER_BLOCK,
    (Group("full", 14, 1), Group("near", 9, 1, 14, window_tokens=5), Group("here", 6, 1, 23, 1)),
)
SINGLE = Layout(TOKENS_PER_BLOCK, (Group("full", 14, 1),))
A, B, C = [1] * 13, [2] * 13, [3] * 13
"""Prompts of four blocks of three tokens, and one token."""
AB = [*A[:6], *B[6:]]
_ENDED_EACH = 7
"""Scenes of which each is played to its end: it takes longest."""


class InterruptError(BaseException):
    """As a signal handler raises it."""


class Interrupter:
    """Raises at one of the instructions (or lines) of the pool's code, counted from 0."""

    def __init__(self, at: int, *, lines: bool = False, function: str = "") -> None:
        """`function`: of that one's own instructions only."""
        self._at = at
        self._function = function
        self._event = "line" if lines else "opcode"
        self.passed = 0

    def run(self, step: Callable[[], object]) -> None:
        """Run a step; what is raised in it, or by it, is raised."""
        before = sys.gettrace()
        sys.settrace(self._enter)
        try:
            step()
        finally:
            sys.settrace(before)

    def _enter(self, frame: FrameType, event: str, arg: object) -> Any:
        del event, arg
        if "/hostprep/slots/" not in frame.f_code.co_filename:
            return None
        if self._function not in {"", frame.f_code.co_name}:
            return self._enter
        frame.f_trace_opcodes = self._event == "opcode"
        return self._pass

    def _pass(self, frame: FrameType, event: str, arg: object) -> Any:
        del arg
        if event == self._event and not self._is_deaf(frame):
            number, self.passed = self.passed, self.passed + 1
            if number == self._at:
                raise InterruptError
        return self._pass

    def _is_deaf(self, frame: FrameType) -> bool:
        """Whether Python runs no signal handler here, where a tracer could raise.

        It does at calls and at jumps back: not between a `with` block and the release of its lock,
        nor between a `try` block and the return behind it.
        """
        if "_lock" not in frame.f_code.co_names:
            return False
        target = _handler_of(frame.f_code, frame.f_lasti)
        if frame.f_locals["self"]._lock.locked():
            return target is None or not _ends_with_block(frame.f_code, target)
        return target is None


@functools.cache
def _handlers(code: CodeType) -> list[Any]:
    entries: Any = dis._parse_exception_table(code)  # type: ignore[attr-defined]
    return list(entries)


def _handler_of(code: CodeType, at: int) -> int | None:
    return next((each.target for each in _handlers(code) if each.start <= at < each.end), None)


@functools.cache
def _ends_with_block(code: CodeType, target: int) -> bool:
    names = [each.opname for each in dis.get_instructions(code) if each.offset >= target]
    return names[1] == "WITH_EXCEPT_START"


class Scene:
    """A pool in use, its open claims, and what its slots hold."""

    def __init__(
        self,
        layout: Layout = WINDOWS,
        *,
        has_table: bool = False,
        partial: bool = False,
        recorded: bool = False,
    ) -> None:
        directory = None
        slots = sum(group.slots for group in layout.groups)
        self.records = memoryview(bytearray(Directory.size_bytes_for(slots, HASH_BYTES)))
        if recorded:
            directory = Directory(self.records, layout, key_bytes=HASH_BYTES)
            directory.reset({"model": "m"})
        self.pool = SlotPool(
            layout, hash_bytes=HASH_BYTES, partial=partial, spare=0.2, directory=directory
        )
        for group in self.pool._groups if has_table else ():
            group.index = HashIndex(group.group.slots, HASH_BYTES)
        self._partial = partial
        self.memory: dict[tuple[int, int], bytes] = {}
        for tokens in (A, B, [8] * 13, [9] * 13, A):
            claim = self.claim(tokens)
            self.write(claim)
            claim.commit()
            claim.release()
        self.reader = self.claim(A, store=False)
        self.writer = self.claim(AB)
        self.sharer = self.claim(AB)
        self.write(self.writer)
        self.open = [self.reader, self.writer, self.sharer]

    def restarted(self) -> Scene:
        """Be the next process's, over the same records: `recover` is the next step."""
        layout = self.pool.layout
        directory = Directory(self.records, layout, key_bytes=HASH_BYTES)
        self.pool = SlotPool(layout, hash_bytes=HASH_BYTES, spare=0.2, directory=directory)
        self.open = []
        return self

    def request(self, tokens: list[int], *, store: bool = True) -> Request:
        request = request_of(tokens, store=store)
        request.token_ids = tokens if self._partial else None
        return request

    def claim(self, tokens: list[int], *, store: bool = True) -> Claim:
        (claim,) = self.pool.claim_batch([self.request(tokens, store=store)]).claims
        return claim

    def write(self, claim: Claim) -> None:
        """Put into the claim's slots what it is to write."""
        for group, unwritten in enumerate(claim.unwritten):
            for block in unwritten:
                slot = claim.uses[group].slots[block]
                self.memory[group, slot] = claim.request.hashes[block]

    def check(self) -> None:
        """Check that what the pool keeps fits together, and that only `open` holds slots."""
        pool = self.pool
        assert pool.open_claims() == len(self.open), "a claim that nobody has is open"
        assert not pool._lock.locked()
        usage = pool.usage()  # puts right what the interruption left
        for index, slots in enumerate(pool._groups):
            held: dict[int, int] = {}
            for claim in self.open:
                use = claim.uses[index]
                for block, slot in enumerate(use.slots):
                    if slot < 0:
                        continue
                    held[slot] = held.get(slot, 0) + 1
                    key = claim.request.hashes[block]
                    assert slots.index.key_of(slot) == key, "a claimed slot has another name"
                    assert slots.index.slot_of(key) == slot
                    if use.kinds[block] in {REUSED, STORED}:
                        assert self.memory[index, slot] == key, "a claimed block was overwritten"
                    if block in claim.unwritten[index]:
                        assert slots.state[slot] == PENDING
                for slot in claim.partial.slots[index : index + 1] if claim.partial else ():
                    held[slot] = held.get(slot, 0) + 1
            refs = dict(enumerate(slots.refs))
            assert {slot: count for slot, count in refs.items() if count} == held, "claims leaked"
            order = _listed(slots)
            assert len(set(order)) == slots.order.count == usage[index].cached
            assert set(slots.order.oldest_first()) == set(order)
            assert not held.keys() & set(order)
            names = dict(slots.index.items())
            assert len(set(names.values())) == len(names)
            for slot, state in enumerate(slots.state):
                assert (slot in names) == (state != MISSING)
                assert (slot in held or slot in order) == (state != MISSING), "a slot is lost"
                assert (state == READY) or slot not in order
                if state == READY:
                    assert self.memory[index, slot] == names[slot], "it holds something else"
                if state == ABANDONED:
                    assert slot in held
            free = slots.free._free
            assert [bool(mark) for mark in free] == [state == MISSING for state in slots.state]
            assert slots.free.count == sum(free) == usage[index].free
            if slots.gapless:
                self._check_gapless(index)
        totals, sums = pool.totals(), [claim.sums() for claim in self.open]
        assert totals.requests >= len(sums)
        parts = totals.reused + totals.stored + totals.shared + totals.written + totals.outside
        assert parts == totals.blocks

    def _check_gapless(self, index: int) -> None:
        """Where a block is missing, none behind it may be there."""
        names = {key for _, key in self.pool._groups[index].index.items()}
        for tokens in (A, B, C, AB):
            there = [key in names for key in request_of(tokens).hashes]
            assert there == sorted(there, reverse=True), "a block behind a missing one"

    def note_released(self) -> None:
        """Note which claims are open: an interrupted release took effect, or it did not."""
        self.open = [claim for claim in self.open if claim in self.pool._open]

    def end(self) -> None:
        """Release everything, and have every slot once: none is lost for good."""
        while self.open:
            self.open.pop().release()
        self.check()
        for claim in self.reclaim():
            self.write(claim)
            claim.commit()
            claim.release()
        self.check()

    def reclaim(self) -> list[Claim]:
        """Claim slots until there are no more: of each group as many as it has."""
        claims = []
        for name in range(100, 200):
            try:
                claims.append(self.claim([name] * 7))
            except ShortageError:
                break
        for index, slots in enumerate(self.pool._groups):
            taken = sum(claim.uses[index].kinds.count(OUTSIDE) for claim in claims)
            assert taken == 0 or slots.group.window_tokens
        lacking = [usage for usage in self.pool.usage() if usage.claimed >= usage.slots - 1]
        assert lacking, "no group is full, and there is a shortage"
        return claims


def _listed(slots: SlotGroup) -> list[int]:
    """Return what the two lists of unclaimed slots link, which may be a ring."""
    listed: list[int] = []
    for end in slots.order._ends:
        slot = slots.order._newer[end]
        while slot != end:
            listed.append(slot)
            assert len(listed) <= slots.group.slots, "a ring"
            assert slots.order._newer[slots.order._older[slot]] == slot
            slot = slots.order._newer[slot]
    return listed


def interrupted_anywhere(
    make: Callable[[], Scene],
    step: Callable[[Scene], object],
    *,
    lines: bool,
    after: Callable[[Scene], None] = Scene.note_released,
    every: int = 1,
    function: str = "",
) -> int:
    """Interrupt a step at each of its instructions (or lines), in a new scene each time.

    Returns how many there were. `after`: before the pool is checked.
    """
    number = 0
    while True:
        scene = make()
        interrupter = Interrupter(number, lines=lines, function=function)
        try:
            interrupter.run(partial(step, scene))
        except InterruptError:
            after(scene)
            scene.check()
            if number % _ENDED_EACH == 0:
                scene.end()
        else:
            assert interrupter.passed <= number, "an interruption was lost"
            return interrupter.passed
        number += every


def mutate(patch: pytest.MonkeyPatch) -> None:
    """Leave half done what was interrupted."""

    def repair(self: SlotPool, step: Step) -> None:
        del step
        self._step = None

    patch.setattr(SlotPool, "_repair", repair)
