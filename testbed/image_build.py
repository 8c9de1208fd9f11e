"""The images of the testbed: Debian with Python, ours on top by the Containerfile, and a pause.

Buildah's storage is a folder of the cache, apart from the machine's own; its layers are what makes
a second build quick.
"""

from __future__ import annotations

import ast
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from hostprep.errors import FailedError
from testbed.apt import Source, download_packages, mirror
from testbed.cache import Say, install

PRIVATE_MOUNTS = ("unshare", "--mount", "--propagation", "private")
"""Before a command that mounts: it may be killed, or its umount find somebody inside (a `find`
over the whole machine is enough), and what it leaves is still gone with its last process."""
_TAIL_LINES = 25


def run(
    command: Sequence[str | Path],
    *,
    remedy: str,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
) -> str:
    """Run to its end and return what it printed. Raises FailedError with its last words."""
    words = [str(word) for word in command]
    done = subprocess.run(
        words,
        env=env,
        cwd=cwd,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        lines = [*done.stdout.splitlines()[-_TAIL_LINES:], *done.stderr.splitlines()[-_TAIL_LINES:]]
        tail = "\n".join(f"    {line}" for line in lines)
        named = words[len(PRIVATE_MOUNTS) :] if words[0] == PRIVATE_MOUNTS[0] else words
        raise FailedError(
            f"{Path(named[0]).name} failed with exit code {done.returncode}:\n{tail}\n",
            remedy=remedy,
        )
    return done.stdout


@contextmanager
def timed(what: str, say: Say) -> Iterator[None]:
    """Say what begins, and how long it took."""
    say(what)
    start = time.monotonic()
    yield
    say(f"  done in {time.monotonic() - start:.0f} s")


_RECIPES = ("Containerfile", ".containerignore")
# Zip files, and so wheels, know no time before 1980.
_WRITTEN_SECONDS = 946684800


def read_sources(project: Path) -> dict[str, bytes]:
    """The recipe and every file that a build sees, by their paths in the project."""
    lines = (project / ".containerignore").read_text(encoding="utf-8").splitlines()
    found: dict[str, bytes] = {}
    for name in (*_RECIPES, *(line[1:] for line in lines if line.startswith("!"))):
        top = project / name
        for path in sorted(top.rglob("*")) if top.is_dir() else [top]:
            relative = path.relative_to(project)
            if path.is_file() and not any(_is_cache(part) for part in relative.parts):
                found[str(relative)] = path.read_bytes()
    return found


def _is_cache(part: str) -> bool:
    return part == "__pycache__" or (part.startswith(".") and part not in _RECIPES)


def sum_of(sources: Mapping[str, bytes], *more: bytes) -> str:
    """Eight digits that change with any name, any byte, and anything in `more`."""
    digest = hashlib.sha256()
    for name, content in sorted(sources.items()):
        digest.update(f"{name}\0{len(content)}\0".encode() + content)
    for part in more:
        digest.update(b"%d\0" % len(part) + part)
    return digest.hexdigest()[:8]


def write_sources(sources: Mapping[str, bytes], folder: Path) -> None:
    """Write them to an empty folder, with the same modes and times whoever wrote the originals."""
    shutil.rmtree(folder, ignore_errors=True)
    for name, content in sources.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    for path in (folder, *folder.rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)
        os.utime(path, (_WRITTEN_SECONDS, _WRITTEN_SECONDS))


_FOR_DOWNLOADS = (
    "cert",
    "client-cert",
    "constraint",
    "extra-index-url",
    "find-links",
    "index-url",
    "no-index",
    "pre",
    "prefer-binary",
    "proxy",
    "retries",
    "timeout",
    "default-timeout",
    "trusted-host",
)
"""Where to download from and how. What says where to install to is no business of an image."""
_CA_VARIABLES = ("REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "SSL_CERT_FILE")
_CA_FILES = ("/etc/ssl/certs/ca-certificates.crt", "/etc/pki/tls/certs/ca-bundle.crt")


@dataclass(frozen=True, slots=True)
class PipSettings:
    """A pip.conf, and the paths that it names and that must be there beside it."""

    text: str
    paths: tuple[Path, ...]


def settings_for_build(environ: Mapping[str, str] = os.environ) -> PipSettings:
    """As this Python's pip sees them: files, then environment. Raises nothing; none are none."""
    done = subprocess.run(
        [sys.executable, "-m", "pip", "config", "list"],
        env={**environ, "PIP_DISABLE_PIP_VERSION_CHECK": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    candidates = (*(environ.get(name, "") for name in _CA_VARIABLES), *_CA_FILES)
    authorities = next((path for path in candidates if path and os.path.isfile(path)), None)
    return parse_settings(done.stdout, authorities)


def parse_settings(listed: str, authorities: str | None) -> PipSettings:
    """Turn the words of `pip config list` into a pip.conf.

    `authorities`: the file of certificates to trust where the settings name none, since an image
    does not know those that the machine's owner added to the machine.
    """
    values: dict[tuple[str, str], str] = {}
    for line in listed.splitlines():
        name, _, quoted = line.partition("=")
        section, _, key = name.rpartition(".")
        if key in _FOR_DOWNLOADS and section in {"global", "install", "wheel", ":env:"}:
            values[section, key] = str(ast.literal_eval(quoted))
    for section, key in list(values):
        if section == ":env:":
            # As with pip itself, a variable wins over every section of every file.
            value = values[section, key]
            values = {names: v for names, v in values.items() if names[1] != key}
            values["global", key] = value
    if authorities and all(key != "cert" for _, key in values):
        values["global", "cert"] = authorities
    return PipSettings(_text(values), tuple(_paths(values)))


def _text(values: Mapping[tuple[str, str], str]) -> str:
    lines = []
    for section in sorted({section for section, _ in values}):
        lines.append(f"[{section}]")
        for (owner, key), value in sorted(values.items()):
            if owner == section:
                # A line of its own that starts with a blank continues the value before.
                words = value.split("\n") if "\n" in value else [value]
                lines.append(f"{key} = " + "\n    ".join(words))
    return "".join(f"{line}\n" for line in lines)


def _paths(values: Mapping[tuple[str, str], str]) -> list[Path]:
    words = {word.removeprefix("file://") for value in values.values() for word in value.split()}
    return sorted(Path(word) for word in words if word.startswith("/") and os.path.exists(word))


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
