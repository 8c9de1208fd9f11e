"""`make base-image`: what a tag means is asked of its registry, here one on loopback."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

pytestmark = pytest.mark.unit

_ROOT = Path(__file__).parents[3]
_INDEX = "application/vnd.oci.image.index.v1+json"
_OLD = "0" * 64


@pytest.fixture(scope="module")
def base_image() -> ModuleType:
    path = _ROOT / "scripts" / "base_image.py"
    spec = importlib.util.spec_from_file_location("base_image", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["base_image"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


class _Registry(ThreadingHTTPServer):
    """Serves one tag to those with a token, and hands tokens out."""

    daemon_threads = True

    def __init__(self, index: dict[str, Any]) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.index = json.dumps(index).encode()

    @property
    def host(self) -> str:
        return f"127.0.0.1:{self.server_port}"


class _Handler(BaseHTTPRequestHandler):
    server: _Registry

    def do_GET(self) -> None:
        host = self.server.host
        if self.path == "/token?service=here&scope=repository%3Alibrary%2Fpython%3Apull":
            self._answer(200, b'{"token": "secret"}')
        elif self.path != "/v2/library/python/manifests/3.13-slim":
            self._answer(404, b"")
        elif self.headers.get("Authorization") != "Bearer secret":
            challenge = (
                f'Bearer realm="http://{host}/token",service="here",'
                'scope="repository:library/python:pull"'
            )
            self._answer(401, b"", {"WWW-Authenticate": challenge})
        else:
            assert _INDEX in self.headers["Accept"]
            self._answer(200, self.server.index)

    def _answer(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_arguments: object) -> None:
        """Keep the test's output clean."""


def _index(*architectures: str, media_type: str = _INDEX) -> dict[str, Any]:
    platforms = [{"platform": {"architecture": name, "os": "linux"}} for name in architectures]
    return {"schemaVersion": 2, "mediaType": media_type, "manifests": platforms}


@pytest.fixture
def registry() -> Iterator[_Registry]:
    server = _Registry(_index("amd64", "arm64", "s390x"))
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def _containerfile(folder: Path, base: str) -> Path:
    path = folder / "Containerfile"
    path.write_text(f"ARG ARCH=amd64\nARG BASE={base}\nFROM ${{BASE}}\n")
    return path


@pytest.mark.parametrize("former", ["", f"@sha256:{_OLD}"])
def test_the_digest_of_what_the_tag_means_now_is_written_beside_it(
    former: str, base_image: ModuleType, registry: _Registry, tmp_path: Path
) -> None:
    tag = f"{registry.host}/library/python:3.13-slim"
    path = _containerfile(tmp_path, f"{tag}{former}")
    assert base_image.main(path) == 0
    digest = hashlib.sha256(registry.index).hexdigest()
    assert path.read_text() == (f"ARG ARCH=amd64\nARG BASE={tag}@sha256:{digest}\nFROM ${{BASE}}\n")


@pytest.mark.parametrize(
    ("index", "why"),
    [
        (_index("amd64"), "lacks arm64"),
        (_index("amd64", "arm64", media_type="application/json"), "no index"),
    ],
)
def test_what_serves_one_architecture_only_is_refused(
    index: dict[str, Any],
    why: str,
    *,
    base_image: ModuleType,
    registry: _Registry,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    registry.index = json.dumps(index).encode()
    path = _containerfile(tmp_path, f"{registry.host}/library/python:3.13-slim@sha256:{_OLD}")
    before = path.read_text()
    assert base_image.main(path) == 1
    assert why in capsys.readouterr().err
    assert path.read_text() == before


def test_a_registry_that_does_not_answer_changes_nothing(
    base_image: ModuleType,
    registry: _Registry,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = _containerfile(tmp_path, f"{registry.host}/library/none:3.13-slim@sha256:{_OLD}")
    before = path.read_text()
    assert base_image.main(path) == 1
    assert "404" in capsys.readouterr().err
    assert path.read_text() == before


def test_the_projects_own_base_is_understood(base_image: ModuleType) -> None:
    text = (_ROOT / "Containerfile").read_text()
    image = base_image.base_of(text)
    assert image.url.startswith("https://registry-1.docker.io/v2/library/python/manifests/3.")
    digest = f"sha256:{_OLD}"
    assert f"{image.tag}@{digest}\n" in base_image.with_digest(text, digest)
