"""HostMemoryNodes for tests: one whose status says all that can be said, and any at random."""

from __future__ import annotations

from hypothesis import strategies as st

from hostprep.api.conditions import Condition
from hostprep.api.node_resource import (
    GivenUp,
    HugePageStatus,
    KeptStatus,
    NodeStatus,
    Phase,
    PoolStatus,
    RegionStatus,
    Step,
)

_LATEST_S = 4_102_444_800  # the year 2100

_texts = st.text(max_size=12)
_numbers = st.integers(0, 1 << 50)
_times = st.none() | st.integers(0, _LATEST_S).map(float)

conditions = st.builds(
    Condition,
    type=_texts,
    status=st.sampled_from(["True", "False", "Unknown"]),
    reason=_texts,
    message=_texts,
    since_s=_times,
    observed_generation=st.none() | _numbers,
)
_kept = st.builds(
    KeptStatus,
    name=_texts,
    since_s=_times,
    reported_s=_times,
    recovered_blocks=st.none() | _numbers,
    refused=st.lists(_texts, max_size=2).map(tuple),
)
_given_up = st.builds(GivenUp, name=_texts, at_s=_times, reason=_texts)
_regions = st.builds(
    RegionStatus,
    name=_texts,
    size_bytes=_numbers,
    backing=_texts,
    placement=_texts,
    state=_texts,
    message=_texts,
    kept=st.none() | _kept,
    given_up=st.none() | _given_up,
)
_pools = st.builds(
    PoolStatus,
    name=_texts,
    uid=_texts,
    generation=_numbers,
    phase=st.sampled_from(list(Phase)),
    reason=_texts,
    message=_texts,
    backing=_texts,
    wanted_bytes=_numbers,
    ready_bytes=_numbers,
    progress_percent=st.none() | st.integers(0, 100),
    regions_leased=_numbers,
    blocked=st.lists(_texts, max_size=2).map(tuple),
    handoff_generation=_numbers,
    ready_since_s=_times,
    steps=st.lists(
        st.builds(Step, name=_texts, seconds=st.floats(0, 1e6, allow_nan=False)), max_size=2
    ).map(tuple),
    regions=st.lists(_regions, max_size=2).map(tuple),
)
node_statuses = st.builds(
    NodeStatus,
    observed_generation=_numbers,
    boot_id=_texts,
    agent_version=_texts,
    summary=_texts,
    pools=st.lists(_pools, max_size=2).map(tuple),
    huge_pages=st.lists(
        st.builds(HugePageStatus, page_bytes=_numbers, total=_numbers, held=_numbers), max_size=2
    ).map(tuple),
    conditions=st.lists(conditions, max_size=2).map(tuple),
)


def _damaged_pool() -> PoolStatus:
    regions = tuple(
        RegionStatus(
            name=f"node0-{index}",
            size_bytes=4 << 30,
            backing="HugeTLB2Mi",
            placement="node:0",
            state="Damaged" if index else "Leased",
            message="a page is poisoned" if index else "",
            kept=KeptStatus(
                name="chat",
                since_s=1_700_000_000.0,
                reported_s=1_700_000_000.0,
                recovered_blocks=3,
                refused=("weights",),
            ),
            given_up=GivenUp(name="chat", at_s=1_700_000_000.0, reason="AgeLimit"),
        )
        for index in range(2)
    )
    return PoolStatus(
        name="kv",
        uid="0a1b",
        generation=3,
        phase=Phase.DEGRADED,
        reason="Damaged",
        message="region node0-1 is damaged",
        backing="HugeTLB2Mi",
        wanted_bytes=8 << 30,
        ready_bytes=4 << 30,
        progress_percent=50,
        regions_leased=1,
        blocked=("node0-0",),
        handoff_generation=2,
        ready_since_s=1_700_000_000.0,
        steps=(Step("populate", 1.25),),
        regions=regions,
    )


def full_status() -> NodeStatus:
    """A status in which no field is left out."""
    condition = Condition(
        type="Ready",
        status="False",
        reason="Damaged",
        message="region node0-1 is damaged",
        since_s=1_700_000_000.0,
        observed_generation=4,
    )
    return NodeStatus(
        observed_generation=4,
        boot_id="6d1cb7a4-3f0e-4a53-9d5e-2f4a0f6f9a11",
        agent_version="0.1.0",
        summary="kv 4 of 8 GiB",
        pools=(_damaged_pool(),),
        huge_pages=(HugePageStatus(page_bytes=2 << 20, total=4096, held=4096),),
        conditions=(condition,),
    )
