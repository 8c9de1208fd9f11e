"""Kill the operator a hundred times while all goes wrong around it; see that all ends well.

`python -m benchmarks.control_plane.faults [--nodes 1000] [--kills 100] [--restarts 6] [--seed N]`:
three pools on a real API server, which is killed as well; nodes and pools that come, change and
go; watches cut and expired, and requests refused by a proxy that every second operator works
through. Meanwhile an independent watcher checks every opening of a node, and every instruction to
release memory. Exit code 1 where one was wrong, or where the end is not what was asked for.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import random
import sys
import time
from collections import Counter
from dataclasses import dataclass, field

from benchmarks.control_plane.troubles import Troubles, left_undone
from hostprep.console import print_table
from testbed.chart import apply_crds
from testbed.control_plane import ControlPlane
from testbed.fault_proxy import FaultProxy
from testbed.faults import answer, expired
from testbed.opening_audit import OpeningAudit
from testbed.operator_process import OperatorProcess
from testbed.processes import wait_for
from testbed.simulated_agents import SimulatedAgents

_SHOWN = 10
_START_S = 15.0
# What is asked for at any version can be read until the end: the watcher needs it.
_FLAGS = ("--etcd-compaction-interval=0",)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How much of everything."""

    nodes: int = 1000
    kills: int = 100
    restarts: int = 6
    """Of the API server."""
    seed: int = 0
    longest_life_s: float = 6.0
    """Each operator lives for a random time up to this, every second one once it is in sync."""
    settle_s: float = 300.0
    """How long the end may take."""
    module: str = "hostprep_operator"


@dataclass(slots=True)
class Tally:
    """What happened."""

    kills: int = 0
    restarts: int = 0
    done: Counter[str] = field(default_factory=Counter)
    openings: int = 0
    wrong_openings: list[str] = field(default_factory=list)
    wrong_releases: list[str] = field(default_factory=list)
    ended: list[str] = field(default_factory=list)
    """The last words of operators that ended by themselves."""
    left_undone: list[str] = field(default_factory=list)
    trouble_s: float = 0.0
    converged_s: float = 0.0

    @property
    def wrong(self) -> list[str]:
        """Everything that must not be."""
        return self.wrong_openings + self.wrong_releases + self.ended + self.left_undone


def run(plan: Plan) -> Tally:
    """Do all of it on a control plane of its own. Raises AssertionError where it never begins."""
    chance, tally = random.Random(plan.seed), Tally()
    with ControlPlane(flags=_FLAGS) as cluster, FaultProxy(cluster, seed=plan.seed) as proxy:
        apply_crds(cluster.api)
        audit, agents = OpeningAudit(cluster.api), SimulatedAgents(cluster.api)
        troubles = Troubles(cluster.api, proxy, agents, audit, chance)
        troubles.make_cluster(plan.nodes)
        ways = (cluster.kubeconfig, proxy.admin_kubeconfig())
        options = ("--agent-liveness=off", "--log-level=warning")
        operator = OperatorProcess(cluster, *options, kubeconfig=ways[1], module=plan.module)
        _spoil(proxy)
        began_s = time.monotonic()
        outages = set(chance.sample(range(plan.kills), min(plan.restarts, plan.kills)))
        for turn in range(plan.kills):
            _strike(troubles, operator, chance, plan)
            if turn in outages:
                _outage(cluster, chance, tally)
            _kill(operator, tally)
            operator.kubeconfig = ways[turn % 2]
            operator.start()
            troubles.let_agents_speak(0.5)
        tally.trouble_s = time.monotonic() - began_s
        proxy.clear()
        _end(plan, cluster, agents, troubles, tally)
        _count(tally, proxy, audit, troubles)
        agents.close()
    return tally


def _spoil(proxy: FaultProxy) -> None:
    proxy.add(answer(429, retry_after_s=1, share=0.05))
    proxy.add(answer(500, share=0.02, methods=("PATCH", "POST", "DELETE")))
    proxy.add(expired(share=0.05))


def _strike(
    troubles: Troubles, operator: OperatorProcess, chance: random.Random, plan: Plan
) -> None:
    """Let things happen over a life of random length, which ends at a random instant."""
    if chance.random() < 0.5:  # else most would die at their start
        with contextlib.suppress(AssertionError):
            operator.wait_ready(_START_S)
    life_s = chance.uniform(0.0, plan.longest_life_s)
    for _ in range(chance.randint(1, 3)):
        time.sleep(life_s / 4)
        troubles.strike()
    time.sleep(chance.uniform(0.0, life_s / 4))


def _outage(cluster: ControlPlane, chance: random.Random, tally: Tally) -> None:
    cluster.kill_api_server()
    time.sleep(chance.uniform(0.0, 4.0))
    cluster.start_api_server()
    tally.restarts += 1
    time.sleep(chance.uniform(0.0, 4.0))


def _kill(operator: OperatorProcess, tally: Tally) -> None:
    if not operator.child.alive:
        tally.ended.append(f"an operator ended by itself:\n{operator.child.tail()}")
    operator.child.kill()
    tally.kills += 1


def _end(
    plan: Plan, cluster: ControlPlane, agents: SimulatedAgents, troubles: Troubles, tally: Tally
) -> None:
    """Stop all faults, and wait until everything is as it was asked for."""
    began_s = time.monotonic()
    wait_for(troubles.settle, 30)
    while True:
        agents.report()
        tally.left_undone = left_undone(cluster.api)
        tally.converged_s = time.monotonic() - began_s
        if not tally.left_undone or tally.converged_s > plan.settle_s:
            return
        time.sleep(1.0)


def _count(tally: Tally, proxy: FaultProxy, audit: OpeningAudit, troubles: Troubles) -> None:
    tally.wrong_openings = audit.wrong_openings()
    tally.wrong_releases = audit.wrong_releases
    tally.openings = audit.openings
    statuses = Counter(status for _, status in proxy.seen())
    for status in (429, 500):
        troubles.done[f"answers of {status}"] = statuses[status]
    tally.done = troubles.done


def show(tally: Tally) -> None:
    """Print the counts, and the first things that are wrong."""
    rows = [
        ("operator killed", str(tally.kills)),
        ("API server killed", str(tally.restarts)),
        *((name, str(count)) for name, count in sorted(tally.done.items())),
        ("seconds of trouble", f"{tally.trouble_s:.0f}"),
        ("openings checked", str(tally.openings)),
        ("wrong openings", str(len(tally.wrong_openings))),
        ("releases of pools that exist", str(len(tally.wrong_releases))),
        ("operators that ended by themselves", str(len(tally.ended))),
        ("differences at the end", str(len(tally.left_undone))),
        ("seconds from the last fault to the end", f"{tally.converged_s:.1f}"),
    ]
    print_table("", ("what", "count"), rows)
    for sentence in tally.wrong[:_SHOWN]:
        print(sentence, file=sys.stderr)


def main() -> int:
    """Return 0 where nothing was wrong, 1 otherwise."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.control_plane.faults")
    usual = Plan()
    parser.add_argument("--nodes", type=int, default=usual.nodes)
    parser.add_argument("--kills", type=int, default=usual.kills)
    parser.add_argument("--restarts", type=int, default=usual.restarts, help="of the API server")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 32))
    options = parser.parse_args()
    plan = Plan(**vars(options))
    logging.getLogger("aiohttp.server").setLevel(logging.CRITICAL)  # the proxy's cut requests
    sys.setswitchinterval(0.0005)  # agents, proxy and watcher wait for each other's requests
    print(f"{plan.nodes} nodes, {plan.kills} kills, seed {plan.seed}", flush=True)
    tally = run(plan)
    show(tally)
    return 1 if tally.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
