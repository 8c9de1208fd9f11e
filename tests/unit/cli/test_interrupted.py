"""Ctrl-C is one line, whatever it comes upon."""

from __future__ import annotations

import sys
import zipfile
from io import BytesIO

import pytest

from hostprep import __main__ as command_line
from hostprep.cli import main as node_half
from hostprep.cli import status

pytestmark = pytest.mark.unit


def _interrupt(*_: object, **__: object) -> None:
    raise KeyboardInterrupt


def test_while_modules_are_loaded(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command_line, "_run", _interrupt)
    assert command_line.main() == 130
    assert capsys.readouterr().err == "hostprep: interrupted\n"


@pytest.mark.parametrize(
    ("command", "told"),
    [("prepare", "run it again to go on, or release"), ("release", "run it again"), ("status", "")],
)
def test_what_to_do_is_told_where_there_is_something(
    command: str, told: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(node_half.cli, "main", _interrupt)
    assert node_half.main([command, "kv"]) == 130
    said = capsys.readouterr().err
    assert said.startswith("hostprep: interrupted")
    assert told in said
    assert ("again" in said) == bool(told)


@pytest.mark.parametrize(("is_terminal", "begin"), [(False, ""), (True, "\n")])
def test_it_ends_the_line_of_a_terminal_and_none_in_a_log(
    is_terminal: bool,
    begin: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(status, "observe_pools", _interrupt)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: is_terminal)
    assert node_half.main(["status"]) == 130
    assert capsys.readouterr().err == f"{begin}hostprep: interrupted\n"


def _fail_as_it_tidies_up(*_: object, **__: object) -> None:
    with zipfile.ZipFile(BytesIO(), "w") as archive:
        entry = archive.open("entry", "w")
        entry.write(b"")
        raise KeyboardInterrupt  # in an entry: the archive cannot be closed


def test_what_a_library_raises_as_it_tidies_up_does_not_hide_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(node_half.cli, "main", _fail_as_it_tidies_up)
    assert node_half.main(["status"]) == 130
    assert capsys.readouterr().err == "hostprep: interrupted\n"


def test_an_error_is_not_taken_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise ValueError("an error")

    monkeypatch.setattr(node_half.cli, "main", fail)
    with pytest.raises(ValueError, match="an error"):
        node_half.main(["status"])
