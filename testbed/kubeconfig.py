"""Kubeconfig files that need no other file: certificates and tokens are inside."""

from __future__ import annotations

import base64
import json
import os
from pathlib import Path

from testbed.pki import KeyPair

__all__ = ["kubeconfig_text", "write_private"]


def kubeconfig_text(
    server: str, ca: bytes, *, token: str | None = None, certificate: KeyPair | None = None
) -> str:
    """A kubeconfig (JSON is YAML) for one cluster and one user."""
    user: dict[str, str] = {}
    if token is not None:
        user["token"] = token
    if certificate is not None:
        user["client-certificate-data"] = _base64(certificate.public)
        user["client-key-data"] = _base64(certificate.private)
    cluster = {"server": server, "certificate-authority-data": _base64(ca)}
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "testbed", "cluster": cluster}],
        "users": [{"name": "user", "user": user}],
        "contexts": [{"name": "testbed", "context": {"cluster": "testbed", "user": "user"}}],
        "current-context": "testbed",
    }
    return json.dumps(config, indent=1)


def write_private(path: Path, content: str | bytes) -> Path:
    """Write a file that only its owner may read."""
    data = content.encode() if isinstance(content, str) else content
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    with os.fdopen(fd, "wb") as file:
        file.write(data)
    return path


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode()
