"""The attacked pool and its neighbour."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from hostprep.node.apply.service import Node
from tests.kernel.hostile.attackers import Pools, attacked_node


@pytest.fixture
def pools(node: Node) -> Iterator[Pools]:
    """Two prepared pools: one to attack, one that must not notice."""
    with attacked_node(node) as pools:
        yield pools
