"""Burst to ready without an engine: its options, its load, its table and its picture."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from benchmarks.burst import __main__ as burst
from benchmarks.burst.lane import stored_bytes
from benchmarks.burst.load import PROMPT_TOKENS, Load
from benchmarks.burst.scene import BASE_PAGE_NS, HUGE_PAGE_NS
from testbed.processes import wait_for

pytestmark = pytest.mark.unit

_STANDIN = Path(__file__).parents[3] / "testbed" / "standin" / "libcuda.c"
_RUN = {
    "made": "2026-01-02 03:04 UTC",
    "machine": "2 CPUs, 8 GiB, Linux 6.18",
    "simulated": {
        "stands_for_bytes": 512 << 30,
        "base_page_ns": 512.0,
        "huge_page_ns": 61680.0,
        "scale": 256.0,
    },
    "size_bytes": 2 << 30,
    "backing": "HugeTLB2Mi,Base",
    "prepare_s": 1.5,
    "lanes": [
        {
            "name": "today",
            "healthy_s": 120.0,
            "first_token_s": 121.0,
            "host_tier_s": 123.0,
            "end_s": 138.0,
            "steps": [
                {"name": "populate", "begin_s": 40.0, "end_s": 42.5},
                {"name": "register", "begin_s": 42.5, "end_s": 111.5},
            ],
            "tokens_s": [121.0, 121.5, 130.0],
            "completed": 1,
            "turned_away": 119,
            "load_average_before": 1.0,
            "load_average_after": 2.0,
        },
        {
            "name": "prepared",
            "healthy_s": 50.0,
            "first_token_s": 51.0,
            "host_tier_s": 69.0,
            "end_s": 84.0,
            "steps": [{"name": "register", "begin_s": 49.0, "end_s": 65.0}],
            "tokens_s": [51.0, 52.0, 60.0, 83.0],
            "completed": 2,
            "turned_away": 50,
            "load_average_before": 1.0,
            "load_average_after": 2.0,
        },
    ],
}


@pytest.fixture
def recorded(tmp_path: Path) -> Path:
    path = tmp_path / "run.json"
    path.write_text(json.dumps(_RUN), "utf-8")
    return path


def _called(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    monkeypatch.setattr(sys, "argv", ["burst", *words])
    return burst.main()


def test_a_recorded_run_is_shown_and_drawn(
    recorded: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    picture = recorded.with_suffix(".svg")

    assert _called(monkeypatch, "--from", str(recorded), "--picture", str(picture)) == 0

    said = capsys.readouterr().out
    assert "2.4" in said  # 121 s against 51 s
    assert "simulated" in said
    assert "512 ns" in said
    assert "61.7 us" in said
    drawn = picture.read_text("utf-8")
    for words in ("simulated", "first token 121 s", "first token 51 s", "register 16 s", "69 s"):
        assert words in drawn
    assert _called(monkeypatch, "--from", str(recorded), "--picture", str(picture)) == 0
    assert picture.read_text("utf-8") == drawn


def test_json_comes_back_as_it_was(
    recorded: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _called(monkeypatch, "--from", str(recorded), "-o", "json") == 0
    assert json.loads(capsys.readouterr().out) == _RUN


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--size", "much"], "--size"),
        (["--size", "1Mi"], "at least 64Mi"),
        (["--real"], "--real -- vllm serve MODEL"),
        (["vllm", "serve", "m"], "--real -- vllm serve MODEL"),
        (["--real", "--", "vllm", "serve", "m"], "--real needs --size"),
        (["--real", "--size", "1Gi", "--stands-for", "2Gi", "--", "vllm", "serve", "m"], "itself"),
    ],
)
def test_bad_options_are_told(
    words: list[str],
    told: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as ended:
        _called(monkeypatch, *words)
    assert ended.value.code == 2
    assert told in capsys.readouterr().err


@pytest.mark.parametrize("text", ["", "[1]", "{}", None])
def test_what_is_no_run_is_told(
    text: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = tmp_path / "run.json"
    if text is not None:
        path.write_text(text)
    assert _called(monkeypatch, "--from", str(path), "--picture", str(tmp_path / "x.svg")) == 2
    assert "is no run that -o json wrote" in capsys.readouterr().err
    assert not (tmp_path / "x.svg").exists()


def test_the_times_it_states_are_those_of_the_stand_in() -> None:
    source = _STANDIN.read_text("utf-8")
    assert f"BASE_NS_PER_MIB {BASE_PAGE_NS * 256:.0f}L" in source
    assert f"HUGE_NS_PER_MIB {HUGE_PAGE_NS / 2:.0f}L" in source


def test_bytes_in_the_host_tier_are_read_from_vllms_metrics() -> None:
    metrics = (
        "# TYPE vllm:kv_offload_store_bytes_total counter\n"
        'vllm:kv_offload_store_bytes_total{engine="0"} 1048576.0\n'
        'vllm:kv_offload_load_bytes_total{engine="0"} 7.0\n'
    )
    assert stored_bytes(metrics) == 1048576
    assert stored_bytes("") == 0


class _Server(BaseHTTPRequestHandler):
    """Streams two tokens a request, as vLLM does."""

    prompts: list[list[int]]

    def do_GET(self) -> None:
        self._answer(b'{"data": [{"id": "tiny"}]}')

    def do_POST(self) -> None:
        asked: dict[str, Any] = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.prompts.append(asked["prompt"])
        part = b'data: {"choices": [{"text": "a", "token_ids": [5]}]}\n\n'
        self._answer(part * 2 + b"data: [DONE]\n\n")

    def log_message(self, *args: Any) -> None:
        """Nothing."""

    def _answer(self, content: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)


@pytest.fixture
def port() -> Iterator[int]:
    _Server.prompts = []
    with ThreadingHTTPServer(("127.0.0.1", 0), _Server) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield int(server.server_address[1])
        server.shutdown()


def test_the_load_notes_a_moment_for_each_token(port: int) -> None:
    load = Load(port, every_s=0.01)
    load.start()
    wait_for(lambda: load.tally.completed >= 3, 60)
    load.stop()
    assert len(load.tally.tokens_at_s) == 2 * load.tally.completed
    assert load.tally.turned_away == 0
    assert {len(prompt) for prompt in _Server.prompts} == {PROMPT_TOKENS}
    assert len({tuple(prompt[:32]) for prompt in _Server.prompts[:3]}) == 3


def test_the_load_counts_who_is_turned_away(port: int) -> None:
    nobody = Load(1, every_s=0.01)
    nobody.start()
    wait_for(lambda: nobody.tally.turned_away >= 3, 60)
    nobody.stop()
    assert (nobody.tally.completed, nobody.tally.tokens_at_s) == (0, [])
