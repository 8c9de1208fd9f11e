"""What agent and worker say to each other survives the pipe."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hostprep.agent.messages import (
    DesiredPool,
    Done,
    Failure,
    Message,
    PoolDone,
    Progress,
    ReconcileRequest,
    ReconcileResult,
    decode,
    encode,
)
from hostprep.api.pool_spec import PoolSpec, PoolState, RegionLayout
from hostprep.backing import Backing
from tests.support.agent_values import entry_of, observation_of, pool_observation, region, result_of

pytestmark = pytest.mark.unit

SPEC = PoolSpec(
    name="kv",
    state=PoolState.ABSENT,
    percent=12.5,
    backings=(Backing.THP, Backing.BASE),
    layout=RegionLayout.SINGLE,
    reserve_bytes=None,
    gid=7,
)
RESULT = result_of(
    entry_of(), unmet=Failure("TooLarge", "no"), steps=(("Populate", 1.5),), blocked=("node0-0",)
)
OBSERVATION = observation_of(pool_observation(region(problem="RegionMissing")))


@pytest.mark.parametrize(
    "message",
    [
        ReconcileRequest(
            number=3, pools=(DesiredPool(spec=SPEC, key="k", leave_dirty=True),), held=("kv",)
        ),
        ReconcileResult(3, OBSERVATION, (RESULT,), busy=True),
        Progress("kv", 1, 2),
        PoolDone(RESULT, OBSERVATION, (("Base", 5),)),
        Done(),
        Done(stopped=True, error=Failure("Failed", "line\nbreak", waits=True)),
    ],
)
def test_a_message_is_one_line_and_comes_out_as_it_went_in(message: Message) -> None:
    line = encode(message)

    assert line.count(b"\n") == 1
    assert decode(line) == message


@given(st.binary(max_size=60) | st.just(b'{"kind":"Done"}') | st.just(b'{"kind":"None"}'))
def test_anything_else_is_refused(line: bytes) -> None:
    with pytest.raises(ValueError, match="not a message"):
        decode(line)
