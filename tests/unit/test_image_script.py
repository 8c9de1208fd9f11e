"""`make image` where it cannot work: one line that says why and what to do."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

pytestmark = pytest.mark.unit

_SCRIPT = Path(__file__).parents[2] / "scripts" / "image.sh"


def _run(path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the script with nothing but the plain programs that it needs; none builds images."""
    for name in ("dirname", "sed", "sh", "uname"):
        found = shutil.which(name)
        assert found is not None
        (path / name).symlink_to(found)
    return subprocess.run(
        ["/bin/sh", str(_SCRIPT), *arguments],
        env={"PATH": str(path)},
        capture_output=True,
        text=True,
        check=False,
    )


def test_without_a_program_that_builds_images_it_names_three(tmp_path: Path) -> None:
    done = _run(tmp_path, "registry.example.org")
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert "install podman, buildah, or docker" in done.stderr


@pytest.mark.parametrize(
    "registry", ["https://registry.example.org", "registry.example.org/", "a b"]
)
def test_what_is_no_registry_is_refused_before_anything_is_built(
    registry: str, tmp_path: Path
) -> None:
    done = _run(tmp_path, registry)
    assert done.returncode == 2
    assert "REGISTRY=registry.example.org" in done.stderr
