"""The images of the testbed: Debian with Python, ours on top by the Containerfile, and a pause.

Buildah's storage is a folder of the cache, apart from the machine's own; its layers are what makes
a second build quick.
"""

from __future__ import annotations

import os
import platform
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from hostprep.errors import FailedError
from testbed.apt import Source, download_packages, mirror
from testbed.cache import Say, install
from testbed.image_commands import PRIVATE_MOUNTS, run, timed
from testbed.image_pip import PipSettings
from testbed.image_source import sum_of

__all__ = [
    "SUITE",
    "Bases",
    "Buildah",
    "architecture",
    "base_folder",
    "fetch_base",
    "make_bases",
    "make_program",
]

SUITE = "trixie"
"""Its Python is 3.13."""
_PYTHON = "python3"
# Apart from their dependencies, which are the packages of a Python that is there already.
_VENV = ("python3.13-venv", "python3-pip-whl", "python3-setuptools-whl")
_LEFT_OUT = ("doc", "man", "locale")
# What mmdebstrap takes over from the machine it runs on: it means nothing elsewhere.
_OF_THE_MACHINE = ("etc/apt/sources.list*", "etc/resolv.conf", "etc/hostname", "etc/hosts")
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_PLATFORMS = {"x86_64": "amd64", "aarch64": "arm64"}
_MOST_LAYERS = 150
_STORAGE = "image-storage"
_REMEDY = "read its last lines above; a full disk looks like this"


def architecture() -> str:
    """This machine, in the words of images. Raises FailedError for one that has none here."""
    machine = platform.machine()
    if machine not in _PLATFORMS:
        raise FailedError(f"no image is built on {machine}", remedy="use amd64 or arm64")
    return _PLATFORMS[machine]


def base_folder() -> str:
    """The folder in the cache with Debian's files: changes with what is asked of Debian."""
    recipe = f"{SUITE} {_PYTHON} {_VENV} {_LEFT_OUT} {_OF_THE_MACHINE} {architecture()}"
    return f"image-base-{sum_of({}, recipe.encode())}"


def fetch_base(cache: Path, say: Say) -> Path:
    """Debian with Python as `root.tar`, and what makes venvs as the tree `venv` beside it."""
    folder = cache / base_folder()
    if not folder.exists():
        with timed(f"fetching Debian {SUITE} with Python, once: a minute or two", say):
            source = Source(mirror(), SUITE)
            with install(cache, folder.name) as unfinished:
                _bootstrap(source, unfinished)
                _fetch_venv(source, unfinished)
        for other in cache.glob("image-base-*"):
            if other != folder:
                shutil.rmtree(other, ignore_errors=True)
    return folder


def _bootstrap(source: Source, folder: Path) -> None:
    options = ["--quiet", "--variant=minbase", "--mode=root", f"--include={_PYTHON}"]
    options += ["--aptopt=APT::Install-Recommends false"]
    options += [f"--dpkgopt=path-exclude=/usr/share/{what}/*" for what in _LEFT_OUT]
    options.append(f"--customize-hook=cd $1 && rm -rf {' '.join(_OF_THE_MACHINE)}")
    run(
        [*PRIVATE_MOUNTS, "mmdebstrap", *options, source.suite, folder / "root.tar", str(source)],
        env={**os.environ, "TMPDIR": str(folder)},
        remedy="check that the machine's mirror of Debian, or DEBIAN_MIRROR, can be reached",
    )


def _fetch_venv(source: Source, folder: Path) -> None:
    work = folder / "packages"
    work.mkdir()
    for package in download_packages(_VENV, source, work):
        run(["dpkg-deb", "-x", package, folder / "venv"], remedy=_REMEDY)
    shutil.rmtree(work)


class Buildah:
    """Buildah, without a daemon, on a storage of our own. Needs root."""

    def __init__(self, cache: Path, work: Path) -> None:
        """`work`: an empty folder for what one run of ours leaves, such as counts of mounts."""
        storage = cache / _STORAGE
        settings = work / "storage.conf"
        settings.write_text(
            f'[storage]\ndriver = "overlay"\ngraphroot = "{storage}"\nrunroot = "{work}/run"\n',
            encoding="utf-8",
        )
        own = {"BUILDAH_ISOLATION": "chroot", "CONTAINERS_STORAGE_CONF": str(settings)}
        others = {k: v for k, v in os.environ.items() if not k.startswith(("BUILDAH_", "STORAGE_"))}
        self._env = {**others, **own, "TMPDIR": str(work)}
        # What a killed build left behind.
        self.run("rm", "--all")

    def run(self, *arguments: str | Path, cwd: Path | None = None, remedy: str = _REMEDY) -> str:
        """Run one of its commands; raises FailedError with its last words."""
        command = [*PRIVATE_MOUNTS, "buildah", *arguments]
        return run(command, env=self._env, cwd=cwd, remedy=remedy)

    def has(self, name: str) -> bool:
        """Whether an image is in the storage."""
        return name in self.run("images", "--format", "{{.Name}}:{{.Tag}}").split()

    def forget_others(self, name: str) -> None:
        """Remove all images that have another tag."""
        repository = name.rpartition(":")[0]
        for other in self.run("images", "--format", "{{.Name}}:{{.Tag}}").split():
            if other.startswith(f"{repository}:") and other != name:
                self.run("rmi", "--force", other)

    @contextmanager
    def container(self, base: str, name: str) -> Iterator[str]:
        """A container to change, which becomes the image `name` when the body ends well."""
        container = self.run("from", "--pull-never", base).split()[-1]
        try:
            yield container
            self.run("commit", "--quiet", container, name)
        finally:
            self.run("rm", container)

    def build(
        self, sources: Path, name: str, *, arguments: Mapping[str, str], settings: PipSettings
    ) -> None:
        """Build a Containerfile with the caller's pip settings."""
        own = sources.parent / "pip.conf"
        own.touch(mode=0o600)
        own.write_text(settings.text, encoding="utf-8")
        mounts = {own: Path("/etc/pip.conf"), **{path: path for path in settings.paths}}
        options = [f"--volume={path}:{target}:ro" for path, target in mounts.items()]
        options += [f"--build-arg={key}={value}" for key, value in arguments.items()]
        self._forget_old_layers()
        self.run(
            *("build", "--layers", "--pull=never", "--file", "Containerfile", "--tag", name),
            *(*options, "."),
            cwd=sources,
            remedy="read its last lines above; pip needs the index that it is set to outside too",
        )

    def export(self, name: str, folder: Path) -> None:
        """Write an image as files, layers not compressed."""
        self.run("push", "--quiet", "--disable-compression", name, f"dir:{folder}")

    def _forget_old_layers(self) -> None:
        """Every build of changed sources leaves some; the next build is then a cold one."""
        dangling = self.run("images", "--quiet", "--filter", "dangling=true", "--all").split()
        if len(dangling) > _MOST_LAYERS:
            self.run("rmi", "--prune", "--force")


class Bases:
    """Names of the two images that others start from, in the storage."""

    def __init__(self) -> None:
        mark = base_folder().rpartition("-")[2]
        self.python = f"localhost/base:{mark}"
        self.build = f"localhost/build-base:{mark}"


def make_bases(buildah: Buildah, cache: Path, say: Say) -> Bases:
    """Both bases, made when the storage has them not."""
    bases = Bases()
    folder = fetch_base(cache, say)
    if not buildah.has(bases.python):
        with buildah.container("scratch", bases.python) as container:
            buildah.run("add", "--quiet", container, folder / "root.tar", "/")
            buildah.run("config", "--env", f"PATH={_PATH}", "--cmd", _PYTHON, container)
    if not buildah.has(bases.build):
        with buildah.container(bases.python, bases.build) as container:
            buildah.run("copy", "--quiet", container, folder / "venv", "/")
    buildah.forget_others(bases.build)
    buildah.forget_others(bases.python)
    return bases


def make_program(buildah: Buildah, source: Path, work: Path) -> str:
    """An image of one static C program, which it starts; returns its name in the storage."""
    name = f"localhost/{source.stem}:{sum_of({source.name: source.read_bytes()})}"
    if not buildah.has(name):
        program = work / source.stem
        options = ["-static", "-Os", "-s", "-Wall", "-Werror"]
        run(["gcc", *options, "-o", program, source], remedy="install Debian's libc6-dev")
        with buildah.container("scratch", name) as container:
            buildah.run("copy", "--quiet", container, program, f"/{source.stem}")
            buildah.run("config", "--entrypoint", f'["/{source.stem}"]', container)
    return name
