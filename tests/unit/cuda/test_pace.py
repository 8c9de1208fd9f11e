"""The pace of a registration: how long its calls are, and when the next one may begin."""

from __future__ import annotations

import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hostprep.backing import GIB, MIB
from hostprep.cuda.chunks import ChunkPolicy, next_chunk_bytes
from hostprep.cuda.pace import CALL_S, IDLE_S, LEAST_DUTY_CYCLE, Pace, Spacing
from hostprep.errors import BadInputError

pytestmark = pytest.mark.unit

_TIB = 1024 * GIB
SPACINGS = st.builds(
    Spacing,
    duty_cycle=st.floats(LEAST_DUTY_CYCLE, 1.0),
    call_s=st.sampled_from([0.005, CALL_S, 0.05]),
    phase_s=st.floats(0, 1),
)


class Clock:
    """Time that passes when somebody waits, and then only."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


class Interrupt(threading.Event):
    """An interruption whose waiting is the passing of a clock's time."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self._clock = clock

    def wait(self, timeout: float | None = None) -> bool:
        self._clock.now_s += timeout or 0.0
        return self.is_set()


@given(SPACINGS, st.floats(0, 1e6), st.lists(st.floats(1e-4, 0.25), min_size=1, max_size=40))
def test_calls_take_no_more_than_their_share_of_the_time(
    spacing: Spacing, began_s: float, calls: list[float]
) -> None:
    """But for a call's own length, and the quarter by which one may be longer than it should."""
    at_s = first_s = spacing.next_start_s(began_s, 0.0)
    for took_s in calls:
        at_s = max(at_s + took_s, spacing.next_start_s(at_s, took_s))
    allowed = min(1.0, spacing.duty_cycle * (1 + 0.25) * 1.001)
    long_calls_s = sum(calls)
    assert long_calls_s <= allowed * (at_s - first_s) + spacing.call_s + 1e-6


@given(SPACINGS, st.floats(0, 1e6), st.floats(0, 0.004), st.floats(0, 0.004))
def test_ranks_that_began_a_moment_apart_begin_together_the_next_time(
    spacing: Spacing, place: float, late_s: float, longer_s: float
) -> None:
    """They run in lockstep: stalls at different times would add up."""
    if spacing.period_s < 0.02:
        return
    at_s = spacing.next_start_s(place, 0.0)
    one = spacing.next_start_s(at_s, CALL_S / 2)
    other = spacing.next_start_s(at_s + late_s, CALL_S / 2 - 0.004 + longer_s)
    assert one == pytest.approx(other, abs=1e-6)


def test_without_the_grid_they_would_drift() -> None:
    """A test of the test: gaps that are counted from each rank's own call."""
    spacing = Spacing()
    late_s = 0.003
    assert (1000.0 + spacing.period_s) != pytest.approx(
        1000.0 + late_s + spacing.period_s, abs=1e-6
    )


def test_engines_have_grids_of_their_own() -> None:
    phases = {Pace(name).spacing.phase_s for name in ("a", "b", "c")}
    assert len(phases) == 3
    assert Pace("a").spacing == Pace("a").spacing


@pytest.mark.parametrize("duty_cycle", [0, -1, 1.01, float("nan"), LEAST_DUTY_CYCLE / 2])
def test_what_would_never_end_is_refused(duty_cycle: float) -> None:
    with pytest.raises(BadInputError, match="share of the time") as caught:
        Pace(duty_cycle=duty_cycle)
    assert caught.value.reason == "BadDutyCycle"


def test_before_the_first_step_it_goes_at_full_speed() -> None:
    clock = Clock()
    pace = Pace(now=clock)
    policy = ChunkPolicy(first_bytes=256 * MIB)
    assert pace.chunks(policy, _TIB, 256 * MIB, 0.05) is policy
    pace.wait(clock(), 0.05, Interrupt(clock))
    assert clock() == 1000.0


def test_from_the_first_step_on_calls_are_short_and_have_gaps() -> None:
    clock = Clock()
    pace = Pace(now=clock)
    pace.step()
    policy = ChunkPolicy(first_bytes=256 * MIB)
    serving = pace.chunks(policy, 100 * GIB, 400 * MIB, 0.05)
    first = next_chunk_bytes(serving, offset_bytes=0, end_bytes=100 * GIB)
    assert first == pytest.approx(400 * MIB * CALL_S / 0.05, abs=4096)
    began_s = clock()
    clock.now_s += CALL_S
    pace.wait(began_s, CALL_S, Interrupt(clock))
    assert clock() - began_s == pytest.approx(pace.spacing.period_s, rel=0.51)
    assert clock() - began_s > CALL_S / 0.2


def test_an_idle_engine_costs_no_gaps_and_its_next_step_waits_for_a_short_call() -> None:
    clock = Clock()
    pace = Pace(now=clock)
    pace.step()
    clock.now_s += IDLE_S
    began_s = clock()
    pace.wait(began_s, CALL_S, Interrupt(clock))
    assert clock() == began_s
    policy = pace.chunks(ChunkPolicy(first_bytes=256 * MIB), 100 * GIB, 0, 0.0)
    assert policy.target_s == CALL_S
    pace.step()
    pace.wait(clock(), CALL_S, Interrupt(clock))
    assert clock() > began_s + CALL_S


def test_an_engine_that_becomes_idle_ends_a_long_gap() -> None:
    clock = Clock()
    pace = Pace(now=clock)
    pace.step()
    pace.wait(clock(), 4.0, Interrupt(clock))  # a gap of nearly a minute
    assert clock() <= 1000.0 + 2 * IDLE_S


def test_a_call_that_waited_for_minutes_is_no_reason_to_wait_for_an_hour() -> None:
    """The deadline counts from chunk to chunk."""
    spacing = Spacing()
    assert spacing.next_start_s(1000.0, 150.0) - 1150.0 == pytest.approx(30.0, abs=0.2)


def test_an_interruption_ends_it_at_once() -> None:
    clock = Clock()
    pace = Pace(now=clock)
    pace.step()
    interrupt = Interrupt(clock)
    interrupt.set()
    pace.wait(clock(), 0.5, interrupt)
    assert clock() <= 1000.0 + IDLE_S


@given(st.integers(1, 64 * _TIB), st.floats(1e-4, 1.0))
def test_registrations_stay_countable(size_bytes: int, last_s: float) -> None:
    """Each is an entry that the driver searches for each copy."""
    pace = Pace()
    pace.step()
    policy = pace.chunks(ChunkPolicy(first_bytes=64 * MIB), size_bytes, 64 * MIB, last_s)
    smallest = next_chunk_bytes(
        policy, offset_bytes=0, end_bytes=1 << 60, last_bytes=4096, last_s=1.0
    )
    assert min(smallest, 64 * MIB) * 16_384 >= min(size_bytes, 16_384 * 64 * MIB)
    assert smallest <= 64 * MIB
