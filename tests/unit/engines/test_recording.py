"""What `make test-engines-all` writes down."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from testbed.engines.interpreters import chosen
from testbed.engines.lock import lock_file, parse_pins
from tests.engines.recording import Recorder

pytestmark = pytest.mark.unit


def test_the_worst_outcome_counts_and_other_ways_keep_their_rows(tmp_path: Path) -> None:
    path = tmp_path / "tested.json"
    kept = {"way": "sglang", "engine": "SGLang", "version": "1", "date": "d", "result": "passed"}
    path.write_text(json.dumps([kept, {**kept, "way": "lmcache"}]))
    recorder = Recorder()
    for outcome in ("passed", "failed", "passed"):
        recorder.add("test_lmcache_server", outcome)
    recorder.add("test_mooncake", "passed")
    recorder.add("test_vllm_data_parallel", "failed", "test_each[vllm-offloading]")
    recorder.add("test_vllm_data_parallel", "passed", "test_each[vllm]")
    recorder.add("test_vllm_offloading", "passed", "test_it[slots]")
    recorder.add("test_of_something_else", "failed")
    recorder.write(path)
    rows = {row["way"]: row for row in json.loads(path.read_text())}
    assert set(rows) == {"lmcache", "mooncake", "sglang", "vllm", "vllm-offloading"}
    assert (rows["vllm"]["result"], rows["vllm-offloading"]["result"]) == ("passed", "failed")
    assert rows["sglang"] == kept
    assert (rows["lmcache"]["version"], rows["lmcache"]["result"]) == ("0.5.6", "failed")
    assert rows["mooncake"]["result"] == "passed"


def test_each_release_has_a_row_and_one_without_an_environment_loses_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "tested.json"
    old = {"way": "vllm", "engine": "vLLM", "version": "0.1", "date": "d", "result": "passed"}
    path.write_text(json.dumps([old, {**old, "way": "vllm-simple"}]))
    for environment in ("", "vllm-cpu-previous"):
        monkeypatch.setenv("ENGINES_RELEASE", environment)
        recorder = Recorder()
        recorder.add("test_vllm_configuration", "passed")
        recorder.add("test_mooncake", "passed")
        recorder.write(path)
    rows = [(row["way"], row["version"]) for row in json.loads(path.read_text())]
    pins = [_pinned(name, "vllm-cpu") for name in ("vllm-cpu-previous", "vllm-cpu")]
    mooncake = _pinned("mooncake", "mooncake-transfer-engine-non-cuda")
    assert rows == [
        ("mooncake", mooncake), *(("vllm", pin) for pin in pins), ("vllm-simple", "0.1"),
    ]  # fmt: skip


def _pinned(environment: str, package: str) -> str:
    return parse_pins(lock_file(environment).read_text("ascii"))[package]


def test_a_release_that_is_none_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ENGINES_RELEASE", "vllm-cpu-prevoius")
    with pytest.raises(ValueError, match="not one of"):
        chosen("vllm-cpu")
