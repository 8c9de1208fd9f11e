"""Attackers, and the pool beside the one that they attack.

An attacker is a function that runs in a child process as another user, without any capability:

    def test_...(pools: Pools) -> None:
        ENGINE.does(lambda: Path(pools.attacked.sidecar(REGION)).write_text("junk"))
        with ENGINE.keeps(lambda: hold_lock(pools.attacked.claim_lock)):
            pools.bystander_works()

`Pools.bystander_works()` is what every attack has to leave true: the other pool is scrubbed by a
round of the agent, shown and claimed, all within a bound of seconds.
"""

from __future__ import annotations

import contextlib
import encodings.ascii
import json
import logging
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import hostprep
from hostprep.api.pool_spec import PoolSpec
from hostprep.errors import HostprepError
from hostprep.node.apply.service import AppliedPool, Node, Reconciler
from hostprep.paths import PoolPaths
from testbed.machine import pool_of
from tests.support.processes import forked
from tests.support.processes import hostprep as run_hostprep

# What is imported late on the attackers' way: this Python may lie where they cannot read.
_ = (encodings.ascii, logging)

ATTACKED = "attacked"
BYSTANDER = "bystander"
REGION = "node0-0"
"""The first region of each pool; `node0-1` is the attacked pool's second."""

GID = 54321
BYSTANDER_GID = 54322


@dataclass(frozen=True)
class Attacker:
    """A user of one group, without capabilities, as in an ordinary pod."""

    uid: int
    gid: int

    def does(self, work: Callable[[], object]) -> None:
        """Run `work` in a child as this user, to its end; fails where it raises."""
        with self.keeps(work):
            pass

    @contextmanager
    def keeps(self, work: Callable[[], object]) -> Iterator[int]:
        """Run `work` in a child as this user, which then stays while the block runs.

        It keeps what `work` returned (a descriptor, a mapping, a list of them) and all locks that
        it took. Yields the child's process id; the child is killed at the end.
        """

        def child(ready: Callable[[], None]) -> None:
            self._become()
            kept.append(work())
            ready()

        kept: list[object] = []
        with forked(child) as pid:
            yield pid

    def _become(self) -> None:
        os.setgroups([])
        os.setgid(self.gid)
        os.setuid(self.uid)
        os.umask(0o077)


ENGINE = Attacker(1000, GID)
"""An engine of the attacked pool."""
STRANGER = Attacker(1001, 1001)
"""A local user without any pool's group."""


@dataclass
class Pools:
    """A node with the attacked pool (two regions of 8 MiB) and the bystander (one)."""

    node: Node
    specs: list[PoolSpec] = field(
        default_factory=lambda: [
            pool_of(name=ATTACKED, regions=2, gid=GID),
            pool_of(name=BYSTANDER, gid=BYSTANDER_GID),
        ]
    )

    @property
    def root(self) -> str:
        return self.node.root

    @property
    def attacked(self) -> PoolPaths:
        return PoolPaths(self.root, ATTACKED)

    @property
    def bystander(self) -> PoolPaths:
        return PoolPaths(self.root, BYSTANDER)

    def dirty(self, pool: str, region: str = REGION) -> None:
        """Claim a region as root, write to it and give it back."""
        with hostprep.attach(pool, region=region, root=self.root) as memory:
            memory.buffer[:4] = b"dirt"

    def reconcile(self) -> dict[str, AppliedPool]:
        """Do a round of the agent's; returns each pool's result; raises as the agent would."""
        results: list[AppliedPool] = []
        Reconciler(node=self.node, specs=self.specs, on_pool=results.append, thorough=True).run()
        return {result.plan.name: result for result in results}

    def errors(self) -> dict[str, HostprepError | None]:
        """Do a round of the agent's; returns each pool's error."""
        return {name: result.error for name, result in self.reconcile().items()}

    def bystander_works(self, *, within_s: float = 20.0) -> None:
        """Assert that the bystander is scrubbed, shown and claimed, within a bound."""
        start_s = time.monotonic()
        self.bystander_works_in_process()
        shown = run_hostprep("status", "-o", "json", "--root", self.root)
        assert "Traceback" not in shown.stderr, shown.stderr
        pools = {pool["name"]: pool for pool in json.loads(shown.stdout)["pools"]}
        assert {ATTACKED, BYSTANDER} <= set(pools), shown
        took_s = time.monotonic() - start_s
        assert took_s < within_s, f"the bystander had to wait: {took_s:.1f} s"

    def bystander_works_in_process(self) -> None:
        """Assert that the bystander is scrubbed and claimed, without other processes."""
        self.dirty(BYSTANDER)
        assert not os.path.exists(self.bystander.clean_mark(REGION))
        assert self.errors()[BYSTANDER] is None
        assert os.path.exists(self.bystander.clean_mark(REGION)), "the bystander is not scrubbed"
        hostprep.attach(BYSTANDER, root=self.root).close()


@contextmanager
def attacked_node(node: Node, specs: list[PoolSpec] | None = None) -> Iterator[Pools]:
    """Yield the two pools, prepared, below a folder that everybody may pass through."""
    Path(node.root).parent.chmod(0o755)
    pools = Pools(node) if specs is None else Pools(node, specs)
    node.prepare(pools.specs)
    try:
        yield pools
    finally:
        with contextlib.suppress(HostprepError):  # a failed attack's test says more
            node.release([ATTACKED, BYSTANDER], force=True)
