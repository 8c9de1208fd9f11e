"""What `make test-engines-all` writes down."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

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
    recorder.add("test_of_something_else", "failed")
    recorder.write(path)
    rows = {row["way"]: row for row in json.loads(path.read_text())}
    assert set(rows) == {"lmcache", "mooncake", "sglang"}
    assert rows["sglang"] == kept
    assert (rows["lmcache"]["version"], rows["lmcache"]["result"]) == ("0.5.6", "failed")
    assert rows["mooncake"]["result"] == "passed"
