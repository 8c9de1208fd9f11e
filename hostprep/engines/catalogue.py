"""Which engines can be led to prepared memory, by which way, and what the tests saw of it."""

from __future__ import annotations

from dataclasses import dataclass

from hostprep.errors import BadInputError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

__all__ = ["WAYS", "Tried", "Way", "tried", "way_of"]


@dataclass(frozen=True)
class Way:
    """One way of an engine to prepared memory: `hostprep exec --engine NAME`."""

    name: str
    engine: str
    versions: tuple[str, ...]
    """Releases whose own code was tried or read for it; another one is a warning, no more."""
    how: str
    """`configuration`: the engine as it is. `plugin`: it loads code of ours."""
    background: bool
    """Whether it serves while its memory is still being registered with CUDA."""
    kind: bool
    """Whether it takes turns in registering with the node's other processes (docs/register.md).

    Configuration-only ways register by themselves, synchronously, and take no turns.
    """
    docs: str
    launcher: str
    """Module that completes its command line: see hostprep.engines.launching."""
    example: str


@dataclass(frozen=True)
class Tried:
    """What the last run of the engines' tests saw: one row of tested.json."""

    engine: str
    version: str
    way: str
    date: str
    result: str


WAYS = (
    Way(
        name="vllm",
        engine="vLLM",
        versions=("0.31.0", "0.32.0", "0.33.0"),
        how="configuration",
        background=False,
        kind=False,
        docs="docs/engines/vllm.md",
        launcher="hostprep.engines.vllm.launch",
        example="hostprep exec --pool kv --engine vllm -- vllm serve MODEL",
    ),
    Way(
        name="vllm-offloading",
        engine="vLLM",
        versions=("0.31.0", "0.32.0", "0.33.0"),
        how="plugin",
        background=True,
        kind=True,
        docs="docs/engines/vllm.md",
        launcher="hostprep.engines.vllm.launch_offloading",
        example="hostprep exec --pool kv --engine vllm-offloading -- vllm serve MODEL",
    ),
    Way(
        name="vllm-simple",
        engine="vLLM",
        versions=("0.31.0", "0.32.0", "0.33.0"),
        how="plugin",
        background=True,
        kind=True,
        docs="docs/engines/vllm.md",
        launcher="hostprep.engines.vllm.launch_simple",
        example="hostprep exec --pool kv --engine vllm-simple -- vllm serve MODEL",
    ),
    Way(
        name="lmcache",
        engine="LMCache",
        versions=("0.5.6",),
        how="configuration",
        background=False,
        kind=False,
        docs="docs/engines/lmcache.md",
        launcher="hostprep.engines.lmcache.launch",
        example="hostprep exec --pool kv --engine lmcache -- lmcache server",
    ),
    Way(
        name="lmcache-inprocess",
        engine="LMCache",
        versions=("0.5.6",),
        how="plugin",
        background=False,
        kind=True,
        docs="docs/engines/lmcache.md",
        launcher="hostprep.engines.lmcache.launch_inside",
        example="hostprep exec --pool kv --engine lmcache-inprocess -- vllm serve MODEL",
    ),
    Way(
        name="mooncake",
        engine="Mooncake",
        versions=("0.3.13.post1",),
        how="configuration",
        background=False,
        kind=False,
        docs="docs/engines/mooncake.md",
        launcher="hostprep.engines.mooncake.launch",
        example="hostprep exec --pool kv --engine mooncake -- mc_store_rest_server --config FILE",
    ),
    Way(
        name="sglang",
        engine="SGLang",
        versions=("0.5.23",),
        how="plugin",
        background=False,
        kind=True,
        docs="docs/engines/sglang.md",
        launcher="hostprep.engines.sglang.launch",
        example="hostprep exec --pool kv --engine sglang -- python3 -m sglang.launch_server",
    ),
    Way(
        name="trtllm",
        engine="TensorRT-LLM",
        versions=(),
        how="configuration",
        background=False,
        kind=False,
        docs="docs/engines/trtllm.md",
        launcher="hostprep.engines.trtllm.launch",
        example="hostprep engines trtllm --connector lmcache --server tcp://127.0.0.1:5555",
    ),
)


def way_of(name: str) -> Way:
    """Return the way of that name. Raises BadInputError, which lists those there are."""
    for way in WAYS:
        if way.name == name:
            return way
    raise BadInputError(
        f"there is no engine {name!r}",
        reason="NoSuchEngine",
        remedy=f"the engines are {', '.join(way.name for way in WAYS)}; another one finds its "
        "memory by --link or by the variables: leave --engine out",
    )


def tried() -> tuple[Tried, ...]:
    """Return what the tests recorded when they last ran. Empty where nothing is recorded."""
    import json
    from pkgutil import get_data  # reads from a zipapp as well

    data = get_data("hostprep.engines", "tested.json") or b"[]"
    rows: list[dict[str, Any]] = json.loads(data)
    fields = ("engine", "version", "way", "date", "result")
    return tuple(Tried(*(str(row[field]) for field in fields)) for row in rows)
