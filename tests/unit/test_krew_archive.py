"""The krew plugin's archive and manifest: the same wherever they are built, and up to date."""

from __future__ import annotations

import gzip
import importlib.util
import io
import subprocess
import sys
import tarfile
from pathlib import Path
from types import ModuleType

import pytest
import yaml

pytestmark = pytest.mark.unit
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def krew() -> ModuleType:
    spec = importlib.util.spec_from_file_location("krew", ROOT / "scripts" / "krew.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_manifest_in_the_repository_is_of_the_plugin_beside_it(krew: ModuleType) -> None:
    assert krew.main(["--check"]) == 0, "run scripts/krew.py"
    manifest = yaml.safe_load((ROOT / "deploy" / "krew" / "hostprep.yaml").read_text())
    assert manifest["metadata"]["name"] == "hostprep"
    assert manifest["spec"]["version"] == f"v{krew.version()}"
    assert len(manifest["spec"]["shortDescription"]) <= 50, "krew's own rule of thumb"


def test_the_archive_holds_the_plugin_and_the_licence_and_no_time_or_owner(
    krew: ModuleType,
) -> None:
    content = krew.archive()
    assert content == krew.archive()
    with tarfile.open(fileobj=io.BytesIO(gzip.decompress(content))) as archive:
        members = archive.getmembers()
    assert [(m.name, m.mode) for m in members] == [("LICENSE", 0o644), ("kubectl-hostprep", 0o755)]
    assert {(m.mtime, m.uid, m.gid, m.uname, m.gname) for m in members} == {(0, 0, 0, "", "")}


def test_the_plugin_needs_nothing_but_the_standard_library() -> None:
    program = ROOT / "deploy" / "krew" / "kubectl_hostprep.py"
    done = subprocess.run(
        [sys.executable, "-I", "-S", str(program), "--version"],
        capture_output=True,
        text=True,
        check=False,
        timeout=30,
    )
    assert (done.returncode, done.stderr) == (0, "")
