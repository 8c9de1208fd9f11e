"""Images in an OCI layout, and the disk on which containerd finds them unpacked."""

from __future__ import annotations

import hashlib
import json
import shutil
import signal
import subprocess
import tarfile
import time
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from hostprep.errors import FailedError
from testbed.image_build import PRIVATE_MOUNTS, run

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


NAMESPACE = "k8s.io"
"""Where kubelet's images live (containerd, docs/cri: "CRI plugin uses the k8s.io namespace")."""
SNAPSHOTTER = "overlayfs"
DISK_LABEL = "containerd"
DISK_SIZE = "4G"
"""With the images' 620 MB it leaves pods 3 GB to write to; the file is sparse."""
_REMOVED = "localhost/removed:1"
_START_SECONDS = 60.0
_STOP_SECONDS = 30.0
_REMEDY = (
    "overlayfs is needed: put the cache on ext4 or xfs by XDG_CACHE_HOME, and read the last lines"
)
_CONFIG = """version = 3
root = "{root}"
state = "{state}"
disabled_plugins = [
    "io.containerd.cri.v1.images",
    "io.containerd.cri.v1.runtime",
    "io.containerd.grpc.v1.cri",
    "io.containerd.nri.v1.nri",
    "io.containerd.snapshotter.v1.blockfile",
    "io.containerd.snapshotter.v1.erofs",
    "io.containerd.snapshotter.v1.native",
]
[grpc]
address = "{state}/socket"
"""


def import_images(layout: Layout, root: Path, work: Path, programs: Mapping[str, Path]) -> None:
    """Have a containerd of our own import and unpack all images, and forget all others.

    `root` is its folder, new or of an earlier run: layers that are there are not unpacked again.
    It holds no path of this machine: a snapshot is known by its number (containerd,
    plugins/snapshots/overlay). `work` is short enough for a socket's path (107 bytes). Raises
    FailedError, with containerd's words, when an image is not there and unpacked afterwards.
    """
    names = [info.name for info in layout.infos()]
    with _containerd(root, work, programs["containerd"]):
        ctr = [str(programs["ctr"]), "--address", f"{work}/state/socket", "--namespace", NAMESPACE]
        command = [*ctr, "images", "import", "--snapshotter", SNAPSHOTTER, "--sync-fs", "-"]
        known = run([*ctr, "content", "list", "--quiet"], remedy=_REMEDY).split()
        _feed(command, layout, known)
        # One at least is to be removed: that is when layers that no image has any more are, too.
        run([*ctr, "images", "tag", "--force", names[0], _REMOVED], remedy=_REMEDY)
        there = run([*ctr, "images", "list", "--quiet"], remedy=_REMEDY).split()
        run([*ctr, "images", "remove", "--sync", *sorted(set(there) - set(names))], remedy=_REMEDY)
        listed = run([*ctr, "images", "check", "--snapshotter", SNAPSHOTTER], remedy=_REMEDY)
    _check(listed, names)


def make_disk(root: Path, path: Path) -> None:
    """Write the folder as a file system: owners, device nodes and extended attributes are kept.

    Nothing is left for a thread of the node's kernel to initialise during a test.
    """
    path.unlink(missing_ok=True)
    command = ["mke2fs", "-q", "-t", "ext4", "-L", DISK_LABEL, "-m", "0"]
    command += ["-E", "assume_storage_prezeroed=1", "-d", str(root)]
    run([*command, path, DISK_SIZE], remedy="e2fsprogs 1.47 is needed, and space on the disk")


@contextmanager
def _containerd(root: Path, work: Path, program: Path) -> Iterator[None]:
    state, config = work / "state", work / "containerd.toml"
    config.write_text(_CONFIG.format(root=root, state=state), encoding="utf-8")
    log = work / "containerd.log"
    command = [*PRIVATE_MOUNTS, str(program), "--config", str(config)]
    with (
        log.open("wb") as output,
        subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT
        ) as process,
    ):
        try:
            _wait_for(state / "socket", process, log)
            yield
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(_STOP_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()


def _wait_for(socket: Path, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + _START_SECONDS
    while not socket.exists():
        if process.poll() is not None or time.monotonic() > deadline:
            tail = "\n".join(log.read_text(errors="replace").splitlines()[-10:])
            raise FailedError(f"containerd does not start:\n{tail}\n", remedy=_REMEDY)
        time.sleep(0.05)


def _feed(command: list[str], layout: Layout, known: Collection[str]) -> None:
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    ) as process:
        assert process.stdin is not None
        assert process.stderr is not None
        try:
            layout.write_tar(process.stdin, known=known)
            process.stdin.close()
        except BrokenPipeError:
            pass  # it ended early, and says why
        words = process.stderr.read().decode(errors="replace")
    if process.returncode != 0:
        raise FailedError(f"containerd did not import the images:\n{words}\n", remedy=_REMEDY)


def _check(listed: str, names: Iterable[str]) -> None:
    rows = {words[0]: words for words in map(str.split, listed.splitlines()) if words}
    for name in names:
        row = rows.get(name, [])
        if "complete" not in row or row[-1:] != ["true"]:
            raise FailedError(
                f"containerd has {name} not unpacked: {' '.join(row) or 'no image'}", remedy=_REMEDY
            )
