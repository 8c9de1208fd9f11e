"""A model of a scheduler over KV slots, and random configurations for it."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import Enum

from hypothesis import strategies as st

from hostprep.sizing.groups import CacheGroup, Limits, min_slots, window_blocks


class Policy(Enum):
    """What a scheduler does about memory."""

    RESERVE = "reserve to completion"
    OPTIMISTIC = "optimistic, with preemption"


@dataclass(frozen=True, slots=True)
class Job:
    """What one request asks for."""

    prompt_tokens: int
    output_tokens: int
    arrival_step: int = 0


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of the requests."""

    deadlocked: bool
    steps: int
    output_tokens: int
    computed_tokens: int
    """More than prompts and answers together where requests had to begin anew."""
    preemptions: int
    most_at_once: int

    @property
    def throughput(self) -> float:
        """Answered tokens a step."""
        return self.output_tokens / max(1, self.steps)


@dataclass(slots=True)
class _Request:
    job: Job
    to_prefill: int
    """Tokens to be computed before the next one is answered: after a preemption the answer too."""
    answered: int = 0
    done: int = 0
    """Tokens whose keys and values are there."""

    @property
    def decoding(self) -> bool:
        return self.done >= self.to_prefill

    @property
    def left(self) -> int:
        return self.job.output_tokens - self.answered


@dataclass(slots=True)
class _Machine:
    groups: Sequence[CacheGroup]
    slots: Sequence[int]
    limits: Limits
    policy: Policy
    waiting: deque[_Request]
    running: list[_Request] = field(default_factory=list)
    step: int = 0
    output_tokens: int = 0
    computed_tokens: int = 0
    preemptions: int = 0
    most_at_once: int = 0

    def run(self) -> bool:
        """Go on until all is answered. Returns False where nothing can move any more."""
        while self.waiting or self.running:
            self._admit()
            if not self.running:
                if self.waiting[0].job.arrival_step <= self.step:
                    return False
                self.step = self.waiting[0].job.arrival_step
                continue
            if not self._advance():
                return False
        return True

    def _admit(self) -> None:
        budget = self.limits.max_num_tokens - self._decode_tokens()
        budget -= sum(r.to_prefill - r.done for r in self.running if not r.decoding)
        while self.waiting and len(self.running) < self.limits.max_batch_size and budget > 0:
            request = self.waiting[0]
            if request.job.arrival_step > self.step or not self._lets_in(request, budget):
                return
            self.running.append(self.waiting.popleft())
            budget -= request.to_prefill
            self.most_at_once = max(self.most_at_once, len(self.running))

    def _lets_in(self, request: _Request, budget: int) -> bool:
        if self.policy is Policy.RESERVE:
            taken = [self._reserved(other) for other in self.running]
            wanted = self._reserved(request)
        else:
            # What the others are about to take in this step is not free either.
            taken = [self._needed(r, self._tokens_of(r, budget)) for r in self.running]
            wanted = self._needed(request, min(request.to_prefill, budget))
        return all(
            sum(one[index] for one in taken) + wanted[index] <= self.slots[index]
            for index in range(len(self.groups))
        )

    def _reserved(self, request: _Request) -> list[int]:
        """Return the most slots that a request will hold at any time, of each group."""
        job, limits = request.job, self.limits
        chunk = max(1 + limits.speculative_tokens, min(job.prompt_tokens, limits.max_num_tokens))
        total = job.prompt_tokens + job.output_tokens + limits.speculative_tokens
        whole = -(-total // limits.tokens_per_block)
        return [
            1
            if group.per_sequence
            else whole
            if group.window is None
            else min(whole, window_blocks(group.window, limits.tokens_per_block, chunk))
            for group in self.groups
        ]

    def _needed(self, request: _Request, tokens: int) -> list[int]:
        """Return the slots that a request holds while so many tokens more are computed."""
        block = self.limits.tokens_per_block
        end = -(-(request.done + tokens) // block)
        return [
            1
            if group.per_sequence
            else end
            if group.window is None
            else end - max(0, request.done - group.window + 1) // block
            for group in self.groups
        ]

    def _decode_tokens(self) -> int:
        return sum(1 + self.limits.speculative_tokens for r in self.running if r.decoding)

    def _tokens_of(self, request: _Request, budget: int) -> int:
        if request.decoding:
            return 1 + self.limits.speculative_tokens
        return min(request.to_prefill - request.done, max(0, budget))

    def _advance(self) -> bool:
        """Compute a step, or as many as are alike. Returns False where none can be."""
        budget = self.limits.max_num_tokens - self._decode_tokens()
        held = [self._needed(request, 0) for request in self.running]
        used = [sum(column) for column in zip(*held, strict=True)]
        planned: list[tuple[_Request, int]] = []
        while len(planned) < len(self.running):
            request = self.running[len(planned)]
            tokens = self._tokens_of(request, budget)
            if not self._make_room(request, tokens, len(planned), used):
                return False
            if len(planned) < len(self.running):  # else it gave way itself
                planned.append((request, tokens))
                budget -= 0 if request.decoding else tokens
        steps = self._alike([request for request, _ in planned])
        for request, tokens in planned:
            self._compute(request, tokens, steps)
        self.step += steps
        self.running = [request for request in self.running if request.left > 0]
        return True

    def _make_room(self, request: _Request, tokens: int, index: int, used: list[int]) -> bool:
        """Preempt those that came last until the request has its slots; in the end itself.

        Returns False where it is the only one, and still lacks some.
        """
        more = zip(self._needed(request, tokens), self._needed(request, 0), strict=True)
        wanted = [after - before for after, before in more]
        while any(n + m > most for n, m, most in zip(used, wanted, self.slots, strict=True)):
            if len(self.running) == 1:
                return False
            victim = self.running[-1]
            for group, slots in enumerate(self._needed(victim, 0)):
                used[group] -= slots
            self._preempt(victim)
            if len(self.running) == index:
                return True
        for group, slots in enumerate(wanted):
            used[group] += slots
        return True

    def _preempt(self, request: _Request) -> None:
        self.running.pop()
        self.preemptions += 1
        request.to_prefill = request.job.prompt_tokens + request.answered
        request.done = 0
        self.waiting.appendleft(request)

    def _alike(self, planned: Sequence[_Request]) -> int:
        """Return for how many steps every request decodes without another block or an end."""
        if not planned or any(not request.decoding for request in planned):
            return 1
        block, drafts = self.limits.tokens_per_block, self.limits.speculative_tokens
        steps = min(
            min(request.left, 1 + -(request.done + 1 + drafts) % block) for request in planned
        )
        arrivals = [r.job.arrival_step - self.step for r in list(self.waiting)[:1]]
        return max(1, min([steps, *(gap for gap in arrivals if gap > 0)]))

    def _compute(self, request: _Request, tokens: int, steps: int) -> None:
        if not request.decoding:
            request.done += tokens
            self.computed_tokens += tokens
            if not request.decoding:
                return
            steps = 1  # the prompt's last token answers the first one
        else:
            request.done += steps
            self.computed_tokens += steps
        request.answered += steps
        self.output_tokens += steps


def simulate(
    groups: Sequence[CacheGroup],
    slots: Sequence[int],
    limits: Limits,
    jobs: Sequence[Job],
    policy: Policy,
) -> Outcome:
    """Return what becomes of the jobs with so many slots in each group. One beam a request."""
    limits = replace(limits, beam_width=1)
    waiting = deque(
        _Request(job, job.prompt_tokens) for job in sorted(jobs, key=lambda job: job.arrival_step)
    )
    machine = _Machine(groups, slots, limits, policy, waiting)
    finished = machine.run()
    return Outcome(
        deadlocked=not finished,
        steps=machine.step,
        output_tokens=machine.output_tokens,
        computed_tokens=machine.computed_tokens,
        preemptions=machine.preemptions,
        most_at_once=machine.most_at_once,
    )


@dataclass(frozen=True, slots=True)
class Configuration:
    """Groups, limits and requests within them."""

    groups: tuple[CacheGroup, ...]
    limits: Limits
    jobs: tuple[Job, ...]

    @property
    def floor(self) -> Sequence[int]:
        """The fewest slots, as we compute them."""
        return tuple(min_slots(group, self.limits) for group in self.groups)


@st.composite
def configurations(draw: st.DrawFn) -> Configuration:
    """One group or several, windows below and above a block, chunks below and above both."""
    longest = draw(st.integers(2, 400))
    windows = draw(st.lists(st.integers(1, 200), max_size=3, unique=True))
    groups = [CacheGroup(name=f"window-{w}", slot_bytes=1, window=w) for w in windows]
    if draw(st.booleans()) or not groups:
        groups.append(CacheGroup(name="full", slot_bytes=1))
    if draw(st.booleans()):
        groups.append(CacheGroup(name="state", slot_bytes=1, per_sequence=True))
    batch = draw(st.integers(1, 12))
    drafts = draw(st.integers(0, 3))
    limits = Limits(
        max_batch_size=batch,
        max_seq_len=longest,
        tokens_per_block=draw(st.integers(1, 48)),
        # Every request of a full batch gets its token in every step.
        max_num_tokens=draw(st.integers(batch * (1 + drafts), 300)),
        speculative_tokens=drafts,
    )
    jobs = draw(st.lists(_jobs(longest), min_size=1, max_size=24))
    return Configuration(tuple(groups), limits, tuple(jobs))


@st.composite
def _jobs(draw: st.DrawFn, longest: int) -> Job:
    prompt = draw(st.integers(1, longest - 1))
    output = draw(st.integers(1, longest - prompt))
    return Job(prompt, output, draw(st.integers(0, 200)))
