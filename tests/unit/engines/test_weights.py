"""What stands for an engine's weights: commits, digests, and when neither can be told."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from hostprep.engines.weights import (
    UnknownError,
    check_format,
    folder_digest,
    folder_stamp,
    hub_commit,
    process_started_s,
)

pytestmark = pytest.mark.unit

_COMMIT = "0123456789abcdef0123456789abcdef01234567"


def _later() -> float:
    return time.time() + 60


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    (folder / "deeper").mkdir(parents=True)
    (folder / "config.json").write_text("{}", "utf-8")
    (folder / "deeper" / "weights").write_bytes(b"1234")
    return folder


def _digest(folder: Path) -> str:
    return folder_digest(str(folder), started_s=_later())[0]


def test_another_byte_is_another_digest_whatever_size_and_mtime_say(model: Path) -> None:
    file = model / "deeper" / "weights"
    before, status = _digest(model), file.stat()
    stamp = folder_stamp(str(model), started_s=_later())
    while time.time_ns() - status.st_ctime_ns < 50_000_000:  # a tick of the kernel's clock
        time.sleep(0.01)
    file.write_bytes(b"1235")
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert _digest(model) != before
    assert folder_stamp(str(model), started_s=_later()) != stamp


def test_a_file_of_another_name_is_another_digest(model: Path) -> None:
    before = _digest(model)
    (model / "config.json").rename(model / "other.json")
    assert _digest(model) != before


def test_a_copy_has_the_same_digest_and_another_stamp(model: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    (copy / "deeper").mkdir(parents=True)
    for name in ("config.json", "deeper/weights"):
        (copy / name).write_bytes((model / name).read_bytes())
    (copy / ".cache").mkdir()
    (copy / ".cache" / "when").write_text("now", "utf-8")
    assert _digest(copy) == _digest(model)
    stamps = [folder_stamp(str(folder), started_s=_later()) for folder in (copy, model)]
    assert stamps[0] != stamps[1]


def test_files_that_changed_after_the_process_began_are_unknown(model: Path) -> None:
    began_s = (model / "config.json").stat().st_ctime
    with pytest.raises(UnknownError, match=r"config\.json .* changed after"):
        folder_digest(str(model), started_s=began_s)


def test_links_that_lead_round_are_no_model(model: Path) -> None:
    (model / "again").symlink_to(model)
    with pytest.raises(UnknownError):
        folder_stamp(str(model), started_s=_later())


@pytest.mark.parametrize("name", ["empty", "missing"])
def test_a_folder_without_files_is_unknown(tmp_path: Path, name: str) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(UnknownError):
        folder_digest(str(tmp_path / name), started_s=_later())


def _noted(cache: Path, name: str, commit: str) -> None:
    refs = cache / "models--org--name" / "refs"
    refs.mkdir(parents=True)
    (refs / name).write_text(commit, "ascii")


def test_a_branch_is_the_commit_that_the_cache_noted(tmp_path: Path) -> None:
    _noted(tmp_path, "main", _COMMIT)
    assert hub_commit("org/name", None, str(tmp_path), started_s=_later()) == f"org/name@{_COMMIT}"


def test_a_commit_needs_no_cache() -> None:
    found = hub_commit("org/name", _COMMIT, "/nowhere", started_s=0)
    assert found == f"org/name@{_COMMIT}"


def test_a_branch_that_moved_since_the_start_is_unknown(tmp_path: Path) -> None:
    _noted(tmp_path, "main", _COMMIT)
    with pytest.raises(UnknownError, match="changed while the engine started"):
        hub_commit("org/name", None, str(tmp_path), started_s=time.time() - 60)


@pytest.mark.parametrize("revision", ["other", "../../main", "a/../../main"])
def test_a_branch_that_was_not_noted_is_unknown(tmp_path: Path, revision: str) -> None:
    _noted(tmp_path, "main", _COMMIT)
    with pytest.raises(UnknownError):
        hub_commit("org/name", revision, str(tmp_path), started_s=_later())


def test_a_note_that_is_no_commit_is_unknown(tmp_path: Path) -> None:
    _noted(tmp_path, "main", "main")
    with pytest.raises(UnknownError, match="no commit"):
        hub_commit("org/name", None, str(tmp_path), started_s=_later())


def test_formats_that_read_from_elsewhere_are_unknown() -> None:
    check_format("safetensors")
    for load_format in ("dummy", "runai_streamer", "tensorizer", "something_new"):
        with pytest.raises(UnknownError):
            check_format(load_format)


def test_a_process_began_before_now_and_after_this_machine() -> None:
    now_s = time.time()
    assert now_s - time.clock_gettime(time.CLOCK_BOOTTIME) < process_started_s() < now_s
