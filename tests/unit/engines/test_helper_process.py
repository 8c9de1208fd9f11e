"""The process beside an engine that starts: it hands memory over, and ends with the engine."""

from __future__ import annotations

import http.server
import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from hostprep.engines.helper_process import start_beside

pytestmark = pytest.mark.unit

HELPER = "hostprep.engines.helper_process"
HANG_S = 60.0


class Answers(http.server.BaseHTTPRequestHandler):
    """An LMCache server's interface, as far as it is asked here."""

    got: list[dict[str, Any]]

    def do_GET(self) -> None:
        self._answer({"status": "healthy"})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.got.append(body)
        row = {"device_path": body["device_path"], "size_in_bytes": body["size"]}
        row |= {"used_bytes": 0, "active_allocations": 0, "state": "active", "is_primary": False}
        self._answer({"added": row})

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - http.server's name
        del format, args

    def _answer(self, document: dict[str, Any]) -> None:
        data = json.dumps(document).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


@pytest.fixture
def server() -> Iterator[tuple[str, list[dict[str, Any]]]]:
    Answers.got = []
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Answers) as found:
        threading.Thread(target=found.serve_forever, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{found.server_address[1]}", Answers.got
        finally:
            found.shutdown()


def _run(url: str, *engine: str) -> subprocess.CompletedProcess[str]:
    """Become `engine` beside the process; return when both have ended."""
    command = start_beside("lmcache", [url, "/mem/one", "4096", "/mem/two", "8192"], engine)
    return subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=HANG_S,
    )  # fmt: skip


def test_each_region_is_handed_over_while_the_engine_runs(
    server: tuple[str, list[dict[str, Any]]],
) -> None:
    url, got = server
    done = _run(url, sys.executable, "-c", "import os; os.wait()")
    assert done.returncode == 0, done.stderr
    assert [(each["device_path"], each["size"]) for each in got] == [
        ("/mem/one", 4096),
        ("/mem/two", 8192),
    ]
    assert "/mem/two, 8 KiB, is part of the server's L1" in done.stderr


def test_an_engine_that_ended_at_once_is_not_waited_for() -> None:
    done = _run("http://127.0.0.1:1", "/bin/true")
    assert "the engine ended before it had its memory" in done.stderr


def test_another_engine_that_answers_there_gets_nothing_of_a_dead_ones(
    server: tuple[str, list[dict[str, Any]]],
) -> None:
    url, got = server
    done = _run(url, "/bin/true")
    assert "the engine ended before it had its memory" in done.stderr
    assert got == []


@pytest.mark.parametrize(
    ("engine", "arguments", "code"),
    [
        ("lmcache", ("nonsense",), 2),
        ("lmcache", (), 2),
        ("lmcache", ("http://127.0.0.1:1", "/mem/one"), 2),
        ("lmcache", ("http://127.0.0.1:1", "/mem/one", "much"), 2),
        ("lmcache", ("http://127.0.0.1:1", "/mem/one", "4096"), 1),
        ("mooncake", ("nonsense",), 2),
        ("mooncake", ("1", "one", "4096"), 1),
    ],
)
def test_started_by_hand_it_says_in_one_line_what_is_wrong(
    engine: str, arguments: tuple[str, ...], code: int
) -> None:
    done = subprocess.run(
        [sys.executable, "-m", HELPER, engine, *arguments],
        capture_output=True, text=True, check=False, timeout=HANG_S,
    )  # fmt: skip
    assert done.returncode == code
    assert done.stderr.startswith("hostprep: ")
    assert done.stderr.count("\n") == 1, done.stderr
    assert ("HOSTPREP_BESIDE" in done.stderr) == (code == 1)
    assert "goes on without" in done.stderr
