"""Fixtures: a pool, its plugins, and kubelet's side."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from hostprep.paths import PoolPaths
from tests.support.kubelet_devices import KubeletDevices
from tests.unit.deviceplugin.offering import Offering, publish


@pytest.fixture
def paths(tmp_path: Path) -> PoolPaths:
    """A pool's folder as the agent leaves it; its regions are files of one page."""
    paths = PoolPaths(str(tmp_path / "root"), "kv")
    for folder in (paths.mem, paths.tickets, paths.links):
        os.makedirs(folder)
    Path(paths.claim_lock).touch()
    Path(paths.root, "hostprep.pyz").touch()
    for name in ("node0-0", "node1-0"):
        os.makedirs(paths.state_of(name))
        Path(paths.mem, name).write_bytes(bytes(4096))
    publish(paths, "node0-0", "node1-0")
    return paths


@pytest.fixture
def kubelet_dir() -> Iterator[Path]:
    """A short one: sockets lie in it, and pytest's own folders leave too little of 107 bytes."""
    with tempfile.TemporaryDirectory(prefix="hp-", dir="/tmp") as folder:
        yield Path(folder, "kubelet")


@pytest.fixture
def offering(paths: PoolPaths, kubelet_dir: Path) -> Iterator[Offering]:
    offering = Offering(paths.root, kubelet_dir)
    yield offering
    offering.close()


@pytest.fixture
def kubelet(kubelet_dir: Path) -> Iterator[KubeletDevices]:
    with KubeletDevices(kubelet_dir) as kubelet:
        yield kubelet
