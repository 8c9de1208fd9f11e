"""A pool over a real region: bytes go where the layout says; only the leader hands out slots."""

from __future__ import annotations

import pytest

import hostprep
from hostprep.errors import BadInputError
from hostprep.node.apply.service import Node
from hostprep.slots import REUSED, WRITE, Group, Layout, over
from testbed.machine import POOL, pool_of
from tests.unit.slots.play import HASH_BYTES, request_of

pytestmark = pytest.mark.kernel

_LAYOUT = Layout(3, (Group("full", 100, 4096), Group("window", 10, 4096, 1 << 20, 5)))


def test_what_one_request_stores_another_loads(node: Node) -> None:
    node.prepare([pool_of()])
    with hostprep.attach(POOL, root=node.root) as memory:
        pool = over(memory, layout=_LAYOUT, hash_bytes=HASH_BYTES)
        tokens = list(range(13))
        (claim,) = pool.claim_batch([request_of(tokens)]).claims
        for group, use in enumerate(claim.uses):
            for block in use.blocks(WRITE):
                at = pool.layout.offset_bytes(group, use.slots[block])
                memory.buffer[at : at + 4096] = bytes([1 + group * 10 + block]) * 4096
        claim.commit()
        claim.release()
        (again,) = pool.claim_batch([request_of(tokens)]).claims
        for group, use in enumerate(again.uses):
            assert use.blocks(REUSED)
            for block in use.blocks(REUSED):
                at = pool.layout.offset_bytes(group, use.slots[block])
                assert memory.buffer[at : at + 4096].tobytes() == (
                    bytes([1 + group * 10 + block]) * 4096
                )


def test_a_process_that_joined_or_reads_hands_out_nothing(node: Node) -> None:
    node.prepare([pool_of()])
    with hostprep.attach(POOL, root=node.root) as memory:
        region = memory.region.name
        with hostprep.join(POOL, lease_id=memory.lease_id, region=region, root=node.root) as rank:
            with pytest.raises(BadInputError, match="not this process's"):
                over(rank, layout=_LAYOUT)
        with hostprep.attach(POOL, region=region, read_only=True, root=node.root) as reader:
            with pytest.raises(BadInputError, match="not this process's"):
                over(reader, layout=_LAYOUT)
        with pytest.raises(BadInputError, match="has no layout"):
            over(memory)


def test_a_pool_that_outlives_its_attachment_refuses_no_later_one(node: Node) -> None:
    node.prepare([pool_of()])
    with hostprep.attach(POOL, root=node.root) as memory:
        earlier = over(memory, layout=_LAYOUT)
    with hostprep.attach(POOL, root=node.root) as memory:
        assert over(memory, layout=_LAYOUT) is not earlier
