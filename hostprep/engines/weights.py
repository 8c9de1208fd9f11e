"""Which weights an engine serves: a commit of the hub, or a digest of a local folder.

Standard library only. What cannot be told for certain is `UnknownError`, with the reason: KV blocks
made by unknown weights are not kept. The engine has read its weights before anybody asks here, so
that files which changed after its process began are unknown as well: they may not be what it read.
"""

from __future__ import annotations

import hashlib
import os
import re
import stat
import time

from hostprep.errors import FailedError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

_COMMIT = re.compile(r"[0-9a-f]{40}")
_PIECE_BYTES = 8 << 20
_FORMATS = ("auto", "hf", "safetensors", "fastsafetensors", "pt", "npcache", "mistral")
"""Formats whose loaders read the files of the folder or of the commit, and nothing else."""


class UnknownError(FailedError):
    """What the weights are cannot be told; the message says why."""

    default_reason = "UnknownWeights"


def check_format(load_format: str) -> None:
    """Raise UnknownError for weights that do not come from files of one folder or commit."""
    if load_format == "dummy":
        raise UnknownError("dummy weights have no content that could be compared")
    if load_format not in _FORMATS:
        raise UnknownError(
            f"load_format {load_format!r} may read them from elsewhere than the model's folder"
        )


def is_commit(revision: str | None) -> bool:
    """Tell whether a revision names one commit, whatever happens to branches and tags."""
    return bool(revision and _COMMIT.fullmatch(revision))


def hub_commit(model: str, revision: str | None, cache: str, *, started_s: float) -> str:
    """Return `model@commit` of a model from the hub, as its local cache has it.

    `started_s`: when the engine's process began, in seconds of the epoch. A branch's commit is what
    the cache noted for it; where that note is newer than the process, another one may have been
    read. Raises UnknownError.
    """
    if revision and is_commit(revision):
        return f"{model}@{revision}"
    name = revision or "main"
    parts = ("models--" + model.replace("/", "--"), "refs", *name.split("/"))
    if ".." in parts:
        raise UnknownError(f"revision {name!r} is no branch's name")
    path = os.path.join(cache, *parts)
    try:
        with open(path, encoding="ascii") as file:
            changed_s = os.fstat(file.fileno()).st_ctime
            commit = file.read(64).strip()
    except (OSError, ValueError) as error:
        raise UnknownError(
            f"the commit of {model}, revision {name!r}, is not in {cache}: give it by --revision"
        ) from error
    if not is_commit(commit):
        raise UnknownError(f"{path} holds no commit")
    if changed_s >= started_s:
        raise UnknownError(
            f"revision {name!r} of {model} changed while the engine started: give the commit by "
            "--revision, or start it once more"
        )
    return f"{model}@{commit}"


def folder_stamp(folder: str, *, started_s: float) -> str:
    """Return what stands for a folder's contents as long as none of its files changes.

    Made of each file's path, device, inode, size and times; the time of its last change (ctime)
    cannot be set by who changes a file. Raises UnknownError for files that changed since
    `started_s`, in seconds of the epoch, and where a file cannot be looked at.
    """
    digest = hashlib.sha256()
    for path in _files(folder):
        try:
            status = os.stat(os.path.join(folder, path))
        except OSError as error:
            raise UnknownError(f"{path} in {folder} cannot be read: {error.strerror}") from error
        if not stat.S_ISREG(status.st_mode):  # reading it might never end
            raise UnknownError(f"{path} in {folder} is no plain file")
        if status.st_ctime >= started_s:
            raise UnknownError(f"{path} in {folder} changed after the engine's process began")
        digest.update(
            f"{path!r} {status.st_dev} {status.st_ino} {status.st_size} "
            f"{status.st_mtime_ns} {status.st_ctime_ns}\n".encode("utf-8", "surrogateescape")
        )
    return digest.hexdigest()


def folder_digest(folder: str, *, started_s: float) -> tuple[str, str]:
    """Return the SHA-256 over all files of a folder, and the stamp they had before and after.

    It reads all of them: minutes for hundreds of GiB. Raises UnknownError, also for a folder that
    changed meanwhile.
    """
    before = folder_stamp(folder, started_s=started_s)
    digest = hashlib.sha256()
    for path in _files(folder):
        try:
            with open(os.path.join(folder, path), "rb") as file:
                one = hashlib.sha256()
                while piece := file.read(_PIECE_BYTES):
                    one.update(piece)
        except OSError as error:
            raise UnknownError(f"{path} in {folder} cannot be read: {error.strerror}") from error
        name = repr(path).encode("utf-8", "surrogateescape")
        digest.update(name + b" " + one.hexdigest().encode() + b"\n")
    if folder_stamp(folder, started_s=started_s) != before:
        raise UnknownError(f"{folder} changed while it was read")
    return digest.hexdigest(), before


def process_started_s() -> float:
    """Return when this process began, in seconds of the epoch, to a clock tick (10 ms)."""
    with open("/proc/self/stat", "rb") as file:
        ticks = int(file.read().rpartition(b")")[2].split()[19])
    ago_s = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    return time.time() - ago_s


def _files(folder: str) -> Iterator[str]:
    """Yield the paths of a folder's files, sorted; not what is hidden, such as .git and .cache."""

    def fail(error: OSError) -> None:
        raise UnknownError(f"{folder} cannot be listed: {error.strerror}") from error

    found = 0
    for top, folders, files in os.walk(folder, onerror=fail, followlinks=True):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        if len(os.path.relpath(top, folder).split(os.sep)) > _MOST_DEPTH:
            raise UnknownError(f"{folder} is too deep to be a model's")
        for name in sorted(files):
            if not name.startswith("."):
                found += 1
                yield os.path.relpath(os.path.join(top, name), folder)
    if not found:
        raise UnknownError(f"{folder} holds no files")


_MOST_DEPTH = 16
"""Links may lead round in circles."""
