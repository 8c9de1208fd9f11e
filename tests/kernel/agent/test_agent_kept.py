"""What a real worker finds of kept contents, and what the agent makes of it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from hostprep.agent.kept import KeptHistory
from hostprep.agent.messages import KeptObservation, PoolDone, ReconcileResult
from hostprep.backing import Backing
from hostprep.client.attach import attach
from hostprep.client.claim import draw_ticket
from hostprep.client.kept import WarmReport, write_warm_report
from hostprep.client.owner import Owner
from hostprep.node.apply.service import Node
from hostprep.paths import PoolPaths
from testbed.machine import pool_of
from tests.kernel.worker_process import WorkerProcess, wanted

pytestmark = pytest.mark.kernel

KV = replace(pool_of(regions=2, mib=4, backing=Backing.BASE), max_kept_s=3600)
OWNER = Owner("a-secret-of-the-engine", name="chat")


class Watched:
    """A pool, and the worker whose observations are compared from round to round."""

    def __init__(self, node: Node, worker: WorkerProcess) -> None:
        self.root = node.root
        self.paths = PoolPaths(node.root, "kv")
        self._worker = worker
        self._history = KeptHistory()
        self.given_up: list[tuple[str, str]] = []
        """Regions and reasons."""

    def look(self) -> list[KeptObservation]:
        """Have a round made, with the work that it finds to do; return what is kept after it."""
        found = []
        for message in self._worker.round(*wanted(KV)):
            if isinstance(message, ReconcileResult | PoolDone):
                gone = self._history.take(message.observation, now_s=1)
                self.given_up += [(key[1], one.reason) for key, one in gone.items()]
                found = list(message.observation.pools[0].kept)
        return found


@pytest.fixture
def watched(node: Node) -> Iterator[Watched]:
    with WorkerProcess(node.root) as worker:
        worker.round(*wanted(KV))
        watched = Watched(node, worker)
        assert watched.look() == []
        yield watched


def _keep(watched: Watched, region: str) -> None:
    with attach("kv", region=region, owner=OWNER, root=watched.root):
        report = WarmReport(at_s=5.0, recovered_blocks=3, refused={"weights": ("/a", "/b")})
        write_warm_report(watched.paths, region, "chat", report)
        (leased,) = watched.look()
        assert (leased.is_leased, leased.unheld_s, leased.gives_way) == (True, 0.0, "")


def test_what_is_kept_is_named_with_what_its_engine_reported(watched: Watched) -> None:
    _keep(watched, "node0-1")
    (found,) = watched.look()
    assert (found.region, found.name, found.state) == ("node0-1", "chat", "Retained")
    assert (found.recovered_blocks, found.reported_s) == (3, 5.0)
    assert found.refused == ("weights",), "names, and no values"
    with attach("kv", owner=OWNER, root=watched.root):
        assert watched.look()[0].is_leased
    watched.look()
    assert watched.given_up == [], "its owner got it back"


def test_names_of_refused_fields_are_few_whatever_the_engine_writes(watched: Watched) -> None:
    with attach("kv", region="node0-1", owner=OWNER, root=watched.root):
        refused = {f"model.{number:02}": ("a", "b") for number in reversed(range(63))}
        report = WarmReport(at_s=5.0, refused={"weights": ("a", "b"), **refused, "x": ("a", "b")})
        write_warm_report(watched.paths, "node0-1", "chat", report)
        (found,) = watched.look()
    assert found.refused == (*sorted(refused), "weights"), "the last of them counts as well"


def test_what_an_earlier_version_kept_is_the_same_once_its_owner_is_back(watched: Watched) -> None:
    _keep(watched, "node0-1")
    path = Path(watched.paths.sidecar("node0-1"))
    sidecar = json.loads(path.read_text())
    del sidecar["owner"]["since_s"]
    path.write_text(json.dumps(sidecar | {"claimed_at_s": 1000.0}))
    (before,) = watched.look()
    watched.given_up.clear()  # what this test itself changed
    with attach("kv", owner=OWNER, root=watched.root):
        (after,) = watched.look()
    assert before.since_s == after.since_s == 1000.0
    assert watched.given_up == []


def test_the_age_limit_and_waiters_are_reasons(watched: Watched) -> None:
    _keep(watched, "node0-1")
    watched.look()
    mark = Path(watched.paths.kept_mark("node0-1"))
    document = json.loads(mark.read_text())
    mark.write_text(json.dumps(document | {"since_s": document["since_s"] - 3700}))
    watched.look()
    assert watched.given_up == [("node0-1", "AgeLimit")]

    _keep(watched, "node0-0")
    watched.look()
    ticket = draw_ticket(watched.paths, frozenset({"node0-0"}))
    watched.look()
    ticket.give_up()
    assert watched.given_up[1:] == [("node0-0", "Waiters")]


def test_a_stranger_that_claims_it_is_a_reason(watched: Watched) -> None:
    _keep(watched, "node0-0")
    watched.look()
    with attach("kv", region="node0-0", root=watched.root):
        watched.look()
    assert watched.given_up == [("node0-0", "Claimed")]
