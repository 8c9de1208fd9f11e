"""Which requests a rule of the fault proxy hits."""

from __future__ import annotations

import pytest

from testbed.faults import Asked, FaultList, answer, cut, delay, expired

pytestmark = pytest.mark.unit
_LIST = Asked("GET", "/api/v1/nodes", {})
_WATCH = Asked("GET", "/api/v1/nodes", {"watch": "true", "resourceVersion": "7"})
_PATCH = Asked("PATCH", "/apis/hostprep.dev/v1alpha1/hostmemorynodes/a/status", {})


def test_a_rule_hits_what_it_names_only() -> None:
    assert answer(429, methods=("PATCH",)).matches(_PATCH)
    assert not answer(429, methods=("PATCH",)).matches(_LIST)
    assert cut(path="hostmemorynodes/.*/status$").matches(_PATCH)
    assert not cut(path="hostmemorynodes").matches(_LIST)
    assert expired().matches(_WATCH)
    assert not expired().matches(_LIST)
    assert delay(1, watches=False).matches(_LIST)
    assert not delay(1, watches=False).matches(_WATCH)


def test_a_rule_hits_as_often_as_it_says() -> None:
    faults = FaultList()
    faults.add(answer(500, times=2))
    assert [len(faults.hitting(_LIST)) for _ in range(4)] == [1, 1, 0, 0]


def test_a_share_of_the_requests_is_hit_and_the_seed_decides_which() -> None:
    runs = []
    for _ in range(2):
        faults = FaultList(seed=7)
        faults.add(answer(500, share=0.25))
        runs.append([bool(faults.hitting(_LIST)) for _ in range(1000)])
    assert runs[0] == runs[1]
    assert 200 < sum(runs[0]) < 300


def test_a_rule_that_was_taken_away_hits_nothing() -> None:
    faults = FaultList()
    remove = faults.add(cut())
    remove()
    remove()
    assert faults.hitting(_LIST) == []
