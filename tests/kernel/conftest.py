"""Where the kernel tier's pools are."""

from __future__ import annotations

from pathlib import Path

import pytest

from hostprep.node.apply.service import Node


@pytest.fixture
def root(node: Node) -> Path:
    """The node's root folder; made by the first prepare."""
    return Path(node.root)
