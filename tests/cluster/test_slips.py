"""What people do to a fleet by a slip, on few nodes; the benchmark of that name takes 500."""

from __future__ import annotations

import pytest

from benchmarks.control_plane.slips import run_slips
from testbed.control_plane import ControlPlane

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(400)]
_SHOWN = {"node condition", "hmp status.leaving", "event", "metric"}


def test_no_slip_loses_memory_and_each_is_seen(private_control_plane: ControlPlane) -> None:
    slips = {slip.what: slip for slip in run_slips(private_control_plane, nodes=20, grace_s=12)}
    assert len(slips) == 7
    for what, slip in slips.items():
        assert slip.lost == 0, what
        assert slip.without_memory <= slip.budget == 2, what
        if slip.touched and not slip.answer:
            gone = {"hmp status.leaving"} if what.startswith("kubectl delete") else set()
            assert slip.seen_s.keys() == _SHOWN - gone, what
    refused = slips["kubectl delete hmp, 8 nodes leased"].answer
    assert refused.startswith("403: ")
    assert "in use on 8 node(s)" in refused
    assert slips["uninstall, 8 nodes leased"].answer.startswith("exit 2: hostprep: leased:")
    changed = slips["a new size while 8 nodes are leased"].answer
    assert changed.startswith("12 changed and 8 Blocked, open and labelled")
