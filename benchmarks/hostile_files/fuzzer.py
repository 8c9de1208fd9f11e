"""Rounds of attack: a fresh pool, an attacker with some rights, operations, what must hold."""

from __future__ import annotations

import contextlib
import hashlib
import os
import random
import re
import signal
import stat
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.hostile_files.moves import Attacker
from benchmarks.hostile_files.operations import (
    ATTACKED,
    ATTACKER,
    BYSTANDER,
    BYSTANDER_GID,
    BYSTANDERS_ENGINE,
    GID,
    REGION_MIB,
    REGIONS,
    Agent,
    Operation,
    attackable,
    bystander_again,
    bystander_claim,
    hold_bystander,
    load_all_modules,
    operations,
    output_problems,
    pools_yaml,
    prepare,
    release_attacked,
    targets,
)
from benchmarks.hostile_files.processes import (
    CRASHED,
    AttackerProcess,
    Outcome,
    User,
    run_child,
)
from benchmarks.machine import own_node
from hostprep.api.pool_spec import PoolSpec
from hostprep.backing import Backing
from hostprep.linux.files import closing_fd
from hostprep.node.apply.root import grow_root
from hostprep.node.observe.host import read_mounts
from hostprep.paths import TURNSTILE, PoolPaths
from testbed.machine import huge_pages_total, pool_of

ENGINE = "engine"
ROOT = "root"
BOUND_S = 20.0
"""No operation may take longer, whatever others did to its files."""
PEAK_BYTES = 512 << 20
"""Nor have more memory than this beyond its regions."""
_KILL_S = 3 * BOUND_S
_SHOWN_MOVES = 12
_OPERATIONS = (4, 8)
_MOVES = (1, 12)
_KNOWN_EXITS = (0, 1, 2)
Canary = tuple[str, int, int, int, str]
"""A file's mode, owner, group, size and digest."""
_NUMBERS = re.compile(r"0x[0-9a-f]+|\d+|'[^']*'")


@dataclass
class Finding:
    """Something that must not be; `count` times, first in the round of that seed."""

    seed: int
    rights: str
    operation: str
    what: str
    moves: tuple[str, ...]
    count: int = 1


@dataclass
class Report:
    """What a run did and found."""

    rounds: Counter[str] = field(default_factory=Counter)
    moves: Counter[str] = field(default_factory=Counter)
    operations: Counter[str] = field(default_factory=Counter)
    exits: Counter[tuple[str, int]] = field(default_factory=Counter)
    slowest_s: dict[str, float] = field(default_factory=dict)
    total_s: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    """Seconds in all, by operation."""
    peak_bytes: dict[str, int] = field(default_factory=dict)
    findings: dict[tuple[str, str], Finding] = field(default_factory=dict)
    wiped: Counter[str] = field(default_factory=Counter)
    """Why the attacked pool could not be released after rounds with root's rights."""


@dataclass
class Fuzzer:
    """One node, a bystander that lives through all rounds, and a pool attacked anew in each."""

    folder: str
    root: str
    report: Report = field(default_factory=Report)
    verbose: bool = False
    rights: tuple[str, ...] = (ENGINE, ENGINE, ROOT)
    backings: tuple[Backing, ...] = (Backing.BASE, Backing.HUGETLB_2MI)
    _seed: int = 0
    _rights: str = ENGINE
    _log: list[tuple[str, str]] = field(default_factory=list)
    _backing: Backing = Backing.BASE
    _pages_before: int | None = None

    def run(self, *, seed: int, seconds: float, rounds: int | None) -> Report:
        """Do rounds of the seeds from `seed` on, for so long, or so many. Leaves nothing behind."""
        load_all_modules()
        os.chmod(self.folder, 0o755)  # everybody may pass through, as through /run
        canaries = Canaries.make(f"{self.folder}/canaries")
        os.mkdir(f"{self.folder}/host")
        deadline_s = time.monotonic() + seconds
        agent = Agent(self.root, f"{self.folder}/host", _KILL_S)
        try:
            self._do(prepare(self.root, BYSTANDER, "Base"))
            # What attackers leave adds up. Claims wait for room in a full root: that is known, and
            # would hide everything else.
            grow_root(self.root, regions=1 << 20)
            done = 0
            while done < rounds if rounds is not None else time.monotonic() < deadline_s:
                self._round(seed + done, agent, canaries)
                done += 1
        finally:
            agent.close()
            self._wipe("")
            self._check_pages()
        return self.report

    # --- a round

    def _round(self, seed: int, agent: Agent, canaries: Canaries) -> None:
        rng = random.Random(seed)
        self._seed = seed
        self._rights = self.rights[seed % len(self.rights)]
        self._backing = rng.choice(self.backings)
        self._log.clear()
        self.report.rounds[self._rights] += 1
        self._pages_before = huge_pages_total()
        self._do(prepare(self.root, ATTACKED, str(self._backing)))
        specs = [self._spec(BYSTANDER), self._spec(ATTACKED)]
        self._agent_round(agent, specs)
        with contextlib.ExitStack() as stack:
            holds = rng.random() < 0.3
            if holds:
                stack.enter_context(self._holder())
            attacker = AttackerProcess(self._attacker_user(), lambda: self._make(seed, canaries))
            stack.callback(attacker.close)
            for _ in range(rng.randint(*_OPERATIONS)):
                self._note(attacker.moves(rng.randint(*_MOVES)))
                self._attack_one(rng, attacker, agent, specs, holds=holds)
                self._check_canaries(canaries)
        # The attacker is gone, and with it its locks: what it left must not last.
        self._agent_round(agent, specs)
        self._do(bystander_claim(self.root))
        outcome = self._do(release_attacked(self.root), must_work=self._rights == ENGINE)
        if outcome.code != 0 or os.path.lexists(PoolPaths(self.root, ATTACKED).folder):
            if self._rights == ENGINE:
                self._find("release", "the attacked pool is still there after its release")
            self.report.wiped[_NUMBERS.sub("#", outcome.err.strip()[-200:])] += 1
            self._wipe(ATTACKED)
        self._wipe(TURNSTILE)  # each round meets its own moves only, and can be repeated
        self._check_canaries(canaries)
        self._check_pages()

    def _attack_one(
        self,
        rng: random.Random,
        attacker: AttackerProcess,
        agent: Agent,
        specs: list[PoolSpec],
        *,
        holds: bool,
    ) -> None:
        """Run one operation, or one that takes several, while the attacker moves or holds still."""
        steps: list[Operation | None]
        kind = rng.random()
        if kind < 0.2:
            steps = [None, bystander_claim(self.root)]
        elif kind < 0.3 and not holds:
            steps = list(bystander_again(self.root))
        else:
            steps = [rng.choice(operations(self.root, self._pools_file(), str(self._backing)))]
        moves_on = rng.random() < 0.5
        with attacker.moving(self._log) if moves_on else contextlib.nullcontext():
            for step in steps:
                if step is None:
                    self._agent_round(agent, specs)
                else:
                    self._do(step)
        if moves_on:
            self._count_moves()

    def _make(self, seed: int, canaries: Canaries) -> Attacker:
        everything = [self.root, PoolPaths(self.root, BYSTANDER).folder]
        folders = attackable(self.root)
        lures = [*canaries.paths, f"{self.root}/{BYSTANDER}/mem", f"{self.root}/{BYSTANDER}/state"]
        return Attacker(
            random.Random(f"attacker {seed}"),
            self.root,
            folders=[*folders, *everything] if self._rights == ENGINE else folders,
            targets=targets(self.root),
            lures=[*lures, f"{self.root}/{BYSTANDER}/handoff.json", "/", "/proc/self/root"],
            foreign=canaries.paths,
        )

    def _attacker_user(self) -> User | None:
        return ATTACKER if self._rights == ENGINE else None

    def _spec(self, pool: str) -> PoolSpec:
        is_attacked = pool == ATTACKED
        return pool_of(
            name=pool,
            regions=REGIONS,
            mib=REGION_MIB,
            backing=self._backing if is_attacked else Backing.BASE,
            gid=GID if is_attacked else BYSTANDER_GID,
        )

    def _pools_file(self) -> str:
        path = f"{self.folder}/pools.yaml"
        Path(path).write_text(pools_yaml(str(self._backing)), encoding="utf-8")
        return path

    # --- one operation

    def _do(self, operation: Operation, *, must_work: bool | None = None) -> Outcome:
        outcome = run_child(operation.work, user=operation.user, limit_s=_KILL_S)
        self._took(operation.name, outcome.took_s)
        peak = self.report.peak_bytes
        peak[operation.name] = max(peak.get(operation.name, 0), outcome.peak_bytes)
        self.report.exits[operation.name, outcome.code] += 1
        for what in self._problems(operation, outcome, must_work):
            self._find(operation.name, what)
        return outcome

    def _problems(
        self, operation: Operation, outcome: Outcome, must_work: bool | None
    ) -> Iterator[str]:
        code, said = outcome.code, (outcome.err or outcome.out)[-3000:]
        if outcome.timed_out:
            yield f"did not end within {_KILL_S:.0f} s: {said}"
            return
        if outcome.took_s > BOUND_S:
            yield f"took longer than {BOUND_S:.0f} s"
        if outcome.peak_bytes > PEAK_BYTES:
            yield "took too much memory"
        if code == CRASHED or "Traceback" in outcome.err or "Traceback" in outcome.out:
            yield f"raised what is no error of ours: {said}"
        elif code == -signal.SIGBUS and operation.may_get_sigbus:
            return
        elif code not in _KNOWN_EXITS:
            yield f"ended with {code}: {said}"
        elif code != 0 and (operation.must_work if must_work is None else must_work):
            yield f"failed: {said}"
        yield from output_problems(operation, outcome)

    def _agent_round(self, agent: Agent, specs: list[PoolSpec]) -> None:
        begin_s = time.monotonic()
        problems = list(agent.round(specs))
        took_s = time.monotonic() - begin_s
        self._took("agent's round", took_s)
        if took_s > BOUND_S:
            problems.append(f"took longer than {BOUND_S:.0f} s")
        for what in problems:
            self._find("agent's round", what)

    def _took(self, operation: str, took_s: float) -> None:
        self.report.operations[operation] += 1
        self.report.total_s[operation] += took_s
        slowest = self.report.slowest_s
        slowest[operation] = max(slowest.get(operation, 0.0), took_s)

    @contextlib.contextmanager
    def _holder(self) -> Iterator[None]:
        """Have the bystander's engine hold a region while the block runs, and its bytes stay."""
        ready, ready_child = os.pipe()
        end_child, end = os.pipe()
        pid = os.fork()
        if pid == 0:
            code = CRASHED
            with contextlib.suppress(BaseException):
                os.close(end)
                os.close(ready)
                BYSTANDERS_ENGINE.become()
                code = hold_bystander(self.root, ready_child, end_child)
            os._exit(code)
        os.close(ready_child)
        os.close(end_child)
        try:
            if os.read(ready, 1) != b"+":
                self._find("hold bystander", "it could not be claimed")
            yield
        finally:
            os.close(ready)
            os.close(end)
            _, status = os.waitpid(pid, 0)
            code = os.waitstatus_to_exitcode(status)
            if code != 0:
                self._find("hold bystander", f"the bytes of its engine changed: exit code {code}")

    # --- what was found

    def _note(self, moves: list[tuple[str, str]]) -> None:
        self._log += moves
        self._count_moves()

    def _count_moves(self) -> None:
        """Count what was not counted yet; of it, the last ones are kept for a finding."""
        for kind, _ in self._log:
            if kind:
                self.report.moves[kind] += 1
        self._log[:] = [("", what) for kind, what in self._log if kind != "refused"][-300:]

    def _find(self, operation: str, what: str) -> None:
        # The last line says it, the numbers and names in it differ from round to round.
        last = what.strip().splitlines()[-1] if what.strip() else ""
        key = (operation, _NUMBERS.sub("#", f"{what[:40]} {last}")[:300])
        known = self.report.findings.get(key)
        if known is not None:
            known.count += 1
            return
        moves = tuple(what for _, what in self._log[-_SHOWN_MOVES:])
        finding = Finding(self._seed, self._rights, operation, what, moves)
        self.report.findings[key] = finding
        if self.verbose:
            print(f"seed {finding.seed} ({finding.rights}): {operation}: {what}", file=sys.stderr)
            for move in moves:
                print(f"    {move}", file=sys.stderr)
            sys.stderr.flush()

    def _check_canaries(self, canaries: Canaries) -> None:
        for what in canaries.changes():
            self._find("outside of the root", what)

    # --- afterwards

    def _wipe(self, name: str) -> None:
        """Take a folder below the root away without asking the program that was attacked."""
        folder = f"{self.root}/{name}".rstrip("/")
        mounts = [
            entry.path for entry in read_mounts() if f"{entry.path}/".startswith(f"{folder}/")
        ]
        for path in sorted(mounts, reverse=True):
            subprocess.run(["umount", "-l", path], check=False)
        subprocess.run(["rm", "-rf", "--one-file-system", folder], check=False)

    def _check_pages(self) -> None:
        """Give back what the attacked pool left, and put back what it gave of others' pages.

        Engines reach neither. Root's rights reach the ledger, which says what to give back.
        """
        before, self._pages_before = self._pages_before, None
        if before is None or self._backing is Backing.BASE:
            return  # whoever changed the number meanwhile, it was not this round
        left = huge_pages_total() - before
        if left == 0:
            return
        if self._rights == ENGINE:
            self._find("huge pages", f"{left} of the machine's pages more than before")
        if left <= REGIONS * REGION_MIB // 2:
            path = "/sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages"
            Path(path).write_text(str(before), encoding="ascii")


@dataclass
class Canaries:
    """Files beside the root that nobody may change: links and second names of them lie below it."""

    folder: str
    paths: list[str]
    _before: dict[str, Canary] = field(default_factory=dict)

    @classmethod
    def make(cls, folder: str) -> Canaries:
        """Make a root's file, one that all may write, the attacker's own, and a folder."""
        os.mkdir(folder)
        os.chmod(folder, 0o755)
        for name, mode in (("roots", 0o644), ("everybodys", 0o666), ("own", 0o600)):
            Path(folder, name).write_text(f"canary {name}\n" * 100, encoding="utf-8")
            os.chmod(f"{folder}/{name}", mode)
        os.chown(f"{folder}/own", ATTACKER.uid, ATTACKER.gid)
        os.mkdir(f"{folder}/folder")
        os.chmod(f"{folder}/folder", 0o755)
        Path(folder, "folder", "file").write_text("canary\n", encoding="utf-8")
        names = ("roots", "everybodys", "own", "folder", "folder/file")
        canaries = cls(folder, [f"{folder}/{name}" for name in names])
        canaries._before = canaries._look()
        return canaries

    def changes(self) -> list[str]:
        """Return what changed; it counts as the state to compare with from now on."""
        now = self._look()
        changed = [
            f"{os.path.relpath(path, self.folder)} was {self._before.get(path)}, is {now.get(path)}"
            for path in sorted({*self._before, *now})
            if self._before.get(path) != now.get(path)
        ]
        self._before = now
        return changed

    def _look(self) -> dict[str, Canary]:
        found: dict[str, Canary] = {}
        for folder, folders, files in os.walk(self.folder):
            for name in (*folders, *files):
                path = f"{folder}/{name}"
                status = os.lstat(path)
                size = 0 if stat.S_ISDIR(status.st_mode) else status.st_size
                digest = self._digest(path) if stat.S_ISREG(status.st_mode) else ""
                found[path] = (oct(status.st_mode), status.st_uid, status.st_gid, size, digest)
        return found

    def _digest(self, path: str) -> str:
        try:
            # Without O_NONBLOCK it would wait 45 s for the attacker's lease on a second name.
            with closing_fd(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW)) as fd:
                return hashlib.sha256(os.read(fd, 1 << 20)).hexdigest()[:12]
        except BlockingIOError:
            return self._before[path][-1] if path in self._before else ""


def run(
    *,
    seed: int,
    seconds: float,
    rounds: int | None = None,
    verbose: bool = False,
    rights: str | None = None,
    backing: Backing | None = None,
) -> Report:
    """Attack a node of its own for so long, with all rights and backings or with one.

    Raises BenchmarkError where that cannot be.
    """
    with own_node() as node:
        fuzzer = Fuzzer(os.path.dirname(node.root), node.root, verbose=verbose)
        if rights is not None:
            fuzzer.rights = (rights,)
        if backing is not None:
            fuzzer.backings = (backing,)
        return fuzzer.run(seed=seed, seconds=seconds, rounds=rounds)
