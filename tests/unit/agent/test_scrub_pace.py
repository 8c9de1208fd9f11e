"""The share of root's time that the scrubs of one pool may take."""

from __future__ import annotations

import pytest

from hostprep.agent.scrub_pace import ScrubPace

pytestmark = pytest.mark.unit


def test_scrubs_now_and_then_never_wait() -> None:
    pace = ScrubPace()
    for hour in range(24):
        assert not pace.rests("kv", now_s=hour * 3600.0)
        pace.count("kv", 20.0, now_s=hour * 3600.0)
    assert not pace.rests("kv", now_s=24 * 3600.0)


def test_a_pool_made_dirty_in_a_loop_takes_a_quarter_of_the_time() -> None:
    pace = ScrubPace()
    now_s = scrubbed_s = 0.0
    while now_s < 10_000:
        if pace.rests("kv", now_s=now_s):
            now_s += 1.0
            continue
        now_s += 8.0
        scrubbed_s += 8.0
        pace.count("kv", 8.0, now_s=now_s)
    assert 0.2 < scrubbed_s / now_s < 0.27


def test_a_pool_that_rests_holds_up_no_other() -> None:
    pace = ScrubPace()
    pace.count("kv", 1000.0, now_s=0.0)
    assert pace.rests("kv", now_s=1.0)
    assert not pace.rests("batch", now_s=1.0)
    assert not pace.rests("kv", now_s=3950.0)
