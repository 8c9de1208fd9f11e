"""The container images that nodes of the testbed run, on a disk for containerd.

`python -m testbed.container_images` builds it and shows what is on it. Needs root: the images
hold files of root's, and overlayfs is mounted while they are unpacked.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
import time
import tomllib
from dataclasses import asdict
from pathlib import Path

from hostprep.errors import FailedError, HostprepError
from testbed import binaries
from testbed.apt import install_packages
from testbed.cache import Say, builder_lock, cache_folder, install
from testbed.image_build import (
    Buildah,
    architecture,
    base_folder,
    make_bases,
    make_program,
    read_sources,
    settings_for_build,
    sum_of,
    timed,
    write_sources,
)
from testbed.image_store import ImageInfo, Layout, import_images, make_disk
from testbed.versions import CONTAINERD_VERSION

ENGINE_IMAGE = "localhost/engine:1"
"""Python's standard library and nothing else: stands for an engine's image, as it is published."""
PAUSE_IMAGE = "localhost/pause:1"
_PROJECT = Path(__file__).parents[1]
_PAUSE = Path(__file__).parent / "pause.c"
_DISK = "store.ext4"
_LIST = "images.json"
_KEPT = 2
_TOOLS = {"mmdebstrap": "mmdebstrap", "buildah": "buildah", "mke2fs": "e2fsprogs", "gcc": "gcc"}
_RECIPE = ("container_images.py", "image_build.py", "image_store.py", "pause.c")


def our_image() -> str:
    """The image of both programs, tagged with the project's version, as the chart asks for it."""
    project = tomllib.loads((_PROJECT / "pyproject.toml").read_text(encoding="utf-8"))
    return f"localhost/hostprep:{project['project']['version']}"


def next_image() -> str:
    """The same under another tag and another digest: what an upgrade goes to."""
    return f"{our_image()}-next"


def build_store(say: Say) -> Path:
    """Path of an ext4 disk to mount (a copy of) at /var/lib/containerd; built when it is missing.

    It holds all images, imported and unpacked for overlayfs. Takes the builder's lock. Raises
    FailedError with the remedy; what was finished before stays in the cache.
    """
    sources = read_sources(_PROJECT)
    cache = cache_folder()
    disk = cache / store_name(sources) / _DISK
    if not disk.exists():
        _need_tools(say)
        programs = binaries.build(["containerd", "ctr"], say=say)
        with builder_lock(cache, say):
            if not disk.exists():
                _build(sources, programs, cache, say)
                _forget_others(cache, disk.parent)
    return disk


def store_name(sources: dict[str, bytes]) -> str:
    """The folder in the cache: changes with the sources, the base, containerd and the recipe."""
    recipe = [(Path(__file__).parent / name).read_bytes() for name in _RECIPE]
    versions = f"{CONTAINERD_VERSION} {base_folder()}".encode()
    return f"image-store-{sum_of(sources, versions, *recipe)}"


def store_images(disk: Path) -> list[ImageInfo]:
    """What is on a disk that `build_store` made."""
    listed = json.loads((disk.parent / _LIST).read_text(encoding="utf-8"))
    return [ImageInfo(**entry) for entry in listed]


def _need_tools(say: Say) -> None:
    if os.geteuid() != 0:
        raise FailedError("container images can only be built as root", remedy="run it as root")
    missing = [package for tool, package in _TOOLS.items() if shutil.which(tool) is None]
    if missing:
        install_packages([*missing, "libc6-dev"] if "gcc" in missing else missing, say)


def _build(sources: dict[str, bytes], programs: dict[str, Path], cache: Path, say: Say) -> None:
    start = time.monotonic()
    say("building the container images: seconds, or some minutes when all is new")
    # Short, since sockets are in it; on the cache's disk is only what is large.
    with (
        tempfile.TemporaryDirectory(prefix="hostprep-images-") as short,
        install(cache, store_name(sources)) as folder,
    ):
        layout = Layout(folder / "layout")
        _make_images(layout, sources, Path(short), say)
        with timed("unpacking them into a disk for containerd", say):
            root = cache / f"image-containerd-{CONTAINERD_VERSION}"
            _import(layout, root, Path(short), programs, say)
            make_disk(root, folder / _DISK)
        listed = [asdict(info) for info in layout.infos()]
        (folder / _LIST).write_text(json.dumps(listed, indent=2), encoding="utf-8")
        shutil.rmtree(folder / "layout")
    say(f"the container images are there after {time.monotonic() - start:.0f} s")


def _make_images(layout: Layout, sources: dict[str, bytes], work: Path, say: Say) -> None:
    cache, ours = cache_folder(), our_image()
    buildah = Buildah(cache, work)
    bases = make_bases(buildah, cache, say)
    pause = make_program(buildah, _PAUSE, work)
    with timed(f"building {ours} with the Containerfile: a minute when dependencies are new", say):
        write_sources(sources, work / "sources")
        arguments = {"ARCH": architecture(), "BASE": bases.python, "BUILD_BASE": bases.build}
        settings = settings_for_build()
        buildah.build(work / "sources", ours, arguments=arguments, settings=settings)
    with timed("exporting images", say):
        for stored, name in ((pause, PAUSE_IMAGE), (bases.python, ENGINE_IMAGE), (ours, ours)):
            with layout.room() as exported:
                buildah.export(stored, exported)
                layout.add(exported, name)
    version = next_image().rpartition(":")[2]
    layout.derive(
        ours,
        next_image(),
        labels={"org.opencontainers.image.version": version},
        env={"HOSTPREP_IMAGE": version},
    )


def _import(layout: Layout, root: Path, work: Path, programs: dict[str, Path], say: Say) -> None:
    """Into what the last build left, or from nothing when that was cut short and is of no use."""
    try:
        import_images(layout, root, work, programs)
    except FailedError as error:
        say(f"containerd's folder is made anew: {error.message}")
        shutil.rmtree(root, ignore_errors=True)
        import_images(layout, root, work, programs)


def _forget_others(cache: Path, newest: Path) -> None:
    others = [folder for folder in cache.glob("image-store-*") if folder != newest]
    others.sort(key=lambda folder: folder.stat().st_mtime, reverse=True)
    for folder in others[_KEPT - 1 :]:
        # A machine that was started from it keeps its open file.
        shutil.rmtree(folder, ignore_errors=True)


def main() -> int:
    """Build, and print the disk's path and its images."""
    try:
        disk = build_store(lambda line: print(line, file=sys.stderr))
    except HostprepError as error:
        print(f"testbed: {error}", file=sys.stderr)
        return error.exit_code
    print(disk)
    for info in store_images(disk):
        print(f"  {info.name:32} {info.size_bytes / 1e6:7.1f} MB  {info.digest}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
