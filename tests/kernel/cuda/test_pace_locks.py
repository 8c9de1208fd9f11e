"""What an engine keeps of its pace while it registers, by the locks of the stand-in driver.

No figure here is a result: ways to register are compared with each other, in one run.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from hostprep.backing import MIB
from hostprep.cuda.chunks import ChunkPolicy
from hostprep.cuda.pace import Pace
from hostprep.register import Registration
from testbed.standin.children import Scene, in_child
from testbed.standin.decoding import Decoding
from tests.kernel.cuda.parts import LONG_S

pytestmark = [pytest.mark.kernel, pytest.mark.parallel]

_SCALE = 16
"""A call of 4 MiB takes 8 ms, one of 24 MiB 50 ms."""


def _kept(scene: Scene, mib: int, *, tells_steps: bool = True) -> tuple[float, float]:
    """Return the part of the undisturbed pace that decoding has while it registers, and seconds."""
    scene.context()
    policy = ChunkPolicy(first_bytes=24 * MIB, least_bytes=4 * MIB, most_bytes=24 * MIB)
    registration = Registration(scene.attachment(mib), policy=policy)
    told: Callable[[], object] = registration.step if tells_steps else lambda: None
    with Decoding(told) as decoding:
        until_s = time.monotonic() + 1.0
        undisturbed = decoding.pace(lambda: time.monotonic() > until_s)
        registration.start()
        registering = decoding.pace(lambda: registration.wait(0))
    assert registration.state == "Registered"
    kept, took_s = registering / undisturbed, registration.progress.elapsed_s
    print(f"{100 * kept:.0f} % of the pace for {took_s:.1f} s; longest {decoding.longest_s:.3f} s")
    registration.close()
    return kept, took_s


@in_child(locks=1, scale=_SCALE)
def test_a_decode_loop_keeps_most_of_its_pace(scene: Scene) -> None:
    unpaced, _ = _kept(scene, 192, tells_steps=False)
    paced, _ = _kept(scene, 96)
    assert paced > 2 * unpaced


@in_child(locks=1, scale=_SCALE)
def test_without_gaps_it_would_not(scene: Scene) -> None:
    """A test of the test above: calls as short, one after the other."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Pace, "wait", lambda *_: None)
        short, _ = _kept(scene, 192)
    paced, _ = _kept(scene, 96)
    assert paced > 1.5 * short


@in_child(locks=1, scale=_SCALE)
def test_what_fails_is_taken_back_at_that_pace_too(scene: Scene) -> None:
    scene.context()
    policy = ChunkPolicy(first_bytes=4 * MIB, least_bytes=4 * MIB, most_bytes=4 * MIB)
    registration = Registration(
        scene.attachment(64),
        policy=policy,
        on_registered=lambda: 1 / 0,  # the engine's part fails
    )
    with Decoding(registration.step) as decoding:
        registration.start()
        decoding.pace(lambda: registration.progress.done_bytes == 64 * MIB)
        began_s = time.monotonic()
        assert registration.wait(LONG_S)
    assert registration.state == "Failed"
    assert len(scene.unregistered()) == 16
    assert time.monotonic() - began_s > 8 * registration._pace.spacing.period_s
