"""The root folder: the real one, whatever tree the host is."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hostprep.node.facts import Mount
from hostprep.node.observe.host import fs_type_of
from hostprep.node.observe.root import observe_root

pytestmark = pytest.mark.unit


def _ignore(_: str) -> None:
    """Drop a warning."""


def _entry(path: str, fs_type: str, device: tuple[int, int]) -> Mount:
    return Mount(path, fs_type, "none", ("rw",), device)


def test_an_existing_folder_is_described(tmp_path: Path) -> None:
    facts = observe_root(str(tmp_path), _ignore)
    status = os.statvfs(tmp_path)
    assert (facts.path, facts.nearest_path) == (str(tmp_path), str(tmp_path))
    assert facts.exists
    assert facts.writable
    assert facts.fs_type != "unknown"
    assert facts.free_bytes == pytest.approx(status.f_bavail * status.f_frsize, abs=1 << 28)


def test_a_folder_yet_to_be_made_is_judged_by_its_nearest_parent(tmp_path: Path) -> None:
    facts = observe_root(str(tmp_path / "a/b/c"), _ignore)
    assert not facts.exists
    assert facts.nearest_path == str(tmp_path)
    assert facts.writable


def test_a_file_in_the_way_is_not_writable(tmp_path: Path) -> None:
    (tmp_path / "pools").write_text("")
    facts = observe_root(str(tmp_path / "pools"), _ignore)
    assert facts.exists
    assert not facts.writable


def test_a_symbolic_link_is_shown_as_one_even_if_it_dangles(tmp_path: Path) -> None:
    (tmp_path / "pools").symlink_to("nowhere")
    facts = observe_root(str(tmp_path / "pools"), _ignore)
    assert "symbolic link" in facts.refused
    assert facts.exists
    assert facts.nearest_path == str(tmp_path)


def test_memory_in_dev_shm_is_tmpfs() -> None:
    assert observe_root("/dev/shm", _ignore).fs_type == "tmpfs"


def test_procfs_has_no_room_for_pools() -> None:
    assert observe_root("/proc/hostprep", _ignore).free_bytes == 0


def test_the_deepest_mount_with_the_folders_device_decides(tmp_path: Path) -> None:
    status = tmp_path.stat()
    device = (os.major(status.st_dev), os.minor(status.st_dev))
    entries = (
        _entry("/", "ext4", device),
        _entry(str(tmp_path.parent), "hidden", (0, 99999)),
        _entry(str(tmp_path) + "x", "neighbour", device),
    )
    assert fs_type_of(str(tmp_path), entries) == "ext4"


def test_without_a_matching_device_the_deepest_and_latest_mount_decides(tmp_path: Path) -> None:
    entries = (
        _entry(str(tmp_path), "first", (0, 99998)),
        _entry(str(tmp_path), "second", (0, 99999)),
        _entry("/", "ext4", (0, 99997)),
    )
    assert fs_type_of(str(tmp_path), entries) == "second"


def test_no_mount_above_is_unknown(tmp_path: Path) -> None:
    assert fs_type_of(str(tmp_path), ()) == "unknown"
