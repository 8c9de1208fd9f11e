"""What cannot be read of a command line is one line with its remedy, as all other bad input."""

from __future__ import annotations

import contextlib
import grp
import json

import pytest

from hostprep.api.pool_spec import PoolSpec
from hostprep.cli import prepare
from hostprep.cli.main import main as node_main
from hostprep.engines.main import COMMANDS
from hostprep.engines.main import main as engine_main

pytestmark = pytest.mark.unit


def run(*arguments: str) -> int:
    """Run a command line in its half, as `hostprep` does."""
    return (engine_main if arguments[0] in COMMANDS else node_main)(list(arguments))


@pytest.mark.parametrize(
    ("arguments", "what", "remedy"),
    [
        (
            ["status", "-o", "xml"],
            "'xml' is not one of 'table', 'json'",
            "`hostprep status --help`",
        ),
        (["attach", "kv", "--wait=-1"], "--wait: give seconds", "`hostprep attach --help`"),
        (["release"], "no pool is named", "`hostprep status` lists"),
        (["plan"], "no pool is named", "kv --size 8Gi"),
        (["plan", "kv"], "the size of pool kv is missing", "--size 8Gi"),
        (
            ["plan", "kv", "--gid", "no such"],
            "no group 'no such'",
            "`getent group`",
        ),
        (
            ["exec", "--size", "1Gi", "--", "true"],
            "no pool is named",
            "`hostprep exec POOL -- CMD`",
        ),
        (["wait"], "no pool is named", "`hostprep wait POOL`"),
        (["exec", "kv", "true"], "unexpected argument 'true'", "after --"),
        (["wait", "kv", "more"], "unexpected argument 'more'", "`hostprep wait --help`"),
    ],
)
def test_a_usage_error_is_one_line_with_its_remedy(
    arguments: list[str], what: str, remedy: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(*arguments) == 2
    told = capsys.readouterr()
    assert not told.out
    assert told.err.count("\n") == 1
    assert told.err.startswith("hostprep: ")
    said, _, then = told.err.partition("; ")
    assert what in said
    assert remedy in then


@pytest.mark.parametrize(
    ("arguments", "mistyped", "meant"),
    [
        (["stauts"], "command 'stauts'", "status"),
        (["exce"], "command 'exce'", "exec"),
        (["prepare", "kv", "--sise", "1Gi"], "option '--sise'", "--size"),
        (["status", "--rot=/x"], "option '--rot'", "--root"),
        (["attach", "kv", "--rot", "/x"], "option '--rot'", "--root"),
        (["exec", "kv", "--enginee=vllm", "--", "true"], "option '--enginee'", "--engine"),
        (["engines", "--conector", "lmcache"], "option '--conector'", "--connector"),
    ],
)
def test_what_was_probably_meant_is_said_alike_in_both_halves(
    arguments: list[str], mistyped: str, meant: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(*arguments) == 2
    assert f"no such {mistyped} (did you mean '{meant}'?); see `" in capsys.readouterr().err


def test_the_zipapp_says_which_commands_it_has(capsys: pytest.CaptureFixture[str]) -> None:
    assert engine_main(["exce"]) == 2
    assert "no such command 'exce' (did you mean 'exec'?)" in capsys.readouterr().err
    assert engine_main(["status"]) == 2
    assert "exec, wait, attach, engines" in capsys.readouterr().err


def test_nothing_is_suggested_for_what_is_like_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("zzz") == 2
    assert run("attach", "kv", "--zzz") == 2
    assert "did you mean" not in capsys.readouterr().err


@pytest.mark.parametrize(
    "command",
    [
        ["plan", "--size", "1Mi"],
        ["prepare", "--size", "1Mi"],
        ["doctor", "--size", "1Mi"],
        ["boot", "--script", "--size", "1Mi"],
        ["status"],
        ["verify"],
        ["release"],
        ["wait", "--wait", "0"],
        ["attach"],
        ["exec", "--", "true"],
    ],
    ids=lambda command: str(command[0]),
)
def test_a_pool_is_an_argument_and_pool_and_name_say_the_same(
    command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """By a name that is no pool's: every spelling reaches the check, in every command."""
    for spelling in (["K_V"], ["--pool", "K_V"], ["--name=K_V"], ["--pool", "K_V", "K_V"]):
        assert run(command[0], *spelling, *command[1:]) == 2
        assert "'K_V' is not a DNS label" in capsys.readouterr().err, spelling
    if command[0] != "release":  # which takes several
        assert run(command[0], "a", "--pool", "b", *command[1:]) == 2
        assert "which pool, 'a' or 'b'?" in capsys.readouterr().err


@pytest.mark.parametrize("command", [*COMMANDS, "status", "prepare", "size", "release", "agent"])
def test_help_fits_80_columns_and_looks_alike_in_both_halves(
    command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    with contextlib.suppress(SystemExit):
        run(command, "--help")
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= 80
    assert text.startswith(f"Usage: hostprep {command} [OPTIONS]")
    assert "\nOptions:\n" in text
    (last,) = [line for line in text.splitlines() if "-h, --help" in line]
    assert last.endswith("  Show this message and exit.")


@pytest.mark.parametrize("main", [node_main, engine_main])
def test_programs_that_asked_for_json_get_an_object(
    main: object, capsys: pytest.CaptureFixture[str]
) -> None:
    command = "status" if main is node_main else "wait"
    assert callable(main)
    assert main([command, "--strange", "-o", "json"]) == 2
    assert json.loads(capsys.readouterr().out)["reason"] == "BadInput"


def test_a_commands_own_json_is_no_wish_for_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("exec", "--", "show", "-o", "json") == 2
    assert not capsys.readouterr().out


def test_without_a_command_the_help_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert node_main([]) == 2
    assert "A first try, on any Linux machine" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["status", "verify", "exec", "attach", "wait"])
def test_two_options_that_name_two_pools_are_refused(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(command, "--pool", "kv", "--name", "other", "--root", "/run/hp-none") == 2
    assert "which pool, 'kv' or 'other'?" in capsys.readouterr().err
    assert run(command, "--pool", "kv", "--name", "kv", "--wait", "x") == 2
    assert "which pool" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "meant"),
    [(["wait", "kv", "--timeout", "5"], "--wait"), (["plan", "kv", "--percent", "50"], "--size")],
)
def test_an_option_by_its_name_elsewhere_is_recognised(
    arguments: list[str], meant: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(*arguments) == 2
    assert f"(did you mean '{meant}'?)" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("given", "gid"), [("4242", 4242), ("daemon", grp.getgrnam("daemon").gr_gid)]
)
def test_a_group_is_a_number_or_a_name_of_this_machine(
    given: str, gid: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[PoolSpec] = []
    monkeypatch.setattr(prepare, "_plan", lambda _node, specs, _output: asked.extend(specs))
    assert run("plan", "kv", "--size", "1Gi", "--gid", given) == 0
    assert [spec.gid for spec in asked] == [gid]
