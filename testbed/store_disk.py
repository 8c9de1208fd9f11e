"""containerd's root folder as a disk, with images imported and unpacked before any node starts."""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from hostprep.errors import FailedError
from testbed.image_commands import PRIVATE_MOUNTS, run
from testbed.image_layout import Layout

__all__ = ["DISK_LABEL", "DISK_SIZE", "NAMESPACE", "import_images", "make_disk"]

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
