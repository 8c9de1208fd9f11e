"""What cannot be read of a command line is one line with its remedy, as all other bad input."""

from __future__ import annotations

import json

import pytest

from hostprep.cli.main import main as node_main
from hostprep.engines.main import main as engine_main

pytestmark = pytest.mark.unit


@pytest.mark.parametrize(
    ("arguments", "what", "command"),
    [
        (["plan", "--sise", "1Gi"], "no such option '--sise'", "plan"),
        (["release"], "missing argument 'POOL...'", "release"),
        (["status", "-o", "xml"], "'xml' is not one of 'table', 'json'", "status"),
        (["exec", "--size", "1Gi"], "required: --pool", "exec"),
        (["attach", "--pool", "kv", "--wait=-1"], "--wait: give seconds, 0 or more", "attach"),
    ],
)
def test_a_usage_error_is_one_line_with_its_remedy(
    arguments: list[str], what: str, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    main = engine_main if command in ("exec", "attach") else node_main
    assert main(arguments) == 2
    told = capsys.readouterr()
    assert not told.out
    assert told.err.count("\n") == 1
    assert told.err.startswith("hostprep: ")
    assert what in told.err
    assert f"; see `hostprep {command} --help`" in told.err


@pytest.mark.parametrize("main", [node_main, engine_main])
def test_programs_that_asked_for_json_get_an_object(
    main: object, capsys: pytest.CaptureFixture[str]
) -> None:
    command = "status" if main is node_main else "wait"
    assert callable(main)
    assert main([command, "--strange", "-o", "json"]) == 2
    assert json.loads(capsys.readouterr().out)["reason"] == "BadInput"


def test_without_a_command_the_help_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert node_main([]) == 2
    assert "A first try, on any Linux machine" in capsys.readouterr().err
