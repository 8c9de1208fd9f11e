"""The engines' environments: their locks, their folders in the cache, what fails how."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from hostprep.errors import FailedError
from testbed.engines import environments, virtual_environment
from testbed.engines.lock import lock_file, parse_pins, rendered

pytestmark = pytest.mark.unit

_PIN = re.compile(r"[A-Za-z0-9._-]+==[0-9][A-Za-z0-9.]*( --hash=sha256:[0-9a-f]{64})+")


@pytest.mark.parametrize("name", ["torch", *environments.ALL])
def test_every_package_is_pinned_and_hashed_and_no_index_is_named(name: str) -> None:
    text = lock_file(name).read_text("ascii")
    assert "://" not in text
    lines = text.replace("\\\n", " ").splitlines()[1:]
    for line in lines:
        assert _PIN.fullmatch(" ".join(line.split())), line
    assert len(parse_pins(text)) == len(lines)


def test_a_lock_is_read_as_it_was_written() -> None:
    pins = {"b": "2", "A": "1.0.post1"}
    text = rendered(pins, {"A": ["1" * 64, "0" * 64], "b": ["2" * 64]})
    assert parse_pins(text) == pins
    assert text.index("A==") < text.index("b==")
    assert text.index("0" * 64) < text.index("1" * 64)


def test_another_version_anywhere_below_is_another_folder(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    locks = {name: lock_file(name).read_text("ascii") for name in ("torch", "lmcache", "mooncake")}
    for name, text in locks.items():
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(environments, "lock_file", lambda name: tmp_path / name)
    before = {name: environments.folder_of(name) for name in locks}
    (tmp_path / "torch").write_text(locks["torch"].replace("torch==2.13.0", "torch==2.13.1"))
    after = {name: environments.folder_of(name) for name in locks}
    assert before["torch"] != after["torch"]
    assert before["lmcache"] != after["lmcache"]
    assert before["mooncake"] == after["mooncake"]


def test_one_whose_python_has_gone_is_not_there(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(environments, "cache_folder", lambda: tmp_path)
    assert environments.locate("mooncake") is None
    programs = environments.folder_of("mooncake") / "bin"
    programs.mkdir(parents=True)
    (programs / "python").symlink_to("/no/such/python")
    assert environments.locate("mooncake") is None
    (programs / "python").unlink()
    (programs / "python").symlink_to(sys.executable)
    assert environments.locate("mooncake") == programs.parent


def test_an_index_that_has_nothing_is_said_and_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(environments, "cache_folder", lambda: tmp_path)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    with pytest.raises(FailedError, match=r"could not install mooncake\.lock") as failed:
        environments.build(["mooncake"], lambda _: None)
    assert "can be reached" in (failed.value.remedy or "")
    assert [path.name for path in tmp_path.iterdir()] == ["builder.lock"]


def test_programs_name_the_interpreter_where_it_will_be(tmp_path: Path) -> None:
    made, used = tmp_path / "made", tmp_path / "used"
    programs = made / "bin"
    programs.mkdir(parents=True)
    (programs / "vllm").write_text(f"#!{made}/bin/python\nimport vllm  # {made}\n")
    (programs / "binary").write_bytes(b"\x7fELF" + bytes(8))
    (programs / "python").symlink_to(sys.executable)
    virtual_environment.move_scripts(made, used)
    text = (programs / "vllm").read_text()
    assert text.startswith(f"#!{used}/bin/python\n")
    assert (programs / "binary").read_bytes() == b"\x7fELF" + bytes(8)
    assert (programs / "python").is_symlink()
