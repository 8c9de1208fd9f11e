"""The zipapp beside the pools: a file for each version, kept while a process runs from it."""

from __future__ import annotations

import fcntl
import hashlib
import os
import stat
import subprocess
import sys
import threading
import zipfile
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path

import pytest

from hostprep.linux.files import atomic_write
from hostprep.node.apply import publish
from hostprep.node.apply.publish import build_zipapp, version_name
from hostprep.zipapp import STABLE_NAME, hold, is_version, pass_on
from tests.support.zipapps import another_version

pytestmark = pytest.mark.unit


SHEBANG = b"#!/usr/bin/env python3\n"


class Root:
    """A folder in which versions are published."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        self.stable = folder / STABLE_NAME
        self._monkeypatch = monkeypatch

    def publish(self, data: bytes) -> Path:
        """Publish these bytes; return the version's own file."""
        self._monkeypatch.setattr(publish, "build_zipapp", lambda: data)
        publish.publish_zipapp(str(self.folder))
        assert self.stable.read_bytes() == data
        return self.folder / version_name(data)

    @property
    def versions(self) -> set[Path]:
        return {path for path in self.folder.iterdir() if is_version(path.name)}


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Root:
    return Root(tmp_path, monkeypatch)


@pytest.fixture(scope="module")
def data() -> list[bytes]:
    return [build_zipapp(), another_version(1), another_version(2)]


@pytest.fixture
def held(root: Root, data: list[bytes]) -> Iterator[Path]:
    """The first version, published, with a process that runs from it."""
    version = root.publish(data[0])
    found = hold(str(root.stable))
    assert found is not None
    assert found[0] == str(version)
    yield version
    os.close(found[1])


def test_the_stable_name_is_the_very_file_of_the_version(root: Root, data: list[bytes]) -> None:
    version = root.publish(data[0])
    assert version.name.startswith("hostprep-0.1.0-")
    assert root.stable.samefile(version)
    assert not root.stable.is_symlink()
    assert stat.S_IMODE(version.stat().st_mode) == 0o755
    assert {path.name for path in root.folder.iterdir()} == {STABLE_NAME, version.name}


def test_what_is_current_is_left_alone(root: Root, data: list[bytes]) -> None:
    before = root.publish(data[0]).stat()
    again = root.publish(data[0]).stat()
    assert (again.st_ino, again.st_mtime_ns) == (before.st_ino, before.st_mtime_ns)


def test_a_version_that_nobody_runs_from_goes_with_the_next(root: Root, data: list[bytes]) -> None:
    root.publish(data[0])
    new = root.publish(data[1])
    assert root.versions == {new}


def test_a_version_in_use_stays_until_its_last_process_ended(
    root: Root, data: list[bytes], held: Path
) -> None:
    second = hold(str(root.stable))
    assert second is not None
    new = root.publish(data[1])
    assert root.versions == {held, new}
    assert held.read_bytes() == data[0]
    os.close(second[1])
    root.publish(data[2])
    assert held in root.versions
    assert new not in root.versions


def test_a_downgrade_leads_to_the_file_that_is_still_in_use(
    root: Root, data: list[bytes], held: Path
) -> None:
    inode = held.stat().st_ino
    new = root.publish(data[1])
    assert root.publish(data[0]) == held
    assert held.stat().st_ino == inode
    assert root.stable.samefile(held)
    assert not new.exists()


@pytest.mark.parametrize("step", ["written", "linked"])
def test_a_publisher_killed_half_way_is_finished_by_the_next(
    root: Root, data: list[bytes], held: Path, step: str
) -> None:
    version = root.folder / version_name(data[1])
    atomic_write(str(version), data[1], mode=0o755)
    if step == "linked":
        os.link(version, root.folder / f".{STABLE_NAME}.new")
    assert root.stable.samefile(held)
    assert root.publish(data[1]) == version
    assert root.stable.samefile(version)
    assert root.versions == {held, version}


def test_what_an_earlier_release_or_a_container_runtime_left_is_replaced(
    root: Root, data: list[bytes]
) -> None:
    root.stable.write_bytes(data[1])
    assert hold(str(root.stable)) is None
    root.publish(data[0])
    root.stable.unlink()
    root.stable.mkdir()
    root.publish(data[0])


def test_a_damaged_version_is_written_again(root: Root, data: list[bytes]) -> None:
    version = root.publish(data[0])
    version.write_bytes(data[0][:-1])
    assert root.publish(data[0]).read_bytes() == data[0]


def test_nothing_else_is_taken_for_a_version(root: Root, data: list[bytes]) -> None:
    (root.folder / "hostprep-folder.pyz").mkdir()
    (root.folder / "hostprep-link.pyz").symlink_to(STABLE_NAME)
    other = root.folder / "other.pyz"
    other.write_bytes(data[1])
    root.publish(data[0])
    root.publish(data[1])
    assert {"hostprep-folder.pyz", "hostprep-link.pyz"} < {path.name for path in root.versions}
    assert hold(str(other)) is None
    assert hold(str(root.folder / "none.pyz")) is None


def test_who_locks_a_version_for_good_stops_no_process_from_using_it(
    root: Root, data: list[bytes]
) -> None:
    version = root.publish(data[0])
    with version.open("rb") as hostile:
        fcntl.flock(hostile, fcntl.LOCK_EX)
        found = hold(str(root.stable))
        assert found is not None
        assert found[0] == str(version)
        os.close(found[1])
        root.publish(data[1])
        assert version.exists()


def test_a_process_that_comes_while_its_version_is_removed_gets_the_next(
    root: Root, data: list[bytes]
) -> None:
    old = root.publish(data[0])
    found = []
    with publish.unused_versions(str(root.folder)) as unused:
        assert unused == (old.name,)
        process = threading.Thread(target=lambda: found.append(hold(str(root.stable))))
        process.start()
        new = root.publish(data[1])
        old.unlink()
    process.join()
    assert found[0] is not None
    assert found[0][0] == str(new)
    os.close(found[0][1])


def test_a_command_gets_the_version_and_its_lock_in_place_of_the_stable_name(
    root: Root, data: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    version = root.publish(data[0])
    kept: list[int] = []
    monkeypatch.setattr(os, "set_inheritable", lambda fd, _: kept.append(fd))
    passed = pass_on({"PYTHONPATH": f"/a:{root.stable}::{version}:/b/hostprep.pyz"})
    assert passed == {"PYTHONPATH": f"/a:{version}::{version}:/b/hostprep.pyz"}
    assert len(kept) == 2
    root.publish(data[1])
    assert version.exists()
    for fd in kept:
        os.close(fd)
    root.publish(data[2])
    assert not version.exists()
    assert pass_on({}) == pass_on({"PYTHONPATH": ""}) == {}


def test_main_is_the_same_bytes_at_the_same_place_in_all_versions(data: list[bytes]) -> None:
    """Python reads it by the directory of the version that was there before."""
    first = zipfile.ZipFile(BytesIO(data[0])).infolist()[0]
    assert (first.filename, first.header_offset) == ("__main__.py", len(SHEBANG))
    end = len(SHEBANG) + 30 + len(first.filename) + first.compress_size
    assert hashlib.sha256(data[0][:end]).hexdigest()[:16] == "53102bd2e5ba99f9"
    assert data[1][:end] == data[0][:end]


def test_a_version_published_while_python_starts_is_the_one_that_runs(
    root: Root, data: list[bytes], tmp_path: Path
) -> None:
    root.publish(data[0])
    # Python imports sitecustomize when it has read the zip's directory, before __main__.
    path = tmp_path / "site"
    path.mkdir()
    (path / "sitecustomize.py").write_text(
        f"import os; os.replace({str(tmp_path / 'next.pyz')!r}, {str(root.stable)!r})"
    )
    version = root.folder / version_name(data[1])
    version.write_bytes(data[1])
    os.link(version, tmp_path / "next.pyz")
    done = subprocess.run(
        [sys.executable, root.stable, "engines", "-o", "json"],
        env={"PYTHONPATH": str(path)}, capture_output=True, text=True, check=False, cwd="/",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert root.stable.samefile(version)
