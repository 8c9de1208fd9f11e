"""Build the krew plugin: an archive that is the same wherever it is built, and its manifest.

    python scripts/krew.py [--check] [--output dist/krew] [--releases URL] [--homepage URL]

The archive's SHA-256 stands in the manifest, so who builds the same sources can compare. The
manifest in deploy/krew is kept up to date by this, and `--check` says whether it is.
"""

# ruff: noqa: INP001  scripts are no package
from __future__ import annotations

import argparse
import hashlib
import io
import re
import struct
import sys
import tarfile
import zlib
from collections.abc import Sequence
from pathlib import Path

__all__ = ["archive", "main", "manifest"]

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "deploy" / "krew"
_PROGRAM = "kubectl_hostprep.py"
_RELEASES = "https://hostprep.dev/releases"
_HOMEPAGE = "https://hostprep.dev/docs"


def version() -> str:
    """Return the project's version. Raises ValueError where the plugin says another one."""
    pattern = r'^(?:version|VERSION) = "([^"]+)"$'
    texts = [(ROOT / "pyproject.toml"), (FOLDER / _PROGRAM)]
    found = [re.search(pattern, path.read_text(encoding="utf-8"), re.MULTILINE) for path in texts]
    versions = [match[1] if match else "" for match in found]
    if len(set(versions)) != 1 or not versions[0]:
        raise ValueError(f"pyproject.toml and the plugin say versions {' and '.join(versions)}")
    return versions[0]


def archive() -> bytes:
    """Return the plugin and the licence as .tar.gz, without times and owners."""
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w", format=tarfile.USTAR_FORMAT) as tar:
        for path, name, mode in (
            (ROOT / "LICENSE", "LICENSE", 0o644),
            (FOLDER / _PROGRAM, "kubectl-hostprep", 0o755),
        ):
            data = path.read_bytes()
            member = tarfile.TarInfo(name)
            member.size, member.mode = len(data), mode
            tar.addfile(member, io.BytesIO(data))
    return _gzip(content.getvalue())


def _gzip(data: bytes) -> bytes:
    """Return data as RFC 1952 has it, stored: what zlib makes differs between its versions."""
    blocks = [data[at : at + 0xFFFF] for at in range(0, len(data), 0xFFFF)]
    stored = b"".join(
        struct.pack("<BHH", block is blocks[-1], len(block), len(block) ^ 0xFFFF) + block
        for block in blocks
    )
    header = b"\x1f\x8b\x08\0\0\0\0\0\0\xff"
    return header + stored + struct.pack("<II", zlib.crc32(data), len(data))


def manifest(content: bytes, *, releases: str = _RELEASES, homepage: str = _HOMEPAGE) -> str:
    """Return the manifest for an archive that is published below `releases`."""
    now = version()
    filled = (FOLDER / "hostprep.yaml.in").read_text(encoding="utf-8")
    for name, value in {
        "VERSION": now,
        "HOMEPAGE": homepage,
        "URI": f"{releases.rstrip('/')}/v{now}/kubectl-hostprep.tar.gz",
        "SHA256": hashlib.sha256(content).hexdigest(),
    }.items():
        filled = filled.replace(f"@{name}@", value)
    return filled


def main(arguments: Sequence[str]) -> int:
    """Write both, or check the manifest in deploy/krew. Returns 0, or 1."""
    parser = argparse.ArgumentParser(description="Build the krew plugin.")
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--output", type=Path, help="a folder for the archive and its manifest")
    parser.add_argument("--releases", default=_RELEASES, help="where releases are published")
    parser.add_argument("--homepage", default=_HOMEPAGE)
    options = parser.parse_args(arguments)
    content = archive()
    text = manifest(content, releases=options.releases, homepage=options.homepage)
    kept = FOLDER / "hostprep.yaml"
    if options.check:
        return int(not kept.exists() or kept.read_text(encoding="utf-8") != text)
    if options.output is None:
        kept.write_text(text, encoding="utf-8")
        return 0
    options.output.mkdir(parents=True, exist_ok=True)
    (options.output / "kubectl-hostprep.tar.gz").write_bytes(content)
    (options.output / "hostprep.yaml").write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
