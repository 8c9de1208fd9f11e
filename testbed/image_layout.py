"""Several images in one OCI layout, their layers shared and not compressed.

Buildah compresses every layer anew whenever it writes a layout itself, which takes longer than
building the image; its `dir:` form does not, and holds the same files under other names.
Fields as in the OCI image specification 1.1 (image-layout.md, manifest.md, config.md).
"""

from __future__ import annotations

import hashlib
import json
import shutil
import tarfile
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

__all__ = ["ImageInfo", "Layout"]

_MANIFEST = "application/vnd.oci.image.manifest.v1+json"


@dataclass(frozen=True, slots=True)
class ImageInfo:
    """What a person wants to know of an image; `size_bytes` is of its layers, unpacked."""

    name: str
    digest: str
    size_bytes: int


class Layout:
    """A layout that grows image by image in an empty folder of its own."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._blobs = folder / "blobs" / "sha256"
        self._blobs.mkdir(parents=True)
        self._manifests: dict[str, dict[str, Any]] = {}

    @contextmanager
    def room(self) -> Iterator[Path]:
        """A folder on the same disk to export an image to, gone afterwards."""
        exported = self._folder / "exported"
        try:
            yield exported
        finally:
            shutil.rmtree(exported, ignore_errors=True)

    def add(self, exported: Path, name: str) -> None:
        """Take an image that `buildah push -D IMAGE dir:FOLDER` wrote; the folder is emptied."""
        manifest = json.loads((exported / "manifest.json").read_bytes())
        for part in (manifest["config"], *manifest["layers"]):
            digest = part["digest"].removeprefix("sha256:")
            if not (self._blobs / digest).exists():
                (exported / digest).rename(self._blobs / digest)
        self._put(manifest, name)

    def derive(
        self, name: str, new_name: str, *, labels: Mapping[str, str], env: Mapping[str, str]
    ) -> None:
        """Add an image of the same layers that differs in what it says of itself."""
        manifest = self._read(self._manifests[name])
        config = self._read(manifest["config"])
        settings = config.setdefault("config", {})
        settings["Labels"] = {**(settings.get("Labels") or {}), **labels}
        settings["Env"] = [
            *(line for line in settings.get("Env") or [] if line.partition("=")[0] not in env),
            *(f"{key}={value}" for key, value in env.items()),
        ]
        manifest["config"] |= self._write(config)
        self._put(manifest, new_name)

    def infos(self) -> list[ImageInfo]:
        """All images, in the order in which they came."""
        return [self._info(name, entry) for name, entry in self._manifests.items()]

    def write_tar(self, target: IO[bytes], *, known: Collection[str] = ()) -> None:
        """Write one tar stream, as `ctr images import` reads it, without the blobs it knows."""
        (self._folder / "oci-layout").write_text(
            '{"imageLayoutVersion": "1.0.0"}', encoding="ascii"
        )
        index = {"schemaVersion": 2, "manifests": list(self._manifests.values())}
        (self._folder / "index.json").write_text(json.dumps(index), encoding="utf-8")
        with tarfile.open(fileobj=target, mode="w|") as tar:
            for name in ("oci-layout", "index.json"):
                tar.add(self._folder / name, arcname=name)
            for path in sorted(self._blobs.iterdir()):
                if f"sha256:{path.name}" not in known:
                    tar.add(path, arcname=f"blobs/sha256/{path.name}")

    def _info(self, name: str, entry: Mapping[str, Any]) -> ImageInfo:
        layers = self._read(entry)["layers"]
        return ImageInfo(name, entry["digest"], sum(layer["size"] for layer in layers))

    def _put(self, manifest: Mapping[str, Any], name: str) -> None:
        # containerd takes the whole name from the first; the second is the specification's.
        names = {"io.containerd.image.name": name, "org.opencontainers.image.ref.name": name}
        entry = {"mediaType": _MANIFEST, **self._write(manifest), "annotations": names}
        self._manifests[name] = entry

    def _read(self, entry: Mapping[str, Any]) -> dict[str, Any]:
        content = (self._blobs / entry["digest"].removeprefix("sha256:")).read_bytes()
        found: dict[str, Any] = json.loads(content)
        return found

    def _write(self, value: Mapping[str, Any]) -> dict[str, Any]:
        content = json.dumps(value, separators=(",", ":")).encode()
        digest = hashlib.sha256(content).hexdigest()
        (self._blobs / digest).write_bytes(content)
        return {"digest": f"sha256:{digest}", "size": len(content)}
