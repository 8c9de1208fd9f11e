"""Labels on files of a real tmpfs: it keeps them for whoever may set them, SELinux or not."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from hostprep.linux.mounts import detach, mount
from hostprep.linux.selinux import read_label, share_tree
from hostprep.node.observe.root import observe_root

pytestmark = pytest.mark.kernel

_BEFORE = "system_u:object_r:container_var_run_t:s0"
_SHARED = "system_u:object_r:container_file_t:s0"


@pytest.fixture
def folder(machine: None, tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "root"
    path.mkdir()
    mount("tmpfs", str(path), "size=1m,mode=755")
    yield path
    detach(str(path))


def _label(path: Path, label: str = _BEFORE) -> Path:
    try:
        os.setxattr(path, "security.selinux", f"{label}\0".encode(), follow_symlinks=False)
    except OSError as error:  # SELinux itself is on, or the kernel lacks these attributes
        pytest.skip(f"this kernel keeps no such label: {error}")
    return path


def _file(path: Path, label: str = _BEFORE) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"")
    return _label(path, label)


def test_all_below_is_shared_and_what_is_elsewhere_is_not(folder: Path, tmp_path: Path) -> None:
    _label(folder)
    pool = folder / "kv"
    pool.mkdir()
    _label(pool)
    outside = _file(folder.parent / "outside") if _keeps_labels(tmp_path) else None
    sidecar = _file(pool / "state/node0-0/sidecar.json", f"{_BEFORE}:c1,c2")
    view = _file(pool / "devices/a/state/node0-0/lease.json")
    fifo = pool / "tickets-fifo"
    os.mkfifo(fifo)
    _label(fifo)
    link = pool / "link"
    link.symlink_to(folder.parent / "outside")
    share_tree(str(folder))
    for path in (folder, pool, sidecar, view, fifo):
        assert read_label(str(path)) == _SHARED
    if outside is not None:
        assert read_label(str(outside)) == _BEFORE


def _keeps_labels(path: Path) -> bool:
    try:
        os.setxattr(path, "security.selinux", b"a:b:c:s0\0")
    except OSError:
        return False
    os.removexattr(path, "security.selinux")
    return True


def test_without_a_label_on_the_root_nothing_is_looked_at(folder: Path) -> None:
    inside = _file(folder / "kv")
    share_tree(str(folder))
    assert read_label(str(inside)) == _BEFORE


def test_folders_without_end_are_not_walked_without_end(folder: Path) -> None:
    _label(folder)
    deep = os.open(folder, os.O_RDONLY)
    for _ in range(2000):
        os.mkdir("a", dir_fd=deep)
        below = os.open("a", os.O_RDONLY, dir_fd=deep)
        os.close(deep)
        deep = below
    os.close(deep)
    share_tree(str(folder))
    assert read_label(str(folder / "kv")) == ""


def test_the_doctor_is_told_what_containers_cannot_read(folder: Path) -> None:
    assert not observe_root(str(folder), print).unshared
    _label(folder)
    assert observe_root(str(folder), print).unshared == f"{folder} ({_BEFORE})"
    share_tree(str(folder))
    handoff = _file(folder / "kv/handoff.json", f"{_SHARED}:c7")
    assert observe_root(str(folder), print).unshared == f"{handoff} ({_SHARED}:c7)"


@pytest.mark.parametrize("made", ["state/node0-0/lease", "tickets/0001", "mem/node0-0"])
def test_the_doctor_is_told_of_what_engines_made_and_of_regions(folder: Path, made: str) -> None:
    _label(folder)
    share_tree(str(folder))
    path = _file(folder / "kv" / made, f"{_SHARED}:c7")
    assert observe_root(str(folder), print).unshared == f"{path} ({_SHARED}:c7)"
    share_tree(str(folder))
    assert not observe_root(str(folder), print).unshared


def test_the_doctor_follows_no_link_and_looks_at_so_many_files_only(
    folder: Path, tmp_path: Path
) -> None:
    """Engines may make links, folders in folders and files without end."""
    _label(folder)
    share_tree(str(folder))
    if _keeps_labels(tmp_path):
        _file(tmp_path / "outside/file")
    (folder / "link").symlink_to(tmp_path / "outside")
    assert not observe_root(str(folder), print).unshared
    many = folder / "many"
    many.mkdir()
    for number in range(5000):
        (many / f"{number:04}").touch()
    _file(many / "9999", f"{_SHARED}:c7")
    assert not observe_root(str(folder), print).unshared
