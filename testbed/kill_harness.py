"""Kill -9 at random instants of prepare, release, scrub and attach, and what must hold afterwards.

Each step runs in a forked child that tells its phase through shared memory, so that the parent
knows what it hit, and can aim at phases that last microseconds.
"""

from __future__ import annotations

import mmap
import os
import random
import signal
import struct
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import hostprep
from hostprep.api.pool_spec import PoolSpec, RegionLayout
from hostprep.backing import MIB, Backing
from hostprep.client.handoff import open_region, read_handoff, verify_handoff
from hostprep.client.sidecar import is_clean
from hostprep.errors import BusyError, HostprepError, NotReadyError
from hostprep.linux.memory import map_shared
from hostprep.node.apply.runner import ProgressReporter
from hostprep.node.apply.service import Node
from hostprep.node.observe.host import read_mounts
from hostprep.node.observe.pools import as_region, observe_pool
from hostprep.node.plan.actions import Action
from hostprep.paths import PoolPaths
from testbed.machine import huge_pages_total

POOL = "kill"
_PHASES = (
    "start",
    "between",
    "MakePool",
    "ReserveHugePages",
    "MountMemory",
    "CreateRegion",
    "ScrubRegion",
    "AdoptRegion",
    "PublishHandoff",
    "DropHandoff",
    "RemoveRegion",
    "UnmountMemory",
    "ReturnHugePages",
    "RemovePool",
    "claiming",
    "attached",
)
_TARGETS = {
    "prepare": ("MakePool", "ReserveHugePages", "MountMemory", "CreateRegion", "PublishHandoff"),
    "grow": ("ReserveHugePages", "MountMemory", "CreateRegion", "PublishHandoff"),
    "shrink": ("DropHandoff", "RemoveRegion", "UnmountMemory", "ReturnHugePages", "PublishHandoff"),
    "release": ("DropHandoff", "RemoveRegion", "UnmountMemory", "ReturnHugePages", "RemovePool"),
    "attach": ("claiming", "attached"),
    "scrub": ("ScrubRegion",),
}


class Phase(ProgressReporter):
    """The child's phase and its own end, in memory that outlives it.

    The child sets a timer on itself: SIGALRM without a handler ends a process in the kernel as
    abruptly as SIGKILL does, but to the microsecond, where a parent would always come too late
    for phases that last fifty of them.
    """

    def __init__(self) -> None:
        self._shared = mmap.mmap(-1, 4096)
        self._target: str | None = None
        self._delay = 0.0

    def aim(self, target: str | None, fraction: float) -> None:
        """Die at that fraction of the target's usual time; of the whole step's for None."""
        self._target = target
        self._delay = max(1e-6, fraction * 1.3 * max(5e-5, self.usual_s(target or "start")))

    def set(self, name: str) -> None:
        self._shared[0] = _PHASES.index(name)
        if name == self._target or (self._target is None and name == "start"):
            self._target = "armed"
            signal.setitimer(signal.ITIMER_REAL, self._delay)

    def get(self) -> str:
        return _PHASES[self._shared[0]]

    def usual_s(self, name: str) -> float:
        took_s: float = struct.unpack_from("d", self._shared, 8 + 8 * _PHASES.index(name))[0]
        return took_s

    def learn(self, name: str, took_s: float) -> None:
        struct.pack_into("d", self._shared, 8 + 8 * _PHASES.index(name), took_s)

    def begin(self, action: Action) -> None:
        self.set(type(action).__name__)

    def advance(self, action: Action, size_bytes: int) -> None:
        pass

    def end(self, action: Action, *, took_s: float) -> None:
        self.learn(type(action).__name__, took_s)
        self.set("between")


class _Learner(ProgressReporter):
    """Notes how long each phase takes where nobody is killed, to aim by."""

    def __init__(self, phase: Phase) -> None:
        self._phase = phase

    def begin(self, action: Action) -> None:
        pass

    def advance(self, action: Action, size_bytes: int) -> None:
        pass

    def end(self, action: Action, *, took_s: float) -> None:
        self._phase.learn(type(action).__name__, took_s)


@dataclass
class Tally:
    """What was hit, and what was found broken."""

    hits: Counter[str] = field(default_factory=Counter)
    torn_handoffs: list[str] = field(default_factory=list)
    wrong_states: list[str] = field(default_factory=list)
    leaks: list[str] = field(default_factory=list)

    @property
    def broken(self) -> list[str]:
        return [*self.torn_handoffs, *self.wrong_states, *self.leaks]


@dataclass
class KillRun:
    """One machine's pool, killed again and again."""

    node: Node
    small: PoolSpec
    large: PoolSpec
    seed: int
    pages_before: int
    targets: dict[str, tuple[str, ...]] = field(default_factory=lambda: dict(_TARGETS))
    """Steps to kill, and the phases to aim at in each."""
    phase: Phase = field(default_factory=Phase)
    tally: Tally = field(default_factory=Tally)

    def __post_init__(self) -> None:
        self.paths = PoolPaths(self.node.root, POOL)
        self.random = random.Random(self.seed)
        self.spec = self.small

    def run(self, kills: int) -> Tally:
        """Kill that many children, checking after each, and give everything back at the end."""
        done = 0
        while done < kills:
            step = self._next_step()
            if self._kill_one(step):
                done += 1
            self._check_after(step)
            if self.random.random() < 0.1:
                self._give_back()
        self._give_back()
        return self.tally

    def _next_step(self) -> str:
        """Return a step at random, more often those whose phases were hit least."""
        fewest = {
            step: min(self.tally.hits[name] for name in names)
            for step, names in self.targets.items()
        }
        weights = [1 / (1 + hits) ** 2 for hits in fewest.values()]
        return self.random.choices(list(fewest), weights)[0]

    def _kill_one(self, step: str) -> bool:
        """Run a step in a child that dies on the way. Returns whether it did."""
        self._set_up(step)
        rare = min(self.targets[step], key=lambda name: self.tally.hits[name])
        self.phase.aim(rare if self.random.random() < 0.7 else None, self.random.random())
        pid = os.fork()
        if pid == 0:
            self._child(getattr(self, f"_{step}"))
        _, status = os.waitpid(pid, 0)
        hit = self.phase.get()
        if not os.WIFSIGNALED(status):
            return False
        self.tally.hits[hit] += 1
        return True

    def _child(self, work: Callable[[], None]) -> None:
        # A handler inherited from the test runner (its time limit) would turn death into an error.
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        begin_s = time.monotonic()
        try:
            self.phase.set("start")
            work()
            self.phase.learn("start", time.monotonic() - begin_s)
        except BaseException as error:  # the child must never return into the test
            os.write(2, f"child: {type(error).__name__}: {error}\n".encode())
        os._exit(0)

    def _set_up(self, step: str) -> None:
        if step == "prepare":
            self._give_back()
        elif step == "release":
            self.node.prepare([self.spec])
        elif step in ("attach", "scrub"):
            self.node.prepare([self.spec])
            self._dirty_one()
        elif step == "grow":
            self.spec = self.small
            self.node.prepare([self.small])
            self.spec = self.large
        elif step == "shrink":
            for spec in (self.small, self.large):
                self.node.prepare([spec])
            self.spec = self.small

    def _dirty_one(self) -> None:
        with hostprep.attach(POOL, root=self.node.root) as memory:
            if memory.buffer[:4096].tobytes().strip(b"\0"):
                self.tally.wrong_states.append("an owner was handed another's bytes")
            memory.buffer[: memory.size_bytes] = b"\xff" * memory.size_bytes

    def _prepare(self) -> None:
        self.phase.set("between")
        self.node.prepare([self.spec], progress=self.phase)

    _grow = _prepare
    _shrink = _prepare
    _scrub = _prepare

    def _release(self) -> None:
        self.phase.set("between")
        self.node.release([POOL], progress=self.phase)

    def _attach(self) -> None:
        self.phase.set("claiming")
        begin_s = time.monotonic()
        with hostprep.attach(POOL, root=self.node.root) as memory:
            self.phase.learn("claiming", time.monotonic() - begin_s)
            self.phase.set("attached")
            begin_s = time.monotonic()
            if memory.buffer.tobytes().strip(b"\0"):
                self.tally.wrong_states.append("a claim was handed another's bytes")
            memory.buffer[:65536] = b"\xee" * 65536
            time.sleep(0.005)
            self.phase.learn("attached", time.monotonic() - begin_s)

    def _check_after(self, step: str) -> None:
        self._check_handoff(f"after {step} was killed in {self.phase.get()}")
        self._check_clean_marks(step)
        try:
            self.node.prepare([self.spec], progress=_Learner(self.phase))
        except HostprepError as error:
            self.tally.wrong_states.append(f"prepare after a killed {step}: {error}")
            return
        self._check_handoff("after the run that followed")
        handoff = read_handoff(self.paths)
        held = sum(region.size_bytes for region in handoff.regions)
        if step != "grow" and held < (self.spec.size_bytes or 0):
            self.tally.wrong_states.append(f"{held} bytes published after a killed {step}")
        if any(not region.finished for region in observe_pool(self.paths).regions):
            self.tally.leaks.append("a temporary region file was left")

    def _check_handoff(self, when: str) -> None:
        """There is no handoff, or a whole one whose every claim is true."""
        if not os.path.exists(self.paths.handoff):
            return
        try:
            handoff = read_handoff(self.paths)
        except NotReadyError as error:
            self.tally.torn_handoffs.append(f"{when}: {error}")
            return
        for region, problem in verify_handoff(self.paths, handoff):
            if problem is not None:
                self.tally.wrong_states.append(f"{when}: {region.name}: {problem}")

    def _check_clean_marks(self, step: str) -> None:
        """What is marked clean is zero, down to the last byte."""
        for facts in observe_pool(self.paths).regions:
            region = as_region(facts)
            # One that was being removed is empty, and damaged: it is not handed out.
            if facts.finished and not facts.damage and is_clean(self.paths, region):
                fd = open_region(self.paths, region, writable=False)
                with map_shared(fd, region.size_bytes, writable=False) as mapping:
                    if mapping[:].strip(b"\0"):
                        self.tally.wrong_states.append(f"{region.name} clean but not zero: {step}")
                os.close(fd)

    def _give_back(self) -> None:
        if not os.path.exists(self.node.root):
            return
        try:
            self.node.release([POOL])
        except (BusyError, NotReadyError) as error:
            self.tally.wrong_states.append(f"release: {error}")
        if os.path.exists(self.node.root):
            self.tally.leaks.append(f"{self.node.root}: {os.listdir(self.node.root)}")
        if any(entry.path.startswith(self.node.root) for entry in read_mounts()):
            self.tally.leaks.append("a mount was left")
        pages = huge_pages_total()
        if pages != self.pages_before:
            self.tally.leaks.append(f"{pages} huge pages, {self.pages_before} before")
        self.spec = self.small


def kill_spec(size_mib: int) -> PoolSpec:
    """Return the pool to be killed over: two regions of huge pages, which can leak."""
    return PoolSpec(
        name=POOL,
        size_bytes=size_mib * MIB,
        backings=(Backing.HUGETLB_2MI,),
        layout=RegionLayout.COUNT,
        region_count=2,
    )
