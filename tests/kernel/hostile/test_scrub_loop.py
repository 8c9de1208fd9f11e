"""An engine that makes its region dirty again and again keeps root busy for a part of its time."""

from __future__ import annotations

import os
from io import BytesIO

import pytest

from hostprep.agent import scrub_pace
from hostprep.agent.messages import ReconcileRequest, ReconcileResult, decode
from hostprep.agent.worker import Worker
from tests.kernel.hostile.attackers import ATTACKED, BYSTANDER, REGION, Pools
from tests.kernel.worker_process import results_of, wanted

pytestmark = pytest.mark.kernel


def test_a_pool_that_was_scrubbed_long_enough_rests_and_says_so(
    pools: Pools, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scrub_pace, "_BURST_S", 0.0)
    monkeypatch.setattr(scrub_pace, "_REST_PER_SCRUB", 1e6)  # these regions take milliseconds
    output = BytesIO()
    worker = Worker(pools.node, output)

    def a_round(*dirty: str) -> None:
        for pool in dirty:
            pools.dirty(pool)
        output.truncate(output.seek(0))
        worker.reconcile(ReconcileRequest(number=1, pools=wanted(*pools.specs), held=()))
        if worker._thread is not None:
            worker._thread.join()

    a_round(ATTACKED)
    assert os.path.exists(pools.attacked.clean_mark(REGION))
    a_round(ATTACKED, BYSTANDER)
    assert not os.path.exists(pools.attacked.clean_mark(REGION)), "it is scrubbed without a pause"
    assert os.path.exists(pools.bystander.clean_mark(REGION))
    messages = [decode(line) for line in output.getvalue().splitlines()]
    first = next(message for message in messages if isinstance(message, ReconcileResult))
    assert scrub_pace.PAUSES in results_of([first])[ATTACKED].notes
    assert scrub_pace.PAUSES not in results_of([first])[BYSTANDER].notes
    os.truncate(pools.attacked.region_of(f"mem/{REGION}"), 0)
    a_round()
    assert not os.path.getsize(pools.attacked.region_of(f"mem/{REGION}")), "it is made again"
    worker._pace = scrub_pace.ScrubPace()
    a_round()
    assert os.path.getsize(pools.attacked.region_of(f"mem/{REGION}"))
