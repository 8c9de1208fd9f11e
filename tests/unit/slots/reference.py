"""What a pool must do, written for reading: dicts and lists, every question asked from scratch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from hostprep.slots import OUTSIDE, RECURRENT, REUSED, SHARED, STORED, WRITE, Group, Layout, Request


@dataclass
class Block:
    written: bool = False
    has_writer: bool = True
    again: bool = False
    """Another request has used it, or it was evicted and is back."""
    released: int = 0
    """How many blocks had been when it was."""


@dataclass
class GroupModel:
    """One group: its blocks by hash, and those that nobody claims, oldest first."""

    group: Group
    blocks: dict[bytes, Block] = field(default_factory=dict)
    idle: list[bytes] = field(default_factory=list)
    released: int = 0
    evictions: list[int] = field(default_factory=lambda: [0, 0])
    """Of blocks used once, and of those used again."""
    ghosts: dict[bytes, tuple[int, int]] = field(default_factory=dict)
    """Of what was evicted: whether it had been used again, and how many of those had been then."""
    weight_log: float = 3.0

    @property
    def free(self) -> int:
        return self.group.slots - len(self.blocks)

    def ready(self, key: bytes) -> bool:
        return key in self.blocks and self.blocks[key].written

    def release(self, keys: Sequence[bytes]) -> None:
        self.released += len(keys)
        self.idle += keys
        for key in keys:
            self.blocks[key].released = self.released

    def touch(self, keys: Sequence[bytes]) -> None:
        """The first of these newest of all."""
        known = [key for key in dict.fromkeys(keys) if key in self.idle]
        self.idle = [key for key in self.idle if key not in known]
        self.release(known[::-1])

    def in_order(self) -> list[bytes]:
        """What is evicted first first."""
        once = [key for key in self.idle if not self.blocks[key].again]
        again = [key for key in self.idle if self.blocks[key].again]
        order = []
        while once and again:
            order.append((again if self._goes(again[0], once[0]) else once).pop(0))
        return order + once + again

    def _goes(self, again: bytes, once: bytes) -> bool:
        """Whether a block goes that was used again, and not the one that was used once."""
        weight = round(256 * 2**self.weight_log)
        age = self.released - self.blocks[again].released
        return age * 256 > (self.released - self.blocks[once].released) * weight

    def evict(self, count: int) -> list[bytes]:
        gone = self.in_order()[:count]
        for key in gone:
            self.evictions[self.blocks[key].again] += 1
        for key in gone:
            again = self.blocks[key].again
            self.ghosts[key] = again, self.evictions[again]
            self.idle.remove(key)
            del self.blocks[key]
        return gone

    def note_returned(self, stored: Sequence[bytes]) -> None:
        """What was evicted lately counts as used again, and so does all that is in front of it."""
        last = 0
        for number, key in enumerate(stored):
            again, evictions = self.ghosts.pop(key, (0, -99))
            if evictions > self.evictions[again] - max(8, self.group.slots // 10):
                change = min(0.125, 64 / self.group.slots)
                self.weight_log += change if again else -change
                self.weight_log = min(5.0, max(0.0, self.weight_log))
                last = number + 1
        for key in stored[:last]:
            self.blocks[key].again = True


@dataclass(eq=False)
class Held:
    """A claim, as the model knows it: kinds by group and block."""

    request: Request
    kinds: list[list[int]]
    unwritten: list[list[int]]
    evicted: list[list[bytes]] = field(default_factory=list)
    """By group: blocks that made room, booked on it."""

    def keys(self, group: int) -> list[bytes]:
        kinds = self.kinds[group]
        return [k for k, kind in zip(self.request.hashes, kinds, strict=True) if kind != OUTSIDE]


class ReferencePool:
    def __init__(self, layout: Layout, spare: float) -> None:
        self.spare = spare
        self.tokens_per_block = layout.tokens_per_block
        self.groups = [GroupModel(group) for group in layout.groups]
        self.open: list[Held] = []

    def claim_batch(
        self, requests: Sequence[Request], token_budget: int | None
    ) -> list[Held] | None:
        """Claims; None where slots are short."""
        held = []
        left = token_budget
        for request in requests:
            end = self._reusable(request)
            if left is not None:
                left -= self._to_compute(request, end)
                if left < 0:
                    break
            held.append(Held(request, [self._kinds(g, request, end) for g in self.groups], []))
        for index, model in enumerate(self.groups):
            claimed = {key for one in held for key in one.keys(index)}
            idle = [key for key in model.idle if key not in claimed]
            if len(claimed - model.blocks.keys()) > model.free + len(idle):
                return None
        for index in range(len(self.groups)):
            self._take(index, held)
        for one in held:
            one.unwritten = [[i for i, kind in enumerate(k) if kind == WRITE] for k in one.kinds]
        self.open += held
        return held

    def _take(self, index: int, held: list[Held]) -> None:
        model, evicted = self.groups[index], list[bytes]()
        claimed = {key for one in held for key in one.keys(index)}
        model.idle = [key for key in model.idle if key not in claimed]  # first phase
        for key in claimed & model.blocks.keys():
            model.blocks[key].again = True
        lacking = [[key for key in one.keys(index) if key not in model.blocks] for one in held]
        count = len(claimed - model.blocks.keys())
        if count:
            room = count + int(model.group.slots * self.spare) - model.free
            evicted = model.evict(max(0, room))
        for one, missing in zip(held, lacking, strict=True):  # second phase
            new = 0
            for number, key in enumerate(one.request.hashes):
                if one.kinds[index][number] != WRITE:
                    continue
                if key not in model.blocks:
                    model.blocks[key] = Block()
                    new += 1
                elif not model.blocks[key].has_writer:
                    model.blocks[key].has_writer = True
                else:  # an earlier request of the batch writes it
                    one.kinds[index][number] = SHARED
            model.note_returned(missing)
            count -= new
            booked = len(evicted) if new and not count else min(new, len(evicted))
            one.evicted.append(evicted[:booked])
            del evicted[:booked]

    def commit(self, held: Held, blocks: int | None) -> None:
        for index, model in enumerate(self.groups):
            for number in held.unwritten[index]:
                if blocks is None or number < blocks:
                    model.blocks[held.request.hashes[number]].written = True
            held.unwritten[index] = [
                n for n in held.unwritten[index] if blocks is not None and n >= blocks
            ]

    def take_over(self, held: Held) -> int:
        for index, model in enumerate(self.groups):
            for number, key in enumerate(held.request.hashes):
                if held.kinds[index][number] != SHARED:
                    continue
                if model.blocks[key].written:
                    held.kinds[index][number] = STORED
                elif not model.blocks[key].has_writer:
                    model.blocks[key].has_writer = True
                    held.kinds[index][number] = WRITE
                    held.unwritten[index] = sorted([*held.unwritten[index], number])
        return sum(kinds.count(SHARED) for kinds in held.kinds)

    def release(self, held: Held) -> None:
        self.open.remove(held)
        for index, model in enumerate(self.groups):
            for number in held.unwritten[index]:
                model.blocks[held.request.hashes[number]].has_writer = False
            others = {key for one in self.open for key in one.keys(index)}
            idle = [key for key in reversed(held.keys(index)) if key not in others]
            model.release([key for key in idle if model.blocks[key].written])
            for key in idle:
                if not model.blocks[key].written:
                    del model.blocks[key]

    def touch(self, keys: Sequence[bytes], group: int) -> None:
        self.groups[group].touch(keys)

    def forget_unclaimed(self) -> int:
        forgotten = 0
        for model in self.groups:
            forgotten += len(model.idle)
            for key in model.idle:
                del model.blocks[key]
            model.idle = []
        return forgotten

    def _reusable(self, request: Request) -> int:
        begin, first = self._begin(request), request.first_block
        limit = request.reuse_limit_tokens
        tokens = max(0, request.tokens - 1) if limit is None else min(limit, request.tokens)
        most = min(len(request.hashes), tokens // self.tokens_per_block - first)
        for end in range(most, begin, -1):
            if all(
                model.ready(request.hashes[block - first])
                for model in self.groups
                for block in self._needed(model.group, first + end)
                if block - first >= begin
            ):
                return end
        return begin

    def _begin(self, request: Request) -> int:
        whole = request.computed_tokens // self.tokens_per_block - request.first_block
        return min(len(request.hashes), whole)

    def _to_compute(self, request: Request, end: int) -> int:
        behind = (request.first_block + end) * self.tokens_per_block
        return request.tokens - max(request.computed_tokens, behind)

    def _needed(self, group: Group, blocks: int) -> set[int]:
        """The blocks that the next token looks at, token by token."""
        size = self.tokens_per_block
        if group.kind == RECURRENT:
            return {blocks - 1} - {-1}
        window = group.window_tokens or blocks * size + 1
        position = blocks * size
        return {t // size for t in range(max(0, position - window + 1), position)}

    def _stored(self, group: Group, blocks: int, tokens: int) -> set[int]:
        if group.kind == RECURRENT:
            return {(tokens - 1) // self.tokens_per_block - 1}
        if not blocks:
            return set()
        return self._needed(group, blocks - 1) | self._needed(group, blocks) | {blocks - 1}

    def _kinds(self, model: GroupModel, request: Request, end: int) -> list[int]:
        begin, first = self._begin(request), request.first_block
        needed = self._needed(model.group, first + end)
        stored = self._stored(model.group, first + len(request.hashes), request.tokens)
        kinds = []
        for number, key in enumerate(request.hashes):
            known = model.blocks.get(key)
            skipped = begin <= number < end
            if skipped and first + number in needed:
                kinds.append(REUSED)
            elif not request.store or first + number not in stored:
                kinds.append(OUTSIDE)
            elif known is not None and known.written:
                kinds.append(STORED)
            elif skipped:
                kinds.append(OUTSIDE)
            else:
                kinds.append(SHARED if known is not None and known.has_writer else WRITE)
        return kinds
