"""Write the base image's current digest into the Containerfile: `make base-image`.

The Containerfile names its base by tag and digest: the tag for people, the digest for builds, which
are the same wherever and whenever they run. This asks the tag's registry what the tag means now.
"""

# ruff: noqa: INP001  scripts are no package
from __future__ import annotations

import hashlib
import json
import re
import sys
import urllib.error
import urllib.parse
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any

CONTAINERFILE = Path(__file__).parents[1] / "Containerfile"
_ARG = re.compile(
    r"^ARG BASE=(?P<host>[^/\s]+)/(?P<name>[^:@\s]+):(?P<tag>[^@\s]+)(?:@sha256:[0-9a-f]{64})?$",
    re.MULTILINE,
)
_INDEX_TYPES = (
    "application/vnd.oci.image.index.v1+json",
    "application/vnd.docker.distribution.manifest.list.v2+json",
)
_ARCHITECTURES = {"amd64", "arm64"}
_TIMEOUT_S = 30.0
_MAX_BYTES = 4 << 20


class BaseImageError(Exception):
    """What is wrong, in one line."""


@dataclass(frozen=True, slots=True)
class Image:
    """A tag in a registry."""

    host: str
    name: str
    tag: str

    @property
    def url(self) -> str:
        """Address of the manifest, by the registry's API (OCI distribution)."""
        # docker.io is a name; its registry answers elsewhere.
        host = "registry-1.docker.io" if self.host == "docker.io" else self.host
        scheme = "http" if host.partition(":")[0] in ("localhost", "127.0.0.1") else "https"
        return f"{scheme}://{host}/v2/{self.name}/manifests/{self.tag}"


def base_of(containerfile: str) -> Image:
    """Return the base image's tag. Raises BaseImageError."""
    found = _ARG.search(containerfile)
    if found is None:
        raise BaseImageError("the Containerfile has no line ARG BASE=HOST/NAME:TAG@sha256:...")
    return Image(found["host"], found["name"], found["tag"])


def with_digest(containerfile: str, digest: str) -> str:
    """Return the Containerfile with that digest of its base image."""
    return _ARG.sub(rf"ARG BASE=\g<host>/\g<name>:\g<tag>@{digest}", containerfile)


def current_digest(image: Image) -> str:
    """Return the digest of what the tag means now, for all architectures. Raises BaseImageError."""
    try:
        body = _get(image.url, ",".join(_INDEX_TYPES))
    except (OSError, ValueError) as error:
        raise BaseImageError(f"cannot read {image.url}: {error}") from error
    index = _parse(body)
    if index.get("mediaType") not in _INDEX_TYPES:
        raise BaseImageError(f"{image.url} is no index of several architectures")
    platforms = [manifest.get("platform", {}) for manifest in index.get("manifests", [])]
    missing = _ARCHITECTURES - {platform.get("architecture") for platform in platforms}
    if missing:
        raise BaseImageError(f"{image.url} lacks {', '.join(sorted(missing))}")
    # Of the bytes that came, not what a header says.
    return f"sha256:{hashlib.sha256(body).hexdigest()}"


def _parse(body: bytes) -> dict[str, Any]:
    try:
        document = json.loads(body)
    except ValueError:
        document = None
    return document if isinstance(document, dict) else {}


def _get(url: str, accept: str) -> bytes:
    """Read, with a token where the registry asks for one. Raises OSError and ValueError."""
    try:
        return _read(url, {"Accept": accept})
    except urllib.error.HTTPError as error:
        challenge = error.headers.get("WWW-Authenticate", "")
        if error.code != 401 or not challenge.lower().startswith("bearer "):
            raise
    asked = dict(re.findall(r'(\w+)="([^"]*)"', challenge))
    realm = asked.pop("realm", "")
    token = _parse(_read(f"{realm}?{urllib.parse.urlencode(asked)}", {}))
    headers = {"Accept": accept, "Authorization": f"Bearer {token.get('token', '')}"}
    return _read(url, headers)


def _read(url: str, headers: dict[str, str]) -> bytes:
    if not url.startswith(("https://", "http://")):
        raise ValueError(f"{url} is no web address")
    request = urllib.request.Request(url, headers=headers)  # noqa: S310 - checked above
    with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as answer:  # noqa: S310
        body: bytes = answer.read(_MAX_BYTES)
        return body


def main(path: Path = CONTAINERFILE) -> int:
    """Rewrite the Containerfile. Returns 0, or 1 where the registry does not tell."""
    before = path.read_text(encoding="utf-8")
    try:
        image = base_of(before)
        digest = current_digest(image)
    except BaseImageError as error:
        sys.stderr.write(f"base-image: {error}\n")
        return 1
    after = with_digest(before, digest)
    path.write_text(after, encoding="utf-8")
    state = "is still" if after == before else "is now"
    sys.stdout.write(f"base-image: {image.host}/{image.name}:{image.tag} {state} {digest}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
