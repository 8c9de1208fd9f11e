"""Random models, limits and requests for the simulation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hypothesis import strategies as st

from hostprep.sizing.groups import CacheGroup, Limits, min_slots
from tests.unit.sizing.simulation import Job

__all__ = ["Configuration", "configurations"]


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
