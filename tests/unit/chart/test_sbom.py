"""`make sbom`: the list holds what the image is built from, and its references lead somewhere."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

pytestmark = pytest.mark.unit

_ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def sbom() -> ModuleType:
    spec = importlib.util.spec_from_file_location("sbom", _ROOT / "scripts" / "sbom.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["sbom"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def document(sbom: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    path = tmp_path_factory.mktemp("sbom") / "dist" / "hostprep.cdx.json"
    assert sbom.main([str(path)]) == 0
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def test_every_pinned_package_is_listed_once(document: dict[str, Any]) -> None:
    lock = (_ROOT / "requirements-image.lock").read_text()
    pins = re.findall(r"^([a-z0-9._-]+)==(\S+) \\$", lock, re.MULTILINE)
    libraries = [part for part in document["components"] if part["type"] == "library"]
    assert sorted((part["name"], part["version"]) for part in libraries) == sorted(pins)
    assert {f"pkg:pypi/{name}@{version}" for name, version in pins} == {
        part["purl"] for part in libraries
    }


def test_the_base_image_is_listed_by_its_digest(document: dict[str, Any]) -> None:
    base = re.search(
        r"^ARG BASE=(\S+):(\S+)@sha256:([0-9a-f]{64})$",
        (_ROOT / "Containerfile").read_text(),
        re.MULTILINE,
    )
    assert base is not None
    (image,) = [part for part in document["components"] if part["type"] == "container"]
    assert (image["name"], image["version"]) == (base[1], base[2])
    assert image["hashes"] == [{"alg": "SHA-256", "content": base[3]}]
    assert base[3] in image["purl"]


def test_who_requires_whom_is_as_the_lock_says(document: dict[str, Any]) -> None:
    required = {entry["ref"]: set(entry["dependsOn"]) for entry in document["dependencies"]}
    refs = {part["bom-ref"] for part in document["components"]}
    own = document["metadata"]["component"]["bom-ref"]
    assert set().union(*required.values()) <= refs
    assert len({entry["ref"] for entry in document["dependencies"]}) == len(
        document["dependencies"]
    )
    # Nothing is there that nobody asks for.
    reached, waiting = set(), [own]
    while waiting:
        for ref in required.get(waiting.pop(), ()):
            if ref not in reached:
                reached.add(ref)
                waiting.append(ref)
    assert reached == refs
    names = {part["bom-ref"]: part["name"] for part in document["components"]}
    direct = {names[ref] for ref in required[own]}
    assert {"click", "grpcio", "kopf", "docker.io/library/python"} <= direct
    assert "frozenlist" not in direct  # a dependency's dependency


def test_the_same_sources_give_the_same_file(
    sbom: ModuleType, document: dict[str, Any], tmp_path: Path
) -> None:
    assert sbom.bill_of_materials(_ROOT) == document
    for name in ("pyproject.toml", "requirements-image.lock", "Containerfile"):
        text = (_ROOT / name).read_text()
        (tmp_path / name).write_text(text.replace("click==8", "click==9"))
    changed = sbom.bill_of_materials(tmp_path)
    assert changed["serialNumber"] != document["serialNumber"]


def test_a_base_image_without_a_digest_is_refused(
    sbom: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("pyproject.toml", "requirements-image.lock"):
        (tmp_path / name).write_text((_ROOT / name).read_text())
    text = (_ROOT / "Containerfile").read_text()
    (tmp_path / "Containerfile").write_text(re.sub(r"@sha256:[0-9a-f]{64}", "", text))
    assert sbom.main([str(tmp_path / "out.json")], root=tmp_path) == 1
    assert "make base-image" in capsys.readouterr().err
    assert not (tmp_path / "out.json").exists()
