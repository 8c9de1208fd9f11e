"""An exception from outside, between any two instructions: nothing is left half done.

By a tracer at each third line that runs, or fifth; `LONG=1`: at each instruction.
And by a real signal's handler.
"""

from __future__ import annotations

import os
import random
import signal
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from types import FrameType
from typing import Any

import pytest

from hostprep.slots import ShortageError, SlotPool
from tests.unit.slots.interrupting import (
    SINGLE,
    A,
    B,
    C,
    Interrupter,
    InterruptError,
    Scene,
    interrupted_anywhere,
    mutate,
)
from tests.unit.slots.play import hashes_of

pytestmark = pytest.mark.unit

_LINES = os.environ.get("LONG", "") in {"", "0"}

Step = Callable[[Scene], object]


def claim_batch(scene: Scene) -> object:
    requests = [scene.request(B[:4]), scene.request(C[:7]), scene.request(C[:7])]
    return scene.pool.claim_batch(requests)


def claim_too_much(scene: Scene) -> None:
    with pytest.raises(ShortageError):
        scene.pool.claim_batch([scene.request([name] * 13) for name in (51, 52, 53)])


def claim_blocks(scene: Scene) -> object:
    return scene.pool.claim_blocks([*hashes_of(A), *hashes_of(C[:7]), hashes_of(C)[0]])


def read_blocks(scene: Scene) -> object:
    return scene.pool.claim_blocks(hashes_of(B), store=False)


def commit(scene: Scene) -> None:
    scene.writer.commit()


def take_over(scene: Scene) -> None:
    scene.writer.release()
    scene.pool.take_over(scene.sharer)


def release(scene: Scene) -> None:
    scene.reader.release()


def give_up(scene: Scene) -> None:
    scene.writer.release()


def touch(scene: Scene) -> None:
    scene.pool.touch(hashes_of(B))


def forget(scene: Scene) -> None:
    scene.pool.forget_unclaimed()


STEPS: tuple[Step, ...] = (
    claim_batch,
    claim_too_much,
    commit,
    take_over,
    release,
    give_up,
    touch,
    forget,
)
SCENES: dict[str, Callable[[], Scene]] = {
    "windows": Scene,
    "partial": partial(Scene, SINGLE, partial=True),
    "recorded, table": partial(Scene, SINGLE, recorded=True, has_table=True),
}


@pytest.mark.timeout(7200)  # for LONG=1
@pytest.mark.parametrize("make", SCENES.values(), ids=SCENES)
@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.__name__)
def test_a_step_is_interrupted_at_each_of_its_instructions(
    make: Callable[[], Scene], step: Step
) -> None:
    every = 1 if not _LINES else 3 if make is Scene else 5
    assert interrupted_anywhere(make, step, lines=_LINES, every=every) > 20


@pytest.mark.parametrize("step", [claim_blocks, read_blocks], ids=lambda step: step.__name__)
@pytest.mark.parametrize("has_table", [False, True])
def test_a_claim_of_single_blocks_is_interrupted(step: Step, has_table: bool) -> None:
    make = partial(Scene, SINGLE, has_table=has_table)
    assert interrupted_anywhere(make, step, lines=_LINES) > 20


def test_a_recovery_is_interrupted() -> None:
    """What a dead engine's copies may still be written to is not handed out, then as before."""

    def make() -> Scene:
        return Scene(SINGLE, recorded=True).restarted()

    directory = make().pool._directory
    assert directory is not None
    (kept,) = directory.read()
    assert kept.writing
    assert kept.slots

    def after(scene: Scene) -> None:
        if scene.pool._quarantine is None:
            assert scene.pool.recover() == len(kept.slots)
        assert set(scene.pool.recovered_hashes()) <= set(kept.slots)
        claims = scene.reclaim()
        assert not {slot for claim in claims for slot in claim.uses[0].slots} & set(kept.writing)
        for claim in claims:
            claim.release()
        taken = scene.pool.usage()[0].claimed
        assert taken == len(kept.writing), "in quarantine"
        scene.pool._quarantined_until_s = 0.0
        scene.pool.claim_batch([]).release()

    steps = interrupted_anywhere(
        make, lambda scene: scene.pool.recover(), lines=_LINES, after=after
    )
    assert steps > 50


@pytest.mark.parametrize(
    "step", [claim_batch, commit, take_over, release, touch], ids=lambda step: step.__name__
)
def test_a_step_takes_effect_at_one_instruction(step: Step) -> None:
    assert interrupted_anywhere(Scene, step, lines=False, function=step.__name__) > 20


@pytest.mark.parametrize("step", [claim_batch, commit, give_up], ids=lambda step: step.__name__)
def test_what_puts_it_right_is_interrupted_too(step: Step, monkeypatch: pytest.MonkeyPatch) -> None:
    own, choose = SlotPool._undo, random.Random(1)
    again: list[Interrupter] = []

    def undo(self: SlotPool, *what: Any) -> None:
        while again and self._step is not None:
            again.pop().run(partial(own, self, *what))
        own(self, *what)

    whole = interrupted_anywhere(Scene, step, lines=True, every=1000)
    monkeypatch.setattr(SlotPool, "_undo", undo)
    twice = 0
    for _ in range(150 if _LINES else 10_000):
        again[:] = [Interrupter(choose.randrange(200), lines=True)]
        scene = Scene()
        with pytest.raises(InterruptError) as caught:
            Interrupter(choose.randrange(whole), lines=True).run(partial(step, scene))
        twice += isinstance(caught.value.__context__, InterruptError)
        scene.note_released()
        scene.end()
    assert twice > 20


@pytest.mark.parametrize("step", [claim_batch, commit, release], ids=lambda step: step.__name__)
def test_left_half_done_it_would_be_noticed(step: Step, monkeypatch: pytest.MonkeyPatch) -> None:
    mutate(monkeypatch)
    with pytest.raises((AssertionError, LookupError)):
        interrupted_anywhere(Scene, step, lines=True, every=7 if step is claim_batch else 1)


def test_a_claim_that_the_caller_did_not_get_would_be_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(SlotPool, "_undo", lambda self, _: self.usage())
    with pytest.raises(AssertionError, match="a claim that nobody has"):
        interrupted_anywhere(Scene, claim_batch, lines=False, function="claim_batch")


def test_a_signal_handler_raises_at_random_moments(alarm: None) -> None:
    """As Ctrl-C, or a timeout of the engine's, in the middle of claims."""
    del alarm
    scene, choose = Scene(), random.Random(2)

    def use() -> None:
        batch = scene.pool.claim_batch(requests)
        signal.setitimer(signal.ITIMER_REAL, 0)
        batch.release()

    requests = [scene.request(B[:4]), scene.request(C[:7]), scene.request(C[:7])]
    spent_s = []
    for _ in range(50):
        begin_s = time.perf_counter()
        use()
        spent_s.append(time.perf_counter() - begin_s)
    median_s = statistics.median(spent_s)
    interrupted = 0
    for _ in range(20_000):
        try:
            signal.setitimer(signal.ITIMER_REAL, max(1e-6, choose.uniform(0, 2 * median_s)))
            use()
        except InterruptError:
            interrupted += 1
        assert scene.pool.open_claims() == len(scene.open)
        if interrupted == 400:
            break
    scene.check()
    scene.end()
    assert interrupted > 100


@pytest.fixture
def alarm() -> Iterator[None]:
    """Raise when the timer ends, where that is inside of claim_batch."""

    def interrupt(_: int, frame: FrameType | None) -> None:
        while frame is not None:
            if frame.f_code is SlotPool.claim_batch.__code__:
                raise InterruptError
            frame = frame.f_back

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
