"""Ctrl-C while memory is populated: heard at once, and the next run goes on from there."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass

import pytest

from hostprep.backing import GIB, Backing
from hostprep.client.handoff import read_handoff
from hostprep.errors import NotReadyError
from hostprep.node.apply.runner import ProgressReporter
from hostprep.node.apply.service import Node
from hostprep.node.observe.pools import observe_pools
from hostprep.node.plan.actions import Action, CreateRegion
from hostprep.paths import PoolPaths
from testbed.machine import POOL, pool_of

pytestmark = pytest.mark.kernel


def _prepare(node: Node) -> list[str]:
    spec = ["--name", POOL, "--size", "3Gi", "--backing", "Base", "--root", node.root]
    # Shells have what they start in the background ignore Ctrl-C, and that is inherited; so too
    # the handler below.
    attentive = ["env", "--default-signal=INT", sys.executable]
    return [*attentive, "-m", "hostprep", "prepare", *spec, "--progress", "json"]


def _interrupt(command: list[str]) -> str:
    """Send Ctrl-C once there is memory; return what is said from then on."""
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    for line in process.stderr:
        if json.loads(line)["event"] == "advance":
            break
    process.send_signal(signal.SIGINT)
    begin = time.monotonic()
    rest = process.stderr.read()
    assert "\n\n" not in rest, "an empty line, as for a terminal that shows ^C"
    assert process.wait(timeout=30) == 130
    assert time.monotonic() - begin < 10
    return rest


def test_ctrl_c_stops_at_once_and_the_next_run_goes_on(node: Node) -> None:
    command = _prepare(node)
    assert "run it again" in _interrupt(command)
    with pytest.raises(NotReadyError):
        read_handoff(PoolPaths(node.root, POOL))
    (region,) = observe_pools(node.root)[0].regions
    assert not region.finished
    there_bytes = region.resident_bytes
    assert there_bytes > 0

    done = subprocess.run(command, check=True, stderr=subprocess.PIPE, text=True, timeout=60)
    lines = [json.loads(line) for line in done.stderr.splitlines()]
    assert "DropHandoff" not in {line["action"] for line in lines}, "none was published"
    begin = next(line for line in lines if line["action"] == "CreateRegion")
    assert "of it there" in begin["what"]
    assert begin["expected_bytes"] == 3 * GIB - there_bytes
    assert max(line.get("done_bytes", 0) for line in lines) <= begin["expected_bytes"]
    node.release([POOL])


@dataclass
class _CtrlCAtBegin(ProgressReporter):
    """Is Ctrl-C, as the first region begins."""

    done: bool = False

    def begin(self, action: Action) -> None:
        if isinstance(action, CreateRegion) and not self.done:
            self.done = True
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.3)  # The main thread has heard it before there is memory to make.


def test_ctrl_c_while_threads_start_leaves_none_at_work(node: Node) -> None:
    """Such a thread went on unheard and unknown, when the node's lock was free already."""
    before = threading.enumerate()
    switch_interval_s = sys.getswitchinterval()
    sys.setswitchinterval(10.0)  # A new thread goes on till it first waits for something.
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            node.prepare([pool_of(regions=2, backing=Backing.BASE)], progress=_CtrlCAtBegin())
    finally:
        signal.signal(signal.SIGINT, handler)
        sys.setswitchinterval(switch_interval_s)
    started = [thread for thread in threading.enumerate() if thread not in before]
    assert [each for each in started if not each.name.startswith("Dummy")] == []
    assert not any(region.finished for region in observe_pools(node.root)[0].regions)
    node.prepare([pool_of(regions=2, backing=Backing.BASE)])
    assert len(read_handoff(PoolPaths(node.root, POOL)).regions) == 2
