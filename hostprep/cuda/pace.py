"""How fast a registration goes: at full speed before the engine serves, in short calls after that.

During a call to the driver the engine's own threads wait as well: for the driver's lock, and for
this process's mmap_lock, which pinning holds (vLLM issue 51414 saw a stall of 2.0 s). So while the
engine works, calls are short and gaps are long; both follow from the share of the time that calls
may take. Gaps are on a grid of the machine's clock that all ranks of an engine have in common: they
run in lockstep, and stalls that come at different times would add up.
"""

from __future__ import annotations

import math
import time
import zlib
from dataclasses import dataclass, replace

from hostprep.backing import MIB
from hostprep.errors import BadInputError

TYPE_CHECKING = False
if TYPE_CHECKING:
    import threading
    from collections.abc import Callable

    from hostprep.cuda.chunks import ChunkPolicy

DUTY_CYCLE = 0.08
"""Leaves a decode loop nine tenths of its pace or more, by the locks of the stand-in driver
(tests/kernel/cuda/test_pace_locks.py); at 8 GB/s 1 TiB takes half an hour."""
LEAST_DUTY_CYCLE = 0.01
"""1 TiB within a night."""
CALL_S = 0.008
"""How long one call should last while the engine serves."""
IDLE_S = 1.0
"""For how long no step has begun where the engine is idle: a step with a long prompt takes tenths
of a second, and is told only when it begins."""
_LEAST_CHUNK_BYTES = 4 * MIB
_MOST_CHUNKS = 16_384
"""Of one registration while serving: each is an entry that the driver searches for each copy."""
_MOST_GAP_S = 30.0
"""After a call of some seconds: it waited for somebody else, and the next one need not."""
_ROUNDED_UP = 0.75
"""A call that lasted a quarter longer than it should have still leaves the next one its place on
the grid: else every second place would go unused."""


@dataclass(frozen=True)
class Spacing:
    """When the next call may begin; pure. `duty_cycle`: the share of the time that calls take."""

    duty_cycle: float = DUTY_CYCLE
    call_s: float = CALL_S
    phase_s: float = 0.0
    """Where the engine's grid begins."""

    def __post_init__(self) -> None:
        """Refuse what would never end. Raises BadInputError."""
        if not LEAST_DUTY_CYCLE <= self.duty_cycle <= 1:
            raise BadInputError(
                f"a duty cycle of {self.duty_cycle:g} cannot be",
                reason="BadDutyCycle",
                remedy=f"give the share of the time that registering may take while the engine "
                f"works: {LEAST_DUTY_CYCLE:g} to 1 (default {DUTY_CYCLE:g})",
            )

    @property
    def period_s(self) -> float:
        """The distance of the grid's points."""
        return self.call_s / self.duty_cycle

    def next_start_s(self, began_s: float, took_s: float) -> float:
        """Return when the call may begin that follows one, by the same clock.

        On the engine's grid, and never before the call that was is over.
        """
        periods = max(1, math.floor(took_s / self.call_s + _ROUNDED_UP))
        periods = min(periods, max(1, int((took_s + _MOST_GAP_S) / self.period_s)))
        place = round((began_s - self.phase_s) / self.period_s) + periods
        return max(began_s + took_s, self.phase_s + place * self.period_s)


class Pace:
    """The pace of one registration. `step` is called by the engine, all else by the worker.

    `engine`: what all ranks of the engine have in common, such as the lease's id.
    """

    def __init__(
        self,
        engine: str = "",
        *,
        duty_cycle: float = DUTY_CYCLE,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """Raise BadInputError for a duty cycle that cannot be."""
        spacing = Spacing(duty_cycle)
        number = zlib.crc32(engine.encode()) / 2**32
        self.spacing = replace(spacing, phase_s=number * spacing.period_s)
        self._now = now
        self._last_step_s: float | None = None

    def step(self) -> None:
        """Note that the engine begins a step: from the first one on it serves."""
        self._last_step_s = self._now()

    @property
    def is_serving(self) -> bool:
        """Whether the engine has begun a step, ever."""
        return self._last_step_s is not None

    @property
    def is_working(self) -> bool:
        """Whether a step has begun not long ago: else no request waits, and calls need no gaps."""
        return self._last_step_s is not None and self._now() - self._last_step_s < IDLE_S

    def chunks(
        self, policy: ChunkPolicy, size_bytes: int, last_bytes: int, last_s: float
    ) -> ChunkPolicy:
        """Return the policy by which chunks of a slice of `size_bytes` are cut now.

        While the engine serves, also while it is idle: its next step would wait for a call that
        has begun. The first one is as long as the call before lets expect, if there was one.
        """
        if not self.is_serving:
            return policy
        target_s = min(policy.target_s, self.spacing.call_s)
        least = min(policy.least_bytes, max(_LEAST_CHUNK_BYTES, -(-size_bytes // _MOST_CHUNKS)))
        first = int(last_bytes * target_s / last_s) if last_s > 0 else 0
        return replace(policy, first_bytes=max(least, first), least_bytes=least, target_s=target_s)

    def wait(self, began_s: float, took_s: float, interrupt: threading.Event) -> None:
        """Wait until the next call may begin; not at all before the engine serves, or while idle.

        Returns at once when `interrupt` is set, and soon after the engine has become idle.
        """
        start_s = self.spacing.next_start_s(began_s, took_s)
        while self.is_working and (left_s := start_s - self._now()) > 0:
            if interrupt.wait(min(left_s, IDLE_S)):
                return
