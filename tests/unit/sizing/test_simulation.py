"""With the old sizing the scheduler comes to a standstill, with ours it never does."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from hypothesis import Phase, find, given, settings

from hostprep.sizing.groups import CacheGroup, Limits, min_slots, window_blocks
from testbed.scheduler_model import Configuration, Job, Policy, configurations, simulate
from tests.unit.sizing.test_floor import SEED, SEED_LIMITS, floor

pytestmark = pytest.mark.unit

BOTH = pytest.mark.parametrize("policy", list(Policy))
PLENTY = (1 << 40,) * 3


def answers_only() -> list[Job]:
    """Requests that decode and do nothing else: what the seed is about."""
    chance = random.Random(15401)
    return [Job(1, chance.randint(300, 1500)) for _ in range(128)]


def prompts_and_answers() -> list[Job]:
    chance = random.Random(15401)
    return [Job(chance.randint(256, 1536), chance.randint(64, 512)) for _ in range(128)]


@BOTH
def test_the_old_sizing_comes_to_a_standstill_in_the_seeds_case(policy: Policy) -> None:
    outcome = simulate(SEED, (1, 539, 1), SEED_LIMITS, answers_only(), policy)
    assert outcome.deadlocked
    # It answers until the first window lies across two blocks: one request, one block long.
    assert outcome.output_tokens == (256 if policy is Policy.OPTIMISTIC else 0)


@BOTH
def test_what_was_merged_goes_on_with_one_request_at_a_time(policy: Policy) -> None:
    outcome = simulate(SEED, (2, 539, 2), SEED_LIMITS, answers_only(), policy)
    assert not outcome.deadlocked
    assert outcome.most_at_once <= 2
    # As merged it has no place for a prompt's chunk that is longer than its slots.
    assert simulate(SEED, (2, 539, 2), SEED_LIMITS, prompts_and_answers(), policy).deadlocked


@BOTH
def test_the_seeds_proposal_goes_on_with_fewer_than_it_was_made_for(policy: Policy) -> None:
    outcome = simulate(SEED, (64, 539, 64), SEED_LIMITS, answers_only(), policy)
    assert not outcome.deadlocked
    if policy is Policy.RESERVE:
        assert outcome.most_at_once == 32
    else:
        assert outcome.preemptions > 0


@BOTH
def test_ours_serves_the_whole_batch_and_loses_nothing_while_decoding(policy: Policy) -> None:
    ours = simulate(SEED, floor(SEED_LIMITS), SEED_LIMITS, answers_only(), policy)
    assert not ours.deadlocked
    assert (ours.most_at_once, ours.preemptions) == (64, 0)
    plenty = simulate(SEED, PLENTY, SEED_LIMITS, answers_only(), policy)
    assert ours.throughput == plenty.throughput


@BOTH
def test_throughput_lost_at_the_floor_is_what_reserving_loses(policy: Policy) -> None:
    jobs = prompts_and_answers()
    ours = simulate(SEED, floor(SEED_LIMITS), SEED_LIMITS, jobs, policy)
    plenty = simulate(SEED, PLENTY, SEED_LIMITS, jobs, policy)
    seeds = simulate(SEED, (64, 539, 64), SEED_LIMITS, jobs, policy)
    lost = 1 - ours.throughput / plenty.throughput
    assert not ours.deadlocked
    assert seeds.throughput < ours.throughput <= plenty.throughput
    # Who reserves a whole chunk for each request lets fewer in; who preempts loses nothing here.
    assert lost == 0 if policy is Policy.OPTIMISTIC else 0 < lost < 0.6


@BOTH
@given(configuration=configurations())
def test_ours_never_comes_to_a_standstill(policy: Policy, configuration: Configuration) -> None:
    """Here in short; `python -m benchmarks.sizing` tries 10,000."""
    groups, limits, jobs = configuration.groups, configuration.limits, configuration.jobs
    outcome = simulate(groups, configuration.floor, limits, jobs, policy)
    assert not outcome.deadlocked
    assert outcome.output_tokens == sum(job.output_tokens for job in jobs)


@given(configuration=configurations())
def test_everybody_decodes_at_once_without_preemption(configuration: Configuration) -> None:
    """With the floor, windows and states alone never make a request give way."""
    groups = tuple(group for group in configuration.groups if group.window or group.per_sequence)
    limits = configuration.limits
    slots = [
        slots
        for group, slots in zip(configuration.groups, configuration.floor, strict=True)
        if group in groups
    ]
    outcome = simulate(groups, slots, limits, configuration.jobs, Policy.OPTIMISTIC)
    assert outcome.preemptions == 0


def test_the_model_can_come_to_a_standstill_by_one_slot() -> None:
    """What keeps ours going is the floor and not the model's good nature."""
    limits = Limits(max_batch_size=4, max_seq_len=64, tokens_per_block=8, max_num_tokens=64)
    group = (CacheGroup(name="full", slot_bytes=1),)
    longest = [Job(32, 32)]
    for policy in Policy:
        assert not simulate(group, (8,), limits, longest, policy).deadlocked
        assert simulate(group, (7,), limits, longest, policy).deadlocked


def less_by_one(group: CacheGroup, limits: Limits) -> int:
    return max(1, min_slots(group, limits) - 1)


def merged(group: CacheGroup, limits: Limits) -> int:
    if group.window is None:
        return min_slots(group, limits)
    return window_blocks(group.window, limits.tokens_per_block)


def proposed(group: CacheGroup, limits: Limits) -> int:
    return min_slots(group, limits) if group.window is None else limits.max_batch_size


@BOTH
@pytest.mark.parametrize("slots_of", [less_by_one, merged, proposed])
def test_with_any_other_floor_something_comes_to_a_standstill(
    policy: Policy, slots_of: Callable[[CacheGroup, Limits], int]
) -> None:
    def stands_still(configuration: Configuration) -> bool:
        groups, limits = configuration.groups, configuration.limits
        slots = [slots_of(group, limits) for group in groups]
        return simulate(groups, slots, limits, configuration.jobs, policy).deadlocked

    quick = settings(max_examples=2000, phases=[Phase.generate], deadline=None, database=None)
    assert stands_still(find(configurations(), stands_still, settings=quick))


def test_a_request_that_gave_way_computes_its_answer_again() -> None:
    limits = Limits(max_batch_size=2, max_seq_len=64, tokens_per_block=8, max_num_tokens=64)
    group = (CacheGroup(name="full", slot_bytes=1),)
    outcome = simulate(group, (8,), limits, [Job(8, 40), Job(8, 40)], Policy.OPTIMISTIC)
    assert not outcome.deadlocked
    assert outcome.preemptions > 0
    assert outcome.output_tokens == 80
    assert outcome.computed_tokens > 16 + 80
