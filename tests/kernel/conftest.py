"""Real memory for the kernel tier, and the machine left as it was found."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from hostprep.apply.service import Node
from tests.support.machine import clean_node, machine_lock


@pytest.fixture(scope="session")
def machine() -> Iterator[None]:
    """The machine's huge pages for this session alone."""
    with machine_lock():
        yield


@pytest.fixture
def node(machine: None) -> Iterator[Node]:
    """This machine with a root of its own. Fails the test that leaves pages or mounts behind."""
    if os.geteuid() != 0:
        pytest.skip("needs root: huge pages and mounts")
    with clean_node() as node:
        yield node


@pytest.fixture
def root(node: Node) -> Path:
    """The node's root folder; made by the first prepare."""
    return Path(node.root)
