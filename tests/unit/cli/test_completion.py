"""A shell completes commands, options, pools and engines, in both halves of the command line."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.shell_completion import ShellComplete

from hostprep.cli.main import cli

pytestmark = pytest.mark.unit
ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def pools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("kv", "kw", "chat"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "claim.lock").touch()
    (tmp_path / "no-pool").mkdir()
    monkeypatch.setenv("HOSTPREP_ROOT", str(tmp_path))
    return tmp_path


def _complete(*words: str) -> list[str]:
    *args, incomplete = words
    shell = ShellComplete(cli, {}, "hostprep", "_HOSTPREP_COMPLETE")
    return [item.value for item in shell.get_completions(args, incomplete)]


@pytest.mark.usefixtures("pools")
@pytest.mark.parametrize(
    "command",
    ["plan", "prepare", "status", "verify", "release", "doctor", "exec", "wait", "attach"],
)
def test_pools_are_completed_wherever_one_is_named(command: str) -> None:
    assert _complete(command, "k") == ["kv", "kw"]
    assert _complete(command, "--pool", "c") == ["chat"]
    assert _complete(command, "--name", "") == ["chat", "kv", "kw"]
    assert not _complete(command, "--root", "/nowhere", "k")


def test_what_cannot_be_read_completes_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert not _complete("status", "--root", f"{tmp_path}/file", "")


@pytest.mark.parametrize(
    ("words", "completed"),
    [
        (("sta",), ["status"]),
        (("e",), ["engines", "exec"]),
        (("exec", "--en"), ["--engine"]),
        (("exec", "kv", "--engine", "vllm-o"), ["vllm-offloading"]),
        (("engines", "sg"), ["sglang"]),
        (("wait", "-o", "j"), ["json"]),
        (("prepare", "--back"), ["--backing"]),
    ],
)
def test_commands_options_and_engines_are_completed(
    words: tuple[str, ...], completed: list[str]
) -> None:
    assert _complete(*words) == completed


def test_bash_reads_the_script_and_asks_as_it_says(pools: Path) -> None:
    environ = {**os.environ, "_HOSTPREP_COMPLETE": "bash_source", "HOSTPREP_ROOT": str(pools)}
    code = (
        "import sys; sys.argv = ['hostprep']; from hostprep.__main__ import main; sys.exit(main())"
    )
    command = [sys.executable, "-c", code]
    script = subprocess.run(command, env=environ, capture_output=True, text=True, check=True)
    assert "complete -o nosort -F" in script.stdout
    asked = {"_HOSTPREP_COMPLETE": "bash_complete", "COMP_WORDS": "hostprep exec k",
             "COMP_CWORD": "2"}  # fmt: skip
    answer = subprocess.run(
        command, env=environ | asked, capture_output=True, text=True, check=True
    )
    assert answer.stdout.split() == ["plain,kv", "plain,kw"]


def test_the_manual_pages_are_current() -> None:
    spec = importlib.util.spec_from_file_location("man_pages", ROOT / "scripts" / "man_pages.py")
    assert spec is not None
    assert spec.loader is not None
    man_pages = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(man_pages)
    assert man_pages.main(["--check"]) == 0, "run python scripts/man_pages.py"
    assert set(man_pages.pages()) >= {"hostprep.1", "hostprep-exec.1", "hostprep-prepare.1"}
