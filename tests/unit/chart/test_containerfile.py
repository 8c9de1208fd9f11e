"""The image's recipe fits the project and the chart; it is built elsewhere."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

pytestmark = pytest.mark.unit

_ROOT = Path(__file__).parents[3]
_CHART = _ROOT / "charts" / "hostprep" / "templates"
_TEXT = (_ROOT / "Containerfile").read_text().replace("\\\n", " ")
_PROJECT: dict[str, Any] = tomllib.loads((_ROOT / "pyproject.toml").read_text())


def _pins(lock: str) -> dict[str, str]:
    text = (_ROOT / lock).read_text()
    return dict(re.findall(r"^([a-z0-9][a-z0-9._-]*)==(\S+) \\$", text, re.MULTILINE))


def _instructions(name: str) -> list[str]:
    return [line.partition(" ")[2].strip() for line in _TEXT.splitlines() if line.startswith(name)]


def test_programs_that_the_chart_starts_are_entry_points_of_the_project() -> None:
    started = set()
    for path in _CHART.rglob("*.yaml"):
        started |= set(re.findall(r"command: \[([a-z-]+), [a-z]+\]", path.read_text()))
    assert started == set(_PROJECT["project"]["scripts"])


def test_everything_copied_is_there_and_not_ignored() -> None:
    ignored = (_ROOT / ".containerignore").read_text().splitlines()
    for instruction in _instructions("COPY"):
        if instruction.startswith("--from="):
            continue
        for source in instruction.split()[:-1]:
            assert (_ROOT / source).exists(), source
            assert f"!{source}" in ignored, source


def test_the_packages_of_the_wheel_are_copied() -> None:
    sources = " ".join(_instructions("COPY")).split()
    wheel = _PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]
    for package in wheel["packages"]:
        assert package.split("/")[0] in sources
    for folder in wheel["force-include"]:
        assert folder in sources


@pytest.mark.parametrize("lock", ["requirements-image.lock", "requirements-build.lock"])
def test_a_lock_has_hashes_and_names_no_index(lock: str) -> None:
    lines = [line for line in (_ROOT / lock).read_text().splitlines() if line[:1] not in ("#", "")]
    assert not [line for line in lines if line.startswith("--") or "://" in line]
    assert len(_pins(lock)) == sum(not line.startswith(" ") for line in lines)


def test_the_image_holds_what_is_tested_and_nothing_for_development() -> None:
    image, tested = _pins("requirements-image.lock"), _pins("requirements.lock")
    assert {name: tested.get(name) for name in image} == image
    assert not {"pytest", "mypy", "matplotlib", "hatchling"} & set(image)
    extras = _PROJECT["project"]["optional-dependencies"]
    direct = [*_PROJECT["project"]["dependencies"], *extras["agent"], *extras["operator"]]
    assert {re.split(r"[<>=~]", name)[0] for name in direct} <= set(image)


def test_the_wheel_is_built_with_the_pinned_backend() -> None:
    build = _pins("requirements-build.lock")
    for requirement in _PROJECT["build-system"]["requires"]:
        name, _, version = requirement.partition("==")
        assert build[name] == version


def test_the_image_starts_as_the_user_that_the_chart_names() -> None:
    (user,) = _instructions("USER")
    values = yaml.safe_load((_CHART.parent / "values.yaml").read_text())
    assert values["operator"]["podSecurityContext"]["runAsUser"] == int(user.split(":")[0])
    assert values["operator"]["podSecurityContext"]["runAsGroup"] == int(user.split(":")[1])


def test_stages_that_start_from_outside_take_base_and_architecture_from_build_arguments() -> None:
    stages = [stage for stage in _instructions("FROM") if not stage.startswith("dependencies ")]
    assert [stage.split()[0] for stage in stages] == ["--platform=linux/${ARCH}"] * 2
    assert "ARG ARCH=amd64" in _TEXT


def test_the_base_is_named_by_its_digest() -> None:
    (base,) = re.findall(r"^ARG BASE=(.*)$", _TEXT, re.MULTILINE)
    assert re.fullmatch(r"docker\.io/library/python:3\.\d+-slim@sha256:[0-9a-f]{64}", base)


def test_nothing_stands_between_the_program_and_its_signals() -> None:
    assert _instructions("ENTRYPOINT") == []
    assert all(command.startswith("[") for command in _instructions("CMD"))
