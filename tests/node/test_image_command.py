"""`make image`: one command builds the image and pushes it, and helm takes it from there.

The registry is the reference one, on loopback; no node is needed.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import tempfile
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from hostprep.errors import NotReadyError
from testbed import binaries
from testbed.cache import builder_lock, cache_folder
from testbed.image_build import (
    PRIVATE_MOUNTS,
    Buildah,
    architecture,
    make_bases,
    settings_for_build,
)
from testbed.processes import Child, free_port, wait_for

pytestmark = [pytest.mark.node, pytest.mark.timeout(900)]

_ROOT = Path(__file__).parents[2]
_MANIFEST = "application/vnd.oci.image.manifest.v1+json"


@pytest.fixture
def registry(tmp_path: Path) -> Iterator[str]:
    """Address of a registry that has nothing yet."""
    try:
        program = binaries.find("registry")
    except NotReadyError as error:
        pytest.skip(str(error))
    address = f"127.0.0.1:{free_port()}"
    settings = {
        "version": 0.1,
        "storage": {"filesystem": {"rootdirectory": str(tmp_path / "images")}},
        "http": {"addr": address},
    }
    file = tmp_path / "registry.yaml"
    file.write_text(yaml.safe_dump(settings))
    log = tmp_path / "registry.log"
    child = Child("registry", [str(program), "serve", str(file)], run="image", log=log)
    try:
        wait_for(lambda: _answers(address), 20, why=f"no registry: {child.tail()}")
        yield address
    finally:
        child.stop()


@pytest.fixture
def builder() -> Iterator[tuple[Buildah, dict[str, str]]]:
    """Buildah with the testbed's bases, and the environment in which `make image` uses them."""
    if os.geteuid() != 0:
        pytest.skip("container images can only be built as root")
    cache = cache_folder()
    with (
        tempfile.TemporaryDirectory(prefix="hostprep-images-") as work,
        builder_lock(cache, print),
    ):
        buildah = Buildah(cache, Path(work))
        bases = make_bases(buildah, cache, print)
        pip = settings_for_build()
        conf = Path(work) / "pip.conf"
        conf.write_text(pip.text)
        mounts = {conf: Path("/etc/pip.conf"), **{path: path for path in pip.paths}}
        options = ["--layers", "--pull=never"]
        options += [f"--build-arg=BASE={bases.python}", f"--build-arg=BUILD_BASE={bases.build}"]
        options += [f"--volume={path}:{target}:ro" for path, target in mounts.items()]
        yield (
            buildah,
            {
                "CONTAINER_TOOL": "buildah",
                "BUILD_OPTIONS": " ".join(options),
                "BUILDAH_ISOLATION": "chroot",
                "CONTAINERS_STORAGE_CONF": f"{work}/storage.conf",
                "TMPDIR": work,
            },
        )


def test_the_image_is_built_pushed_and_named_for_helm(
    registry: str, builder: tuple[Buildah, dict[str, str]]
) -> None:
    buildah, environ = builder
    name = f"{registry}/team/hostprep:0.1.0"
    try:
        done = subprocess.run(
            [*PRIVATE_MOUNTS, "make", "image", f"REGISTRY={registry}/team"],
            cwd=_ROOT,
            env={**os.environ, **environ},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    finally:
        if buildah.has(name):
            buildah.run("rmi", name)

    manifest = _get(registry, "manifests/0.1.0")
    config = _get(registry, f"blobs/{manifest['config']['digest']}")
    assert config["config"]["Labels"]["org.opencontainers.image.title"] == "hostprep"
    assert config["architecture"] == architecture()
    assert _images_of_the_chart(_printed_options(done.stdout)) == {name}


def _printed_options(output: str) -> list[str]:
    (line,) = (line for line in output.splitlines() if "helm install" in line)
    words = shlex.split(line)
    return words[words.index("--set") :]


def _images_of_the_chart(options: list[str]) -> set[str]:
    command = [str(binaries.find("helm")), "template", "hostprep", "charts/hostprep", *options]
    text = subprocess.run(command, cwd=_ROOT, capture_output=True, text=True, check=True).stdout
    return set(_images(list(yaml.safe_load_all(text))))


def _images(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        for key, child in value.items():
            if key == "image" and isinstance(child, str):
                yield child
            yield from _images(child)
    elif isinstance(value, list):
        for child in value:
            yield from _images(child)


def _answers(address: str) -> bool:
    try:
        with urllib.request.urlopen(f"http://{address}/v2/", timeout=5) as reply:
            return bool(reply.status == 200)
    except OSError:
        return False


def _get(registry: str, what: str) -> Any:
    url = f"http://{registry}/v2/team/hostprep/{what}"
    request = urllib.request.Request(url, headers={"Accept": _MANIFEST})
    with urllib.request.urlopen(request, timeout=10) as reply:
        return json.load(reply)
