"""A release, rehearsed: pushed to the reference registry on loopback, and pulled back."""

from __future__ import annotations

import hashlib
import importlib.util
import io
import json
import os
import shutil
import subprocess
import sys
import tarfile
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
)

from hostprep.errors import NotReadyError
from testbed.binaries import find
from testbed.control_plane import ControlPlane
from testbed.processes import Child, free_port, wait_for

pytestmark = pytest.mark.cluster

_ROOT = Path(__file__).parents[2]
_VERSION = yaml.safe_load((_ROOT / "charts/hostprep/Chart.yaml").read_text())["version"]
_RELEASED = (
    *("pyproject.toml", "Containerfile", "requirements-image.lock", "scripts", "charts"),
    *("hostprep", "operator", "LICENSE"),
)
JsonObject = dict[str, Any]


def _module() -> ModuleType:
    spec = importlib.util.spec_from_file_location("release", _ROOT / "scripts" / "release.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["release"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


release = _module()


@pytest.fixture
def registry(tmp_path: Path) -> Iterator[str]:
    """Address of a registry that has nothing yet."""
    try:
        program = find("registry")
    except NotReadyError as error:
        pytest.skip(str(error))
    address = f"127.0.0.1:{free_port()}"
    settings = {
        "version": 0.1,
        "storage": {"filesystem": {"rootdirectory": str(tmp_path / "registry")}},
        "http": {"addr": address},
    }
    file = tmp_path / "registry.yaml"
    file.write_text(yaml.safe_dump(settings))
    command = [str(program), "serve", str(file)]
    child = Child("registry", command, run="release", log=tmp_path / "registry.log")
    try:
        wait_for(lambda: _get(f"http://{address}/v2/") is not None, 20, why=child.tail())
        yield address
    finally:
        child.stop()


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A work tree of what a release is made from, committed and tagged."""
    root = tmp_path / "clone"
    root.mkdir()
    for name in _RELEASED:
        if (_ROOT / name).is_dir():
            ignore = shutil.ignore_patterns("__pycache__")
            shutil.copytree(_ROOT / name, root / name, ignore=ignore)
        else:
            shutil.copy(_ROOT / name, root / name)
    (root / ".gitignore").write_text("/dist/\n")
    _git(root, "init", "-q")
    _git(root, "add", "-A")
    _git(root, "commit", "-qm", "as it is")
    _git(root, "tag", f"v{_VERSION}")
    return root


@pytest.fixture
def key(tmp_path: Path) -> ec.EllipticCurvePrivateKey:
    """A new key; as files too: cosign.key and cosign.pub."""
    private = ec.generate_private_key(ec.SECP256R1())
    text = private.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    (tmp_path / "cosign.key").write_bytes(text)
    public = private.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    (tmp_path / "cosign.pub").write_bytes(public)
    return private


@pytest.fixture
def archives(tmp_path: Path) -> list[Path]:
    """Our code as an image without a base, for two architectures."""
    return [_archive(tmp_path / f"{name}.tar", name) for name in ("amd64", "arm64")]


def _git(root: Path, *arguments: str) -> None:
    who = {f"GIT_{r}_{k}": "x@y.z" for r in ("AUTHOR", "COMMITTER") for k in ("NAME", "EMAIL")}
    environ = {"PATH": os.environ["PATH"], "HOME": str(root), **who}
    subprocess.run(["git", "-C", str(root), *arguments], check=True, env=environ)


def _archive(path: Path, architecture: str, version: str = _VERSION) -> Path:
    layer = io.BytesIO()
    with tarfile.open(fileobj=layer, mode="w") as tar:
        tar.add(_ROOT / "hostprep" / "client", "opt/hostprep/client")
    blobs: dict[str, bytes] = {}

    def add(data: bytes) -> JsonObject:
        digest = f"sha256:{hashlib.sha256(data).hexdigest()}"
        blobs[digest] = data
        return {"digest": digest, "size": len(data)}

    config = {
        "architecture": architecture,
        "os": "linux",
        "config": {"Labels": {"org.opencontainers.image.version": version}},
        "rootfs": {"type": "layers", "diff_ids": [add(layer.getvalue())["digest"]]},
    }
    image = "application/vnd.oci.image"
    manifest = {
        "schemaVersion": 2,
        "mediaType": f"{image}.manifest.v1+json",
        "config": {"mediaType": f"{image}.config.v1+json", **add(json.dumps(config).encode())},
        "layers": [{"mediaType": f"{image}.layer.v1.tar", **add(layer.getvalue())}],
    }
    entry = {"mediaType": manifest["mediaType"], **add(json.dumps(manifest).encode())}
    files = {f"blobs/{digest.replace(':', '/')}": data for digest, data in blobs.items()}
    files["index.json"] = json.dumps({"schemaVersion": 2, "manifests": [entry]}).encode()
    with tarfile.open(path, "w") as tar:
        for name, data in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return path


def _get(url: str) -> bytes | None:
    try:
        with urllib.request.urlopen(url, timeout=5) as reply:
            return bytes(reply.read())
    except OSError:
        return None


def _push(
    registry: str,
    archives: list[Path],
    key: ec.EllipticCurvePrivateKey,
    root: Path,
    *,
    rehearse: bool = False,
) -> JsonObject:
    found: JsonObject = release.release(
        release.Registry(registry),
        archives,
        key,
        rehearse=rehearse,
        builder="https://example.org/builder",
        helm=str(find("helm")),
        root=root,
    )
    return found


def _is_empty(registry: str) -> bool:
    catalog = _get(f"http://{registry}/v2/_catalog")
    return catalog is not None and json.loads(catalog)["repositories"] == []


@pytest.mark.parametrize("folder", ["", "/team/a"])
def test_a_release_comes_back_from_the_registry_as_it_was_sent(
    folder: str,
    *,
    registry: str,
    clone: Path,
    key: ec.EllipticCurvePrivateKey,
    archives: list[Path],
    tmp_path: Path,
) -> None:
    where = registry + folder
    found = _push(where, archives, key, clone)
    assert found == json.loads((clone / "dist" / "release.json").read_text())
    assert found["architectures"] == ["amd64", "arm64"]
    commit = subprocess.run(
        ["git", "-C", str(clone), "rev-parse", "HEAD"], capture_output=True, text=True, check=True
    ).stdout.strip()
    assert found["commit"] == commit
    # As anybody would: the command that verifies, helm that pulls and renders, whoever follows
    # the image's referrers.
    command = [sys.executable, str(clone / "scripts" / "release.py"), where]
    command += ["--verify", str(tmp_path / "cosign.pub")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert json.loads(done.stdout) == found, done.stderr
    for helm in ("helm", "helm-3"):
        rendered = _pull_and_render(helm, where, tmp_path / helm)
        pod = next(d for d in rendered if d and d["kind"] == "DaemonSet")["spec"]["template"]
        (container,) = pod["spec"]["containers"]
        assert container["image"] == found["image"]
    image = found["image"].partition("@")[2]
    # The tag that the specification names, since this registry lists no referrers by itself.
    index = release.Registry(where).manifest("hostprep", image.replace(":", "-"))
    kinds = [entry.get("artifactType") for entry in json.loads(index)["manifests"]]
    assert "application/vnd.cyclonedx+json" in kinds


def _pull_and_render(helm: str, where: str, folder: Path) -> list[JsonObject]:
    folder.mkdir()
    environ = {"PATH": os.environ["PATH"], "HOME": str(folder)}
    chart = [f"oci://{where}/charts/hostprep", "--version", _VERSION, "--plain-http"]
    pull = [str(find(helm)), "pull", *chart, "--destination", str(folder)]
    subprocess.run(pull, check=True, env=environ, capture_output=True)
    template = [str(find(helm)), "template", "x", str(folder / f"hostprep-{_VERSION}.tgz")]
    template += ["--kube-version", "1.36.3"]
    done = subprocess.run(template, check=True, env=environ, capture_output=True, text=True)
    return list(yaml.safe_load_all(done.stdout))


def _dirty(root: Path) -> None:
    (root / "pyproject.toml").write_text((root / "pyproject.toml").read_text() + "\n")


def _untagged(root: Path) -> None:
    _git(root, "tag", "-d", f"v{_VERSION}")


def _tagged_otherwise(root: Path) -> None:
    _untagged(root)
    _git(root, "tag", "v9.9.9")


def _of_two_versions(root: Path) -> None:
    file = root / "charts" / "hostprep" / "Chart.yaml"
    file.write_text(file.read_text().replace(f"\nversion: {_VERSION}", "\nversion: 9.9.9"))
    _git(root, "commit", "-qam", "another version")


def _no_clone(root: Path) -> None:
    shutil.rmtree(root / ".git")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (_dirty, "the tree is dirty"),
        (_untagged, "this commit has no tag"),
        (_tagged_otherwise, "tags here: v9.9.9"),
        (_of_two_versions, "Chart.yaml version says 9.9.9"),
        (_no_clone, "is no git work tree"),
    ],
)
def test_what_is_no_release_is_refused_before_anything_is_pushed(
    change: Callable[[Path], None],
    said: str,
    *,
    registry: str,
    clone: Path,
    key: ec.EllipticCurvePrivateKey,
    archives: list[Path],
    tmp_path: Path,
) -> None:
    change(clone)
    command = [sys.executable, str(clone / "scripts" / "release.py"), registry]
    command += ["--key", str(tmp_path / "cosign.key"), "--helm", str(find("helm"))]
    command += [f"--image={archive}" for archive in archives]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2, done.stderr
    assert said in done.stderr
    assert _is_empty(registry)
    assert not (clone / "dist").exists()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["registry.example.org", "--rehearse"], "not on loopback"),
        (["https://127.0.0.1:1"], "is no registry"),
        (["127.0.0.1:1", "--image=pyproject.toml"], "is no OCI archive"),
        (["127.0.0.1:1", "--key=pyproject.toml"], "no private key"),
        (["127.0.0.1:1", "--image={old}"], "is of version 0.0.1"),
        (["127.0.0.1:1", "--image={same}"], "one --image for each architecture"),
        (["127.0.0.1:1", "--helm=/nowhere/helm"], "there is no /nowhere/helm"),
    ],
)
def test_bad_input_is_exit_code_two(
    arguments: list[str],
    said: str,
    *,
    clone: Path,
    key: ec.EllipticCurvePrivateKey,
    archives: list[Path],
    tmp_path: Path,
) -> None:
    """Nothing listens on port 1: it must not even be asked."""
    names = {"old": _archive(tmp_path / "old.tar", "s390x", "0.0.1"), "same": archives[0]}
    command = [sys.executable, str(clone / "scripts" / "release.py")]
    command += ["--key", str(tmp_path / "cosign.key"), f"--image={archives[0]}"]
    command += [argument.format_map(names) for argument in arguments]
    done = subprocess.run(command, cwd=_ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 2, done.stderr
    assert said in done.stderr


def test_a_version_is_pushed_once_and_a_rehearsal_needs_no_tag(
    registry: str, clone: Path, key: ec.EllipticCurvePrivateKey, archives: list[Path]
) -> None:
    _untagged(clone)
    first = _push(registry, archives[:1], key, clone, rehearse=True)
    with pytest.raises(release.BadInputError, match="pushed once"):
        _push(registry, archives, key, clone, rehearse=True)
    there = release.Registry(registry).manifest("hostprep", _VERSION)
    assert f"sha256:{hashlib.sha256(there).hexdigest()}" in first["image"]


def test_what_is_changed_or_signed_by_another_is_not_taken(
    registry: str, clone: Path, key: ec.EllipticCurvePrivateKey, archives: list[Path]
) -> None:
    found = _push(registry, archives, key, clone)
    there = release.Registry(registry)
    stranger = ec.generate_private_key(ec.SECP256R1())
    with pytest.raises(release.FailedError, match="not signed by this key"):
        release.verify(there, _VERSION, stranger.public_key())
    # Somebody who may push moves the tag to an index with one architecture less.
    index = json.loads(there.manifest("hostprep", _VERSION))
    index["manifests"].pop()
    moved = there.push_manifest("hostprep", index, _VERSION)
    with pytest.raises(release.FailedError, match=r"has no sha256-.*\.sig"):
        release.verify(there, _VERSION, key.public_key())
    # And gives it the signature of what it was.
    digest = found["image"].partition("@")[2]
    for kind in ("sig", "att"):
        old = there.manifest("hostprep", f"{digest.replace(':', '-')}.{kind}")
        there.push_manifest("hostprep", old, f"{moved.replace(':', '-')}.{kind}")
    with pytest.raises(release.FailedError, match=f"the signature of .* is of {digest}"):
        release.verify(there, _VERSION, key.public_key())


@pytest.mark.parametrize("part", ["hostprep", "charts/hostprep"])
@pytest.mark.parametrize(
    ("tag", "said"),
    [("sig", "is not signed by this key"), ("att", "this key attests nothing of .*provenance")],
)
def test_a_release_without_signatures_is_not_taken(
    tag: str,
    said: str,
    *,
    part: str,
    registry: str,
    clone: Path,
    key: ec.EllipticCurvePrivateKey,
    archives: list[Path],
) -> None:
    """Emptied by somebody who may push; and the same with statements that nobody signed."""
    found = _push(registry, archives[:1], key, clone)
    there = release.Registry(registry)
    digest = found["image" if part == "hostprep" else "chart"].partition("@")[2]
    name = f"{digest.replace(':', '-')}.{tag}"
    manifest = json.loads(there.manifest(part, name))
    there.push_manifest(part, {**manifest, "layers": []}, name)
    with pytest.raises(release.FailedError, match=said):
        release.verify(there, _VERSION, key.public_key())
    for layer in manifest["layers"]:
        if tag == "sig":
            del layer["annotations"]
        else:
            envelope = json.loads(there.blob(part, layer["digest"])) | {"signatures": []}
            layer.update(there.push_blob(part, json.dumps(envelope).encode()))
    there.push_manifest(part, manifest, name)
    with pytest.raises(release.FailedError, match=said):
        release.verify(there, _VERSION, key.public_key())


def test_a_bill_of_materials_that_is_gone_or_another_is_not_taken(
    registry: str, clone: Path, key: ec.EllipticCurvePrivateKey, archives: list[Path]
) -> None:
    found = _push(registry, archives[:1], key, clone)
    there = release.Registry(registry)
    image = found["image"].partition("@")[2]
    tag = image.replace(":", "-")
    index = json.loads(there.manifest("hostprep", tag))
    there.push_manifest("hostprep", {**index, "manifests": []}, tag)
    with pytest.raises(release.FailedError, match="no bill of materials"):
        release.verify(there, _VERSION, key.public_key())
    release.push_sbom(there, {"components": []}, image, 1)
    with pytest.raises(release.FailedError, match="no bill of materials"):
        release.verify(there, _VERSION, key.public_key())
    there.push_manifest("hostprep", index, tag)
    assert release.verify(there, _VERSION, key.public_key()) == found


def test_what_another_signed_beside_it_neither_helps_nor_harms(
    registry: str, clone: Path, key: ec.EllipticCurvePrivateKey, archives: list[Path]
) -> None:
    """As cosign adds a keyless signature to the one by key: docs/release.md."""
    found = _push(registry, archives[:1], key, clone)
    there = release.Registry(registry)
    digest = found["image"].partition("@")[2]
    tag = f"{digest.replace(':', '-')}.sig"
    ours = json.loads(there.manifest("hostprep", tag))
    stranger = ec.generate_private_key(ec.SECP256R1())
    release.Signer(there, stranger).sign("hostprep", digest)
    theirs = json.loads(there.manifest("hostprep", tag))
    both = {**ours, "layers": theirs["layers"] + ours["layers"]}
    there.push_manifest("hostprep", both, tag)
    assert release.verify(there, _VERSION, key.public_key()) == found


def test_what_artifact_hub_is_told_is_true(control_plane: ControlPlane, crds: list[str]) -> None:
    chart = yaml.safe_load((_ROOT / "charts/hostprep/Chart.yaml").read_text())
    notes = {
        key.partition("/")[2]: yaml.safe_load(text) for key, text in chart["annotations"].items()
    }
    files = sorted((_ROOT / "charts/hostprep/files/crds").glob("*.yaml"))
    definitions = [yaml.safe_load(path.read_text()) for path in files]
    listed = {(one["name"], one["kind"]): one["version"] for one in notes["crds"]}
    assert listed.keys() == {
        (d["metadata"]["name"], d["spec"]["names"]["kind"]) for d in definitions
    }
    for definition in definitions:
        served = {version["name"] for version in definition["spec"]["versions"]}
        names = definition["metadata"]["name"], definition["spec"]["names"]["kind"]
        assert listed[names] in served
    for example in notes["crdsExamples"]:
        control_plane.kubectl("apply", "--dry-run=server", "-f", "-", stdin=json.dumps(example))
    kinds = {"added", "changed", "deprecated", "removed", "fixed", "security"}
    assert {change["kind"] for change in notes["changes"]} <= kinds
    for link in notes["links"]:
        page = link["url"].removeprefix("https://hostprep.dev/")
        assert (_ROOT / page).exists(), page
