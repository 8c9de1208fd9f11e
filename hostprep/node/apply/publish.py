"""The handoff, built from what the kernel shows after the work, and the zipapp beside the pools."""

from __future__ import annotations

import contextlib
import hashlib
import os
import zipfile
from collections.abc import Iterator
from dataclasses import replace
from importlib import resources
from importlib.resources.abc import Traversable
from io import BytesIO

import hostprep
from hostprep.api.slot_layout import SlotLayout
from hostprep.client.handoff import AttachAdvice, Handoff, Region
from hostprep.errors import FailedError, HostprepError
from hostprep.linux.files import (
    atomic_write,
    closing_fd,
    from_os_error,
    open_state_file,
    remove_file,
)
from hostprep.linux.locks import try_lock
from hostprep.node.apply.folder import clear_debris
from hostprep.node.facts import Facts, PoolFacts, RegionFacts
from hostprep.node.ledger import LedgerWriter
from hostprep.node.observe.host import HostRoot
from hostprep.node.observe.pools import as_region
from hostprep.node.plan.placement import layout_of
from hostprep.paths import PoolPaths
from hostprep.zipapp import STABLE_NAME, is_version

_MAX_READ_THREADS = 16


def publish(
    paths: PoolPaths,
    facts: Facts,
    pool: PoolFacts,
    writer: LedgerWriter,
    *,
    gid: int | None,
    sizing: SlotLayout | None = None,
) -> None:
    """Publish all regions that are finished and sound, under the next generation."""
    ledger = writer.ledger
    generation = ledger.generation + 1
    handoff = build_handoff(paths, facts, pool, generation, ledger.pool_uid, sizing=sizing)
    if not handoff.regions:
        raise FailedError(
            f"pool {paths.pool} has no sound region to publish",
            reason="NothingToPublish",
            remedy="run prepare again; see `hostprep status` for the damage",
        )
    writer.update(generation=generation)
    mode = 0o640 if gid is not None else 0o644
    atomic_write(paths.handoff, handoff.to_bytes(), mode=mode, gid=gid)


def build_handoff(
    paths: PoolPaths,
    facts: Facts,
    pool: PoolFacts,
    generation: int,
    pool_uid: str,
    *,
    sizing: SlotLayout | None = None,
) -> Handoff:
    """Return the handoff for what the pool's folder holds."""
    before = facts.pool(paths.pool)
    # The layouts, by inode, as they were before the handoff was withdrawn.
    layouts = {region.inode: region.layout for region in before.regions} if before else {}

    def published(region: RegionFacts) -> Region:
        known = replace(region, layout=region.layout or layouts.get(region.inode, ""))
        layout = layout_of(known, sizing)
        return replace(as_region(region), layout=layout, attach=attach_advice(facts, region))

    return Handoff(
        pool=paths.pool,
        pool_uid=pool_uid,
        generation=generation,
        boot_id=facts.kernel.boot_id,
        agent_version=hostprep.__version__,
        regions=tuple(
            published(region)
            for region in sorted(pool.regions, key=lambda region: region.name)
            if region.finished and region.damage is None
        ),
    )


def attach_advice(facts: Facts, region: RegionFacts) -> AttachAdvice:
    """Return the node's advice to engines that attach.

    Memory-only NUMA nodes on arm64 beside NVIDIA GPUs are GPU memory (GB200 and its like):
    there the GPUs use the host's page tables and registering gains nothing.
    """
    nodes = [
        node for node in facts.nodes if node.cpus and region.placement.node in (None, node.node_id)
    ]
    cpus = sum(len(node.cpus) for node in nodes) or 1
    coherent = facts.kernel.arch == "aarch64" and bool(facts.gpus)
    return AttachAdvice(
        populate_read_threads=min(cpus, _MAX_READ_THREADS),
        skip_register=coherent and any(not node.cpus for node in facts.nodes),
    )


def publish_zipapp(root: str) -> None:
    """Have the current zipapp beside the pools, and no other version that no process runs from.

    The caller holds the root. Each version has a name of its own and is never replaced;
    `hostprep.pyz` is a hard link to the current one, since the zip must be the same file in
    containers that mount this name alone. No zipapp at all is no reason to fail.
    """
    data = build_zipapp()
    name = version_name(data)
    stable = f"{root}/{STABLE_NAME}"
    try:
        if HostRoot().read_bytes(f"{root}/{name}") != data:
            atomic_write(f"{root}/{name}", data, mode=0o755)
        _link(f"{root}/{name}", stable)
    except HostprepError:
        if os.path.exists(stable):
            raise
    with unused_versions(root, but=name) as versions:
        for version in versions:
            remove_file(f"{root}/{version}")


@contextlib.contextmanager
def unused_versions(root: str, *, but: str = "") -> Iterator[tuple[str, ...]]:
    """Yield the names of the zipapp's versions that no process runs from; none begins to.

    `but` is one to leave out, lock and all.
    """
    with contextlib.ExitStack() as stack:
        unused = []
        for name in os.listdir(root):
            if not is_version(name) or name == but:
                continue
            with contextlib.suppress(OSError):
                fd = stack.enter_context(closing_fd(open_state_file(f"{root}/{name}", os.O_RDONLY)))
                if try_lock(fd, exclusive=True):
                    unused.append(name)
        yield tuple(unused)


def _link(version: str, stable: str) -> None:
    """Have the stable name lead to a version: replaced in one step. Raises HostprepError."""
    temporary = f"{os.path.dirname(stable)}/.{STABLE_NAME}.new"
    try:
        # rename(2) does nothing between two links of one file, and would leave the temporary name.
        if os.path.lexists(stable) and os.path.samestat(os.lstat(stable), os.lstat(version)):
            return
        clear_debris(stable)
        remove_file(temporary)
        os.link(version, temporary)
        os.rename(temporary, stable)
    except OSError as error:
        raise from_os_error(error, f"write {stable}") from error


_PACKAGES = ("linux", "client", "cuda", "register", "slots", "engines")
_MODULES = (
    "__main__",
    "__init__",
    "attachment",
    "backing",
    "errors",
    "known_issues",
    "layout",
    "paths",
    "units",
    "zipapp",
)
_DATA = ("tested.json",)
_MAIN = """\
import sys
import zipimport

archive = __loader__.archive
sys.path_importer_cache.pop(archive, None)
getattr(zipimport, "_zip_directory_cache", {}).pop(archive, None)

from hostprep.engines.main import main

sys.exit(main())
"""
"""Python reads the zip's directory, then starts up, then reads this: another version may lie there
by then. So this is the same in all versions, first in the file and not compressed, and begins by
having the directory read again; hostprep/__init__.py then settles on one version. Do not change it.
"""
_PLUGINS = """\
[lmcache.device_plugins]
hostprep = hostprep.engines.lmcache.pinning:HostprepDevice

[sglang.srt.plugins]
hostprep = hostprep.engines.sglang.plugin:load
"""
"""As in pyproject.toml: what engines find by importlib.metadata, which reads zip files as well."""


def build_zipapp() -> bytes:
    """Return the zipapp's bytes; the same for the same sources."""
    package = resources.files("hostprep")
    files = {f"hostprep/{name}.py": package / f"{name}.py" for name in _MODULES}
    for folder in _PACKAGES:
        files.update(_files_below(package / folder, f"hostprep/{folder}"))
    texts = {name: file.read_text(encoding="utf-8") for name, file in files.items()}
    return b"#!/usr/bin/env python3\n" + _zip({"__main__.py": _MAIN} | _described() | texts)


def version_name(data: bytes) -> str:
    """Return the file name of the version that has these bytes."""
    return f"hostprep-{hostprep.__version__}-{hashlib.sha256(data).hexdigest()[:12]}.pyz"


def _described() -> dict[str, str]:
    """Return what says that hostprep is installed, and what it offers to engines."""
    version = hostprep.__version__
    metadata = f"Metadata-Version: 2.1\nName: hostprep\nVersion: {version}\n"
    folder = f"hostprep-{version}.dist-info"
    return {f"{folder}/METADATA": metadata, f"{folder}/entry_points.txt": _PLUGINS}


def _files_below(folder: Traversable, path: str) -> dict[str, Traversable]:
    """Return a package's modules and what they read with them, subpackages included."""
    found: dict[str, Traversable] = {}
    for entry in folder.iterdir():
        name = f"{path}/{entry.name}"
        if entry.is_dir() and entry.name != "__pycache__":
            found.update(_files_below(entry, name))
        elif entry.name.endswith(".py") or entry.name in _DATA:
            found[name] = entry
    return found


def _zip(files: dict[str, str]) -> bytes:
    buffer = BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name in sorted(files, key=lambda name: (name != "__main__.py", name)):
            # A fixed date: the agent compares bytes to see whether the published one is current.
            entry = zipfile.ZipInfo(name.replace(os.sep, "/"))
            kind = zipfile.ZIP_STORED if name == "__main__.py" else zipfile.ZIP_DEFLATED
            archive.writestr(entry, files[name], compress_type=kind)
    return buffer.getvalue()
