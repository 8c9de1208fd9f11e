"""Killed at any instant, run again: the state asked for, nothing torn, leaked or stuck."""

from __future__ import annotations

import os
import time

import pytest

from hostprep.linux.files import atomic_write
from hostprep.node.apply import publish
from hostprep.node.apply.service import Node
from testbed.kill_harness import KillRun, kill_spec
from testbed.machine import huge_pages_total

pytestmark = pytest.mark.kernel


def _run(node: Node, seed: int) -> KillRun:
    return KillRun(node, kill_spec(64), kill_spec(96), seed, huge_pages_total())


def test_twenty_kills_leave_nothing_torn_wrong_or_leaked(node: Node) -> None:
    seed = int(os.environ.get("HOSTPREP_KILL_SEED") or time.time_ns() % 1_000_000)
    run = _run(node, seed)

    tally = run.run(20)

    assert not tally.broken, f"seed {seed}: {tally.broken}"
    assert sum(tally.hits.values()) == 20


def test_the_same_run_fails_when_the_handoff_is_written_in_place(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publish, "atomic_write", _write_in_place)
    run = _run(node, 7)
    run.targets = {"prepare": ("PublishHandoff",)}

    for _ in range(40):
        run.run(5)
        if run.tally.torn_handoffs:
            return
    pytest.fail("writing in place was never caught")


def _write_in_place(path: str, data: bytes, *, mode: int, gid: int | None = None) -> None:
    """The mutant: what a careless program does, slowed down to a disk's pace."""
    if not path.endswith("/handoff.json"):
        atomic_write(path, data, mode=mode, gid=gid)
        return
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode)
    for start in range(0, len(data), 16):
        os.write(fd, data[start : start + 16])
        time.sleep(0.0001)
    os.close(fd)
