"""How scripts/release.py logs in to a registry, and which ones it takes for this machine's."""

from __future__ import annotations

import base64
import importlib.util
import json
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import ModuleType

import pytest

pytestmark = pytest.mark.unit
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def release() -> ModuleType:
    spec = importlib.util.spec_from_file_location("release", ROOT / "scripts" / "release.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["release"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


class _TokenRegistry(BaseHTTPRequestHandler):
    """Anybody may read, and has nothing to read; writing needs a token, which me:right gets."""

    def do_GET(self) -> None:
        if not self.path.startswith("/token?"):
            self._answer(404)
        elif self.headers.get("Authorization") == _basic("me:right"):
            self._answer(200, json.dumps({"token": "t"}).encode())
        else:
            self._answer(401)

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_POST(self) -> None:
        self._write(202)

    def do_PUT(self) -> None:
        self._write(201)

    def _write(self, code: int) -> None:
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self._answer(code if self.headers.get("Authorization") == "Bearer t" else 401)

    def _answer(self, code: int, body: bytes = b"") -> None:
        self.send_response(code)
        if code == 401:
            port = self.server.server_port  # type: ignore[attr-defined]
            realm = f"http://127.0.0.1:{port}/token"
            self.send_header("WWW-Authenticate", f'Bearer realm="{realm}",service="here"')
        self.send_header("Location", "/v2/uploads/1")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


def _basic(text: str) -> str:
    return "Basic " + base64.b64encode(text.encode()).decode()


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setenv("RELEASE_USERNAME", "me")
    monkeypatch.setenv("RELEASE_PASSWORD", "right")
    with ThreadingHTTPServer(("127.0.0.1", 0), _TokenRegistry) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"127.0.0.1:{server.server_port}"
        server.shutdown()


def test_an_upload_logs_in_where_anybody_may_read(release: ModuleType, registry: str) -> None:
    there = release.Registry(registry)
    assert there.push_blob("hostprep", b"{}")["digest"] == release.sha256(b"{}")


def test_wrong_credentials_are_a_refusal_that_names_them(
    release: ModuleType, registry: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RELEASE_PASSWORD", "wrong")
    with pytest.raises(release.FailedError, match="check RELEASE_USERNAME and RELEASE_PASSWORD"):
        release.Registry(registry).push_manifest("hostprep", {"mediaType": "x"})


@pytest.mark.parametrize(
    ("name", "is_loopback"),
    [
        ("127.0.0.1:5000", True),
        ("127.1.2.3/team", True),
        ("localhost", True),
        ("127.evil.example", False),
        ("127.0.0.1.evil.example:5000", False),
        ("localhost.example", False),
        ("10.0.0.1", False),
    ],
)
def test_loopback_is_an_address_and_no_name_that_looks_like_one(
    release: ModuleType, name: str, *, is_loopback: bool
) -> None:
    assert release.Registry(name).is_loopback is is_loopback
