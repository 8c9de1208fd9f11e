"""Push a release to an OCI registry: image, chart, bill of materials, signatures, provenance.

    python scripts/release.py REGISTRY --key KEY --image ARCHIVE [--image ARCHIVE] [--rehearse]
    python scripts/release.py REGISTRY --verify PUBLIC_KEY

REGISTRY is a host, with or without a folder, and the only place that anything is pushed to:
REGISTRY/hostprep (the image) and REGISTRY/charts/hostprep (the chart). ARCHIVE is an image as an
OCI archive, one for each architecture; KEY an EC key on P-256, PKCS 8 PEM without a passphrase. All
that can be wrong is looked at before the first byte is pushed: exit code 2, and nothing has
happened. `--rehearse` takes a commit without its tag, and registries on loopback alone. What was
pushed is pulled back and verified, digest by digest; dist/release.json names it: docs/release.md.

Signatures and attestations are those of cosign: the tags sha256-DIGEST.sig and sha256-DIGEST.att.
"""

# ruff: noqa: INP001, S310  scripts are no package; a registry has http or https
from __future__ import annotations

import argparse
import base64
import hashlib
import http.client
import ipaddress
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import tomllib
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import yaml
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import load_pem_private_key, load_pem_public_key

ROOT = Path(__file__).resolve().parents[1]
IMAGE, CHART = "hostprep", "charts/hostprep"
_INDEX = "application/vnd.oci.image.index.v1+json"
_MANIFEST = "application/vnd.oci.image.manifest.v1+json"
_CONFIG = "application/vnd.oci.image.config.v1+json"
_EMPTY = "application/vnd.oci.empty.v1+json"
_SBOM = "application/vnd.cyclonedx+json"
_SIGNED = "application/vnd.dev.cosign.simplesigning.v1+json"
_ENVELOPE = "application/vnd.dsse.envelope.v1+json"
_INTOTO = "application/vnd.in-toto+json"
_CHART_LAYER = "application/vnd.cncf.helm.chart.content.v1.tar+gzip"
_SIGNATURE_KEY = "dev.cosignproject.cosign/signature"
_PROVENANCE = "https://slsa.dev/provenance/v1"
_CYCLONEDX = "https://cyclonedx.org/bom"
_REGISTRY = re.compile(r"[A-Za-z0-9.-]+(:\d+)?(/[a-z0-9]+([._-][a-z0-9]+)*)*")
_TIMEOUT_S = 120.0


class BadInputError(Exception):
    """Something was wrong before anything was pushed; says what to do."""


class FailedError(Exception):
    """The registry refused, or what came back is not what was sent."""


def sha256(data: bytes) -> str:
    """Return the digest as OCI writes it."""
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


def to_json(document: object) -> bytes:
    """Return the bytes that are signed and pushed: the same for the same document."""
    return json.dumps(document, separators=(",", ":"), sort_keys=True).encode()


# What is released


@dataclass(frozen=True, slots=True)
class Source:
    """The commit that is released."""

    version: str
    commit: str
    origin: str
    """URL of the repository, or nothing where git knows none."""


def _git(root: Path, *arguments: str) -> str:
    done = subprocess.run(
        ["git", "-C", str(root), *arguments], capture_output=True, text=True, check=False
    )
    return done.stdout.strip() if done.returncode == 0 else ""


def source_of(root: Path, *, rehearse: bool) -> Source:
    """Return what is checked out. Raises BadInputError where that is no release."""
    versions = dict(_versions(root))
    if len(set(versions.values())) != 1:
        named = ", ".join(f"{where} says {version}" for where, version in versions.items())
        raise BadInputError(f"the versions differ: {named}; write the same everywhere")
    version = next(iter(versions.values()))
    commit = _git(root, "rev-parse", "HEAD")
    if not commit:
        raise BadInputError(f"{root} is no git work tree: release from a clone")
    if changed := _git(root, "status", "--porcelain"):
        raise BadInputError(
            f"the tree is dirty: commit or remove\n{changed}\nNobody could build this again"
        )
    tags = _git(root, "tag", "--points-at", "HEAD").split()
    if not rehearse and f"v{version}" not in tags:
        there = f"tags here: {', '.join(tags)}" if tags else "this commit has no tag"
        raise BadInputError(
            f"{there}, and the version is {version}: `git tag v{version}`, or check v{version} out"
        )
    return Source(version, commit, _git(root, "remote", "get-url", "origin"))


def _versions(root: Path) -> Iterator[tuple[str, str]]:
    project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    yield "pyproject.toml", project["version"]
    chart = yaml.safe_load((root / CHART / "Chart.yaml").read_text(encoding="utf-8"))
    yield "Chart.yaml version", chart["version"]
    yield "Chart.yaml appVersion", chart["appVersion"]
    found = re.search(r"^ARG VERSION=(\S+)$", (root / "Containerfile").read_text(), re.MULTILINE)
    yield "Containerfile", found[1] if found else "nothing"


@dataclass(frozen=True, slots=True)
class Image:
    """An image of one architecture: its manifest, and where each of its blobs can be read."""

    manifest: bytes
    platform: Mapping[str, str]
    blobs: Mapping[str, Callable[[], bytes]]


def read_archive(path: Path, version: str) -> Image:
    """Read an OCI archive; every blob is hashed. Raises BadInputError."""
    try:
        with tarfile.open(path) as tar:
            index = json.loads(_member(tar, "index.json"))
            (entry,) = index["manifests"]
            manifest = _blob(tar, entry["digest"])
            parts = json.loads(manifest)
            digests = [parts["config"]["digest"], *(layer["digest"] for layer in parts["layers"])]
            config = json.loads(_blob(tar, digests[0]))
            for digest in digests:
                _blob(tar, digest)
    except (OSError, tarfile.TarError, KeyError, ValueError) as error:
        raise BadInputError(
            f"{path} is no OCI archive of one image ({error!r}): make one with"
            " `buildah push IMAGE oci-archive:FILE` or `podman save --format oci-archive`"
        ) from error
    labelled = (config.get("config", {}).get("Labels") or {}).get(
        "org.opencontainers.image.version", ""
    )
    if labelled != version:
        raise BadInputError(
            f"{path} is of version {labelled or 'unknown'}, this tree of {version}: build it again"
        )

    def reader(digest: str) -> Callable[[], bytes]:
        def read() -> bytes:
            with tarfile.open(path) as tar:
                return _blob(tar, digest)

        return read

    platform = {"architecture": config["architecture"], "os": config["os"]}
    return Image(manifest, platform, {digest: reader(digest) for digest in digests})


def _member(tar: tarfile.TarFile, name: str) -> bytes:
    file = tar.extractfile(name)
    if file is None:
        raise ValueError(f"{name} is no file")
    return file.read()


def _blob(tar: tarfile.TarFile, digest: str) -> bytes:
    data = _member(tar, f"blobs/{digest.replace(':', '/')}")
    if sha256(data) != digest:
        raise ValueError(f"{digest} is damaged")
    return data


# The registry


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


class Registry:
    """One registry, by the distribution specification: blobs, manifests, tags."""

    def __init__(self, name: str) -> None:
        """`name`: host, with or without port and folder. Raises BadInputError."""
        if not _REGISTRY.fullmatch(name):
            raise BadInputError(
                f"{name!r} is no registry: give a host, such as registry.example.org"
            )
        self.name = name
        self.host, _, self._folder = name.partition("/")
        self.is_loopback = _is_loopback(self.host.partition(":")[0])
        self._url = f"{'http' if self.is_loopback else 'https'}://{self.host}"
        self._token = ""

    def repository(self, name: str) -> str:
        """Return where a part of the release lies."""
        return f"{self._folder}/{name}" if self._folder else name

    def manifest(self, name: str, reference: str) -> bytes | None:
        """Return a manifest by tag or digest, or None. Raises FailedError."""
        headers = {"Accept": f"{_INDEX}, {_MANIFEST}"}
        return self._ask("GET", f"/v2/{self.repository(name)}/manifests/{reference}", headers)

    def blob(self, name: str, digest: str) -> bytes:
        """Return a blob, whose digest is checked. Raises FailedError."""
        data = self._ask("GET", f"/v2/{self.repository(name)}/blobs/{digest}", {})
        if data is None or sha256(data) != digest:
            raise FailedError(f"{self.name} does not give {digest} of {name} back")
        return data

    def push_blob(self, name: str, data: bytes) -> dict[str, Any]:
        """Push a blob unless it is there; return its descriptor without a type."""
        digest, path = sha256(data), f"/v2/{self.repository(name)}/blobs"
        if self._ask("HEAD", f"{path}/{digest}", {}) is None:
            where = self._location(f"{path}/uploads/")
            where += f"{'&' if '?' in where else '?'}digest={digest}"
            headers = {"Content-Type": "application/octet-stream"}
            self._ask("PUT", where, headers, data)
        return {"digest": digest, "size": len(data)}

    def push_manifest(self, name: str, document: object, reference: str | None = None) -> str:
        """Push a manifest, given as bytes or as a document; return its digest."""
        data = document if isinstance(document, bytes) else to_json(document)
        digest = sha256(data)
        path = f"/v2/{self.repository(name)}/manifests/{reference or digest}"
        self._ask("PUT", path, {"Content-Type": json.loads(data)["mediaType"]}, data)
        return digest

    def referrers(self, name: str, digest: str) -> list[dict[str, Any]] | None:
        """Return what refers to a manifest; None where the registry keeps no such list."""
        path = f"/v2/{self.repository(name)}/referrers/{digest}"
        index = self._ask("GET", path, {"Accept": _INDEX})
        return None if index is None else list(json.loads(index)["manifests"])

    def _location(self, path: str) -> str:
        try:
            with self._open("POST", self._url + path, {}, b"") as reply:
                where: str = reply.headers["Location"]
                return urllib.parse.urljoin(self._url + path, where)
        except OSError as error:
            raise FailedError(f"{self.name} takes no upload: {error}") from error

    def _open(
        self, method: str, url: str, headers: Mapping[str, str], data: bytes | None
    ) -> http.client.HTTPResponse:
        """Return the answer; logs in once when the registry asks for that. Raises OSError."""
        try:
            return self._send(method, url, headers, data)
        except urllib.error.HTTPError as error:
            challenge = error.headers.get("WWW-Authenticate", "")
            if error.code != 401 or not challenge:
                raise
        self._token = self._log_in(challenge)
        return self._send(method, url, headers, data)

    def _send(
        self, method: str, url: str, headers: Mapping[str, str], data: bytes | None
    ) -> http.client.HTTPResponse:
        request = urllib.request.Request(url, data, dict(headers), method=method)
        # For the registry alone: not for a store that it redirects to.
        if self._token and urllib.parse.urlsplit(url).netloc == self.host:
            request.add_unredirected_header("Authorization", self._token)
        reply: http.client.HTTPResponse = urllib.request.urlopen(request, timeout=_TIMEOUT_S)
        return reply

    def _ask(
        self, method: str, path: str, headers: Mapping[str, str], data: bytes | None = None
    ) -> bytes | None:
        """Return the answer, None for 404. Raises FailedError."""
        url = path if path.startswith("http") else self._url + path
        try:
            with self._open(method, url, headers, data) as reply:
                return reply.read()
        except urllib.error.HTTPError as error:
            if error.code == 404 and method in {"GET", "HEAD"}:
                return None
            said = error.read(500).decode(errors="replace")
            raise FailedError(f"{self.name} answers {error.code} to {method}: {said}") from error
        except OSError as error:
            raise FailedError(f"{self.name} does not answer: {error}") from error

    def _log_in(self, challenge: str) -> str:
        """Return the value of Authorization, with what the environment names.

        Raises FailedError.
        """
        user = os.environ.get("RELEASE_USERNAME", "")
        password = os.environ.get("RELEASE_PASSWORD", "")
        basic = "Basic " + base64.b64encode(f"{user}:{password}".encode()).decode()
        if not challenge.lower().startswith("bearer"):
            return basic
        parts = dict(re.findall(r'(\w+)="([^"]*)"', challenge))
        realm = parts.pop("realm", "")
        names = [self.repository(name) for name in (IMAGE, CHART)]
        query = [("service", parts.get("service", ""))]
        query += [("scope", f"repository:{name}:pull,push") for name in names]
        try:
            request = urllib.request.Request(f"{realm}?{urllib.parse.urlencode(query)}")
            if user:
                request.add_unredirected_header("Authorization", basic)
            with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as reply:
                answer = json.load(reply)
            return f"Bearer {answer.get('token') or answer['access_token']}"
        except (OSError, ValueError, KeyError) as error:
            raise FailedError(
                f"{self.name} gives no token, by {realm or 'no address'}: {error}; check"
                " RELEASE_USERNAME and RELEASE_PASSWORD"
            ) from error


# Signatures, as cosign writes and reads them


def load_key(path: Path) -> ec.EllipticCurvePrivateKey:
    """Read the signing key. Raises BadInputError."""
    try:
        key = load_pem_private_key(path.read_bytes(), None)
    except (OSError, ValueError, TypeError) as error:
        raise BadInputError(f"{path} is no private key without a passphrase: {error}") from error
    if not isinstance(key, ec.EllipticCurvePrivateKey) or not isinstance(key.curve, ec.SECP256R1):
        raise BadInputError(f"{path} is no EC key on P-256: openssl genpkey -algorithm EC ...")
    return key


def load_public_key(path: Path) -> ec.EllipticCurvePublicKey:
    """Read a public key. Raises BadInputError."""
    try:
        key = load_pem_public_key(path.read_bytes())
    except (OSError, ValueError) as error:
        raise BadInputError(f"{path} is no public key: {error}") from error
    if not isinstance(key, ec.EllipticCurvePublicKey):
        raise BadInputError(f"{path} is no EC key")
    return key


def _tag(digest: str, kind: str) -> str:
    return f"{digest.replace(':', '-')}.{kind}"


def _sealed(payload: bytes) -> bytes:
    """Return what a DSSE signature is over (its specification calls it PAE)."""
    return b"DSSEv1 %d %s %d %s" % (len(_INTOTO), _INTOTO.encode(), len(payload), payload)


@dataclass(frozen=True, slots=True)
class Signer:
    """Signs what lies in a registry."""

    registry: Registry
    key: ec.EllipticCurvePrivateKey

    def _sign(self, data: bytes) -> str:
        return base64.b64encode(self.key.sign(data, ec.ECDSA(hashes.SHA256()))).decode()

    def _push(
        self, name: str, tag: str, layers: Sequence[tuple[bytes, str, dict[str, str]]]
    ) -> None:
        config = to_json(
            {
                "architecture": "",
                "os": "",
                "config": {},
                "rootfs": {"type": "layers", "diff_ids": [sha256(layer[0]) for layer in layers]},
            }
        )
        manifest = {
            "schemaVersion": 2,
            "mediaType": _MANIFEST,
            "config": {"mediaType": _CONFIG, **self.registry.push_blob(name, config)},
            "layers": [
                {"mediaType": kind, "annotations": notes, **self.registry.push_blob(name, data)}
                for data, kind, notes in layers
            ],
        }
        self.registry.push_manifest(name, manifest, tag)

    def sign(self, name: str, digest: str) -> None:
        """Sign a manifest."""
        where = f"{self.registry.host}/{self.registry.repository(name)}"
        payload = to_json(
            {
                "critical": {
                    "identity": {"docker-reference": where},
                    "image": {"docker-manifest-digest": digest},
                    "type": "cosign container image signature",
                },
                "optional": None,
            }
        )
        notes = {_SIGNATURE_KEY: self._sign(payload)}
        self._push(name, _tag(digest, "sig"), [(payload, _SIGNED, notes)])

    def attest(self, name: str, digest: str, predicates: Mapping[str, object]) -> None:
        """Attest statements about a manifest: predicates by their type."""
        where = f"{self.registry.host}/{self.registry.repository(name)}"
        layers: list[tuple[bytes, str, dict[str, str]]] = []
        for kind, predicate in predicates.items():
            statement = {
                "_type": "https://in-toto.io/Statement/v0.1",
                "subject": [{"name": where, "digest": {"sha256": digest.partition(":")[2]}}],
                "predicateType": kind,
                "predicate": predicate,
            }
            payload = to_json(statement)
            envelope = {
                "payloadType": _INTOTO,
                "payload": base64.b64encode(payload).decode(),
                "signatures": [{"keyid": "", "sig": self._sign(_sealed(payload))}],
            }
            layers.append(
                (to_json(envelope), _ENVELOPE, {_SIGNATURE_KEY: "", "predicateType": kind})
            )
        self._push(name, _tag(digest, "att"), layers)


def _is_signed(key: ec.EllipticCurvePublicKey, signature: str, data: bytes) -> bool:
    try:
        key.verify(base64.b64decode(signature), data, ec.ECDSA(hashes.SHA256()))
    except (InvalidSignature, ValueError):
        return False
    return True


def verify_signature(
    registry: Registry, name: str, digest: str, key: ec.EllipticCurvePublicKey
) -> dict[str, Any]:
    """Verify that the key signed a manifest; return what it attests of it, predicates by type.

    What others signed beside it counts for nothing. Raises FailedError.
    """
    signed: set[str] = set()
    for layer in json.loads(_there(registry, name, _tag(digest, "sig")))["layers"]:
        payload = registry.blob(name, layer["digest"])
        if _is_signed(key, layer.get("annotations", {}).get(_SIGNATURE_KEY, ""), payload):
            signed.add(json.loads(payload)["critical"]["image"]["docker-manifest-digest"])
    if not signed:
        raise FailedError(f"{name}@{digest} is not signed by this key")
    if others := signed - {digest}:
        raise FailedError(f"the signature of {name}@{digest} is of {', '.join(sorted(others))}")
    predicates: dict[str, Any] = {}
    for layer in json.loads(_there(registry, name, _tag(digest, "att")))["layers"]:
        envelope = json.loads(registry.blob(name, layer["digest"]))
        payload = base64.b64decode(envelope["payload"])
        if not any(_is_signed(key, one["sig"], _sealed(payload)) for one in envelope["signatures"]):
            continue
        statement = json.loads(payload)
        (subject,) = statement["subject"]
        if f"sha256:{subject['digest']['sha256']}" != digest:
            raise FailedError(f"a statement about {name} is not about {digest}")
        predicates[statement["predicateType"]] = statement["predicate"]
    return predicates


def _there(registry: Registry, name: str, reference: str) -> bytes:
    data = registry.manifest(name, reference)
    if data is None:
        raise FailedError(f"{registry.name}/{name} has no {reference}")
    if reference.startswith("sha256:") and sha256(data) != reference:
        raise FailedError(f"{registry.name}/{name} gives other bytes for {reference}")
    return data


# Pushing


def push_image(registry: Registry, images: Sequence[Image], version: str) -> str:
    """Push an image of each architecture and the index over them; return the index's digest."""
    entries: list[dict[str, Any]] = []
    for image in images:
        for read in image.blobs.values():
            registry.push_blob(IMAGE, read())
        digest = registry.push_manifest(IMAGE, image.manifest)
        kind = json.loads(image.manifest)["mediaType"]
        entries.append(
            {
                "mediaType": kind,
                "digest": digest,
                "size": len(image.manifest),
                "platform": dict(image.platform),
            }
        )
    index = {"schemaVersion": 2, "mediaType": _INDEX, "manifests": entries}
    return registry.push_manifest(IMAGE, index, version)


def push_sbom(registry: Registry, document: Mapping[str, Any], subject: str, size: int) -> str:
    """Push the bill of materials as a referrer of the image; return its digest."""
    manifest = {
        "schemaVersion": 2,
        "mediaType": _MANIFEST,
        "artifactType": _SBOM,
        "config": {"mediaType": _EMPTY, **registry.push_blob(IMAGE, b"{}")},
        "layers": [{"mediaType": _SBOM, **registry.push_blob(IMAGE, to_json(document))}],
        "subject": {"mediaType": _INDEX, "digest": subject, "size": size},
    }
    digest = registry.push_manifest(IMAGE, manifest)
    if registry.referrers(IMAGE, subject) is None:
        # As the specification has it for registries that do not list them: an index under a tag.
        entry = {
            "mediaType": _MANIFEST,
            "artifactType": _SBOM,
            "digest": digest,
            "size": len(to_json(manifest)),
        }
        index = {"schemaVersion": 2, "mediaType": _INDEX, "manifests": [entry]}
        registry.push_manifest(IMAGE, index, subject.replace(":", "-"))
    return digest


def verify_sbom(registry: Registry, subject: str, attested: object) -> None:
    """Verify that the bill of materials that refers to the image is the attested one.

    Raises FailedError.
    """
    referrers = registry.referrers(IMAGE, subject)
    if referrers is None:
        referrers = json.loads(_there(registry, IMAGE, subject.replace(":", "-")))["manifests"]
    wanted = sha256(to_json(attested))
    for entry in referrers:
        if entry.get("artifactType") == _SBOM:
            layers = json.loads(_there(registry, IMAGE, entry["digest"]))["layers"]
            if wanted in (layer["digest"] for layer in layers):
                registry.blob(IMAGE, wanted)
                return
    raise FailedError(f"no bill of materials that refers to {subject} is the attested one")


def stage_chart(root: Path, folder: Path, registry: Registry, image_digest: str) -> Path:
    """Copy the chart, with the image that was pushed in it; return the copy. Raises FailedError."""
    chart = folder / "hostprep"
    shutil.copytree(root / CHART, chart)
    values = (chart / "values.yaml").read_text(encoding="utf-8")
    for old, new in (
        ('  registry: ""\n', f'  registry: "{registry.name}"\n'),
        ('  digest: ""\n', f'  digest: "{image_digest}"\n'),
    ):
        if values.count(old) != 1:
            raise FailedError(f"values.yaml has {old.strip()} {values.count(old)} times")
        values = values.replace(old, new)
    (chart / "values.yaml").write_text(values, encoding="utf-8")
    about = yaml.safe_load((chart / "Chart.yaml").read_text(encoding="utf-8"))
    listed = [{"name": "hostprep", "image": f"{registry.name}/{IMAGE}@{image_digest}"}]
    about["annotations"]["artifacthub.io/images"] = yaml.safe_dump(listed)
    (chart / "Chart.yaml").write_text(yaml.safe_dump(about, sort_keys=False), encoding="utf-8")
    return chart


def push_chart(
    helm: str, registry: Registry, chart: Path, version: str, out: Path
) -> tuple[Path, str]:
    """Package and push the chart by helm; return the package and its manifest's digest."""
    _run(helm, "package", str(chart), "--destination", str(out))
    package = out / f"hostprep-{version}.tgz"
    where = f"oci://{registry.name}/{CHART.rpartition('/')[0]}"
    insecure = ["--plain-http"] if registry.is_loopback else []
    _run(helm, "push", str(package), where, *insecure)
    return package, sha256(_there(registry, CHART, version))


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise FailedError(f"{' '.join(command[:2])}: {(done.stderr or done.stdout).strip()}")
    return done.stdout


def provenance(source: Source, *, started: datetime, builder: str, bases: list[Any]) -> object:
    """Return a SLSA 1 predicate: what was built, from what, by whom, when."""
    origin = source.origin or "git"
    moment = datetime.now(UTC).replace(microsecond=0)
    return {
        "buildDefinition": {
            "buildType": "https://hostprep.dev/docs/release.md",
            "externalParameters": {"version": source.version},
            "internalParameters": {},
            "resolvedDependencies": [
                {"uri": f"git+{origin}", "digest": {"gitCommit": source.commit}},
                *bases,
            ],
        },
        "runDetails": {
            "builder": {"id": builder},
            "metadata": {
                "startedOn": started.isoformat(),
                "finishedOn": moment.isoformat(),
            },
        },
    }


# The whole


def verify(registry: Registry, version: str, key: ec.EllipticCurvePublicKey) -> dict[str, Any]:
    """Pull a release back and check every digest and signature; return what it is made of.

    Raises FailedError.
    """
    index = _there(registry, IMAGE, version)
    image = sha256(index)
    architectures: list[str] = []
    for entry in json.loads(index)["manifests"]:
        manifest = json.loads(_there(registry, IMAGE, entry["digest"]))
        for part in (manifest["config"], *manifest["layers"]):
            registry.blob(IMAGE, part["digest"])
        architectures.append(entry["platform"]["architecture"])
    statements = verify_signature(registry, IMAGE, image, key)
    chart = _there(registry, CHART, version)
    (layer,) = [one for one in json.loads(chart)["layers"] if one["mediaType"] == _CHART_LAYER]
    with tempfile.TemporaryFile() as file:
        file.write(registry.blob(CHART, layer["digest"]))
        file.seek(0)
        with tarfile.open(fileobj=file) as tar:
            values = yaml.safe_load(_member(tar, "hostprep/values.yaml"))
            about = yaml.safe_load(_member(tar, "hostprep/Chart.yaml"))
    if (about["version"], values["image"]["digest"]) != (version, image):
        raise FailedError(f"the chart is of {about['version']} with {values['image']['digest']}")
    about_chart = verify_signature(registry, CHART, sha256(chart), key)
    for what, found, kind in (
        ("image", statements, _PROVENANCE),
        ("image", statements, _CYCLONEDX),
        ("chart", about_chart, _PROVENANCE),
    ):
        if kind not in found:
            raise FailedError(f"this key attests nothing of {kind} about the {what}")
    verify_sbom(registry, image, statements[_CYCLONEDX])
    commits = {
        dependency["digest"].get("gitCommit")
        for predicate in (statements[_PROVENANCE], about_chart[_PROVENANCE])
        for dependency in predicate["buildDefinition"]["resolvedDependencies"]
    } - {None}
    if len(commits) != 1:
        raise FailedError(f"image and chart are of different commits: {sorted(map(str, commits))}")
    return {
        "version": version,
        "commit": commits.pop(),
        "image": f"{registry.name}/{IMAGE}@{image}",
        "architectures": sorted(architectures),
        "chart": f"{registry.name}/{CHART}@{sha256(chart)}",
        "components": len(statements[_CYCLONEDX]["components"]),
    }


def release(
    registry: Registry,
    archives: Sequence[Path],
    key: ec.EllipticCurvePrivateKey,
    *,
    rehearse: bool,
    builder: str,
    helm: str,
    root: Path = ROOT,
) -> dict[str, Any]:
    """Push the release that is checked out, and verify it. Raises BadInputError, FailedError."""
    started = datetime.now(UTC).replace(microsecond=0)
    if rehearse and not registry.is_loopback:
        raise BadInputError(f"{registry.name} is not on loopback: a rehearsal goes nowhere else")
    source = source_of(root, rehearse=rehearse)
    images = [read_archive(path, source.version) for path in archives]
    names = [image.platform["architecture"] for image in images]
    if not images or len(set(names)) != len(names):
        raise BadInputError("give one --image for each architecture")
    if shutil.which(helm) is None:
        raise BadInputError(f"there is no {helm}: install Helm 3.14 or later, or name it by --helm")
    for name in (IMAGE, CHART):
        if registry.manifest(name, source.version) is not None:
            raise BadInputError(
                f"{registry.name}/{name} has {source.version} already: a version is pushed once"
            )
    document = json.loads(_run(sys.executable, str(root / "scripts" / "sbom.py")))
    bases = [
        {"uri": one["purl"], "digest": {"sha256": one["hashes"][0]["content"]}}
        for one in document["components"]
        if one["type"] == "container"
    ]
    image = push_image(registry, images, source.version)
    push_sbom(registry, document, image, len(_there(registry, IMAGE, image)))
    out = root / "dist"
    out.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        staged = stage_chart(root, Path(folder), registry, image)
        _, chart = push_chart(helm, registry, staged, source.version, out)
    made = provenance(source, started=started, builder=builder, bases=bases)
    signer = Signer(registry, key)
    for name, digest, more in ((IMAGE, image, {_CYCLONEDX: document}), (CHART, chart, {})):
        signer.sign(name, digest)
        signer.attest(name, digest, {_PROVENANCE: made, **more})
    found = verify(registry, source.version, key.public_key())
    (out / "release.json").write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    return found


def main(arguments: Sequence[str]) -> int:
    """Run the command line; return 0 done, 1 failed on the way, 2 bad input."""
    parser = argparse.ArgumentParser(prog="release.py", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("registry", metavar="REGISTRY")
    parser.add_argument("--key", type=Path, help="private key that signs")
    parser.add_argument("--image", type=Path, action="append", default=[], metavar="ARCHIVE")
    parser.add_argument("--rehearse", action="store_true", help="without a tag; loopback only")
    parser.add_argument("--builder", default="https://hostprep.dev/docs/release.md#by-hand")
    parser.add_argument("--helm", default="helm", metavar="PROGRAM")
    parser.add_argument("--verify", type=Path, metavar="PUBLIC_KEY", help="verify what is there")
    parser.add_argument("--version", help="with --verify: another than this tree's")
    given = parser.parse_args(arguments)
    try:
        registry = Registry(given.registry)
        if given.verify is not None:
            version = given.version or next(_versions(ROOT))[1]
            found = verify(registry, version, load_public_key(given.verify))
        elif given.key is None:
            raise BadInputError("--key is missing: a release is signed")
        else:
            found = release(
                registry,
                given.image,
                load_key(given.key),
                rehearse=given.rehearse,
                builder=given.builder,
                helm=given.helm,
            )
    except BadInputError as error:
        sys.stderr.write(f"release: {error}\n")
        return 2
    except FailedError as error:
        sys.stderr.write(f"release: {error}\n")
        return 1
    sys.stdout.write(json.dumps(found, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
