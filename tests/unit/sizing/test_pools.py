"""The pool that `size -o yaml` writes is what the engine's way of attaching claims and fills."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
import yaml
from hypothesis import assume, given
from hypothesis import strategies as st

from hostprep.api.pool_resource import load_pools
from hostprep.api.pool_spec import PoolSpec, RegionLayout
from hostprep.backing import GIB, MIB, Backing
from hostprep.engines.catalogue import INTEGRATIONS
from hostprep.errors import BadInputError
from hostprep.known_issues import ONE_CALL_LIMIT_BYTES
from hostprep.sizing.config import load_config
from hostprep.sizing.dtypes import TypeChoice
from hostprep.sizing.engines.rules import EngineHost, EngineSizing
from hostprep.sizing.engines.vllm_host import WAYS, HostPool
from hostprep.sizing.families import read_model
from hostprep.sizing.groups import Limits
from hostprep.sizing.pools import PoolShape, chosen_integration, shape_pool
from hostprep.sizing.size import Memory, Sizing, size_model
from tests.unit.sizing.models import MODELS, size_for_engine

pytestmark = pytest.mark.unit

KIB = 1024
LLAMA = {
    "model_type": "llama",
    "num_hidden_layers": 32,
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "head_dim": 256,
    "hidden_size": 64 * 256,
    "max_position_embeddings": 4096,
    "torch_dtype": "bfloat16",
}


def sizing_of(*, tp: int = 8, pp: int = 1, memory: Memory | None = None) -> Sizing:
    config = load_config(json.dumps(LLAMA).encode(), source="config.json")
    model = read_model(config, name="a-model", choice=TypeChoice(), drafts=0)
    limits = Limits(max_batch_size=4, max_seq_len=4096, tensor_parallel=tp, pipeline_parallel=pp)
    return size_model(model, limits, memory or Memory())


def engine_of(sizing: Sizing, *, block_bytes: int, latents: bool = False) -> EngineSizing:
    ranks = sizing.limits.tensor_parallel * sizing.limits.pipeline_parallel
    hosts = []
    for way in WAYS:
        pool = HostPool(way=way, block_bytes=block_bytes, ranks=ranks, is_replicated=latents)
        hosts.append(
            EngineHost(
                way=way, blocks=100, block_bytes=pool.row_bytes, copies=pool.copies,
                size_bytes=pool.region_bytes(100), blocks_per_request=10,
            )
        )  # fmt: skip
    return EngineSizing(
        engine="vllm", version="0.32.0", model=sizing.model, limits=sizing.limits, groups=(),
        block_bytes=block_bytes, least_bytes=1, gpu=None, host=tuple(hosts),
    )  # fmt: skip


def read(shape: PoolShape) -> PoolSpec:
    spec = {
        "regions": shape.regions,
        "backings": [backing.value for backing in shape.backings],
        "sizing": shape.sizing,
    }
    document = {
        "apiVersion": "hostprep.dev/v1alpha1",
        "kind": "HostMemoryPool",
        "metadata": {"name": "kv"},
        "spec": spec,
    }
    (found,) = load_pools(yaml.safe_dump(document), source="")
    return found


@given(
    way=st.sampled_from(WAYS),
    tp=st.sampled_from([1, 2, 4, 8]),
    block=st.integers(1, 1 << 14).map(lambda number: number * 512),
    latents=st.booleans(),
    host_mib=st.integers(200, 20_000),
    backings=st.sampled_from(
        [
            (Backing.HUGETLB_2MI, Backing.BASE),
            (Backing.BASE,),
            (Backing.HUGETLB_1GI, Backing.HUGETLB_2MI),
        ]
    ),
)
def test_a_region_is_the_smallest_that_holds_all_blocks_of_the_memory_asked_for(
    *, way: str, tp: int, block: int, latents: bool, host_mib: int, backings: tuple[Backing, ...]
) -> None:
    memory = Memory(host_bytes=host_mib * MIB)
    sizing = sizing_of(tp=tp)
    engine = engine_of(sizing, block_bytes=block, latents=latents)
    try:
        shape = shape_pool(sizing, engine, memory, integration=way, backings=backings)
    except BadInputError:
        assume(Backing.HUGETLB_1GI not in backings)  # a page for each rank may be too much
        raise
    spec = read(shape)
    assert (spec.layout, shape.regions_per_engine) == (RegionLayout.SINGLE, 1)
    size_bytes = spec.region_bytes or 0
    assert size_bytes == shape.sizing["regionBytes"]
    assert size_bytes <= host_mib * MIB * tp
    page_bytes = max(2 * MIB, *(backing.page_bytes for backing in backings))
    wanted = shape.sizing["groups"][0]["slots"]
    pool = shape.host
    assert pool is not None
    asked_bytes = host_mib * MIB * tp // page_bytes * page_bytes
    both = [pool, replace(pool, has_directory=False)]
    plain = replace(pool, has_directory=False)
    assert wanted == (pool.blocks(size_bytes) or plain.blocks(size_bytes))
    assert [each.blocks(size_bytes) for each in both] == [each.blocks(asked_bytes) for each in both]
    assert any(each.blocks(size_bytes - page_bytes) < each.blocks(size_bytes) for each in both)
    blocks = shape.blocks(size_bytes)
    assert min(blocks.values()) >= wanted
    assert (shape.kept_blocks(size_bytes) is not None) is (way == "vllm-offloading")


def test_what_the_rules_have_for_tokens_is_what_the_region_has() -> None:
    sizing = sizing_of(memory=Memory(host_tokens=100_000))
    engine = engine_of(sizing, block_bytes=512 * KIB)
    memory = Memory(host_tokens=100_000)
    shape = shape_pool(sizing, engine, memory, integration=chosen_integration("vllm", None))
    size_bytes = read(shape).region_bytes or 0
    assert shape.kept_blocks(size_bytes) == 103  # whole pages for each of eight ranks
    assert "--engine vllm-offloading -- vllm serve" in shape.command("chat")
    said = "\n".join(shape.describe("chat", size_bytes))
    assert "its 8 ranks together" in said
    assert "vLLM 0.32.0 has" in said
    assert f"{shape.blocks(size_bytes)[Backing.HUGETLB_2MI]} host blocks" in said


def test_a_connector_that_is_not_known_has_a_region_for_each_rank() -> None:
    shape = shape_pool(sizing_of(tp=4, pp=2), None, Memory())
    assert (shape.integration, shape.regions, shape.regions_per_engine) == ("", 8, 8)
    spec = read(shape)
    assert spec.sizing is not None
    assert spec.sizing.to_json()["regions_per_engine"] == 8
    assert shape.command("kv") == "hostprep exec kv --count 8 -- COMMAND"


@pytest.mark.parametrize("integration", ["sglang", "lmcache-inprocess"])
def test_ranks_that_share_a_region_get_whole_pages_of_what_was_asked_for(integration: str) -> None:
    memory = Memory(host_bytes=10 * GIB + 1)
    shape = shape_pool(sizing_of(tp=4), None, memory, integration=integration)
    assert (shape.regions, shape.regions_per_engine) == ("Single", 1)
    assert read(shape).region_bytes == 4 * (10 * GIB + 2 * MIB)
    assert shape.blocks(1 << 40) == {}


def sglang_shape(name: str, *, tp: int, integration: str = "sglang") -> tuple[PoolShape, Any]:
    """Return the pool of an example by SGLang's rules, and what they say of the host tier."""
    config = load_config((MODELS / f"{name}.json").read_bytes(), source=name)
    model = read_model(config, name=name, choice=TypeChoice(), drafts=0)
    limits = Limits(
        max_batch_size=16, max_seq_len=8192, tokens_per_block=1, tensor_parallel=tp
    )  # fmt: skip
    memory = Memory(gpu_bytes=60 * GIB, host_bytes=20 * GIB)
    engine = size_for_engine("sglang", model, limits, memory)
    sizing = size_model(model, limits, replace(memory, gpu_bytes=None))
    return shape_pool(sizing, engine, memory, integration=integration), engine.host[0]


@pytest.mark.parametrize("tp", [1, 8])
@pytest.mark.parametrize("name", ["gemma-3-27b", "llama-3.1-8b", "deepseek-v3"])
def test_groups_of_sglang_are_the_blocks_of_its_rules(name: str, tp: int) -> None:
    """Not the plain reckoning's, which divides by windows that SGLang does not keep apart."""
    shape, host = sglang_shape(name, tp=tp)
    (group,) = shape.sizing["groups"]
    assert group == {"name": "blocks", "slotBytes": host.block_bytes, "slots": host.blocks}
    said = "\n".join(shape.describe("kv", read(shape).region_bytes or 0))
    assert f"{host.blocks} host blocks on each rank" in said
    assert host.notes[0] in said
    assert "--hicache-size" in said


@pytest.mark.parametrize(
    ("name", "integration"), [("gpt-oss-120b", "sglang"), ("gemma-3-27b", "lmcache")]
)
def test_where_slots_are_the_engines_to_say_the_groups_are_pages(
    name: str, integration: str
) -> None:
    shape, _ = sglang_shape(name, tp=2, integration=integration)
    (group,) = shape.sizing["groups"]
    assert group["name"] == "pages"
    assert group["slotBytes"] * group["slots"] == read(shape).region_bytes == 40 * GIB


def test_what_a_server_has_in_its_memory_is_said_to_be_its_own_to_say() -> None:
    shape = shape_pool(sizing_of(), None, Memory(host_bytes=GIB), integration="lmcache")
    assert "How many tokens that is LMCache itself says" in "\n".join(shape.describe("kv", GIB))


@pytest.mark.parametrize(
    ("gib", "regions", "expected"),
    [(40, None, ("Single", 1)), (400, None, (7, 7)), (40, "3", (3, 3)), (400, "16", (16, 16))],
)
def test_a_server_gets_as_many_regions_as_one_call_can_register(
    gib: int, regions: str | None, expected: tuple[int | str, int]
) -> None:
    memory = Memory(host_bytes=gib * GIB)
    shape = shape_pool(sizing_of(), None, memory, integration="lmcache", regions=regions)
    assert (shape.regions, shape.regions_per_engine) == expected
    size_bytes = read(shape).region_bytes or 0
    assert size_bytes < ONE_CALL_LIMIT_BYTES
    assert 8 * gib * GIB <= size_bytes * expected[1] < 8 * gib * GIB + expected[1] * 2 * MIB
    assert (f"--count {expected[1]} " in shape.command("kv")) is (expected[1] > 1)


@pytest.mark.parametrize(
    ("engine", "integration", "chosen"),
    [
        (None, None, ""),
        ("vllm", None, "vllm-offloading"),
        ("vllm", "vllm-simple", "vllm-simple"),
        ("vllm", "lmcache", "lmcache"),
        (None, "sglang", "sglang"),
        ("trtllm", None, "lmcache"),
        ("trtllm", "mooncake", "mooncake"),
    ],
)
def test_the_integration_is_the_engines_usual_one_or_the_one_named(
    engine: str | None, integration: str | None, chosen: str
) -> None:
    assert chosen_integration(engine, integration) == chosen


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"integration": "lmcache", "regions": "PerNUMANode"}, "--regions: is PerNUMANode"),
        ({"integration": "vllm", "regions": "PerGPU"}, "an engine with 8 claims one for all"),
    ],
)
def test_what_makes_no_pool_is_refused_by_its_option(options: dict[str, Any], words: str) -> None:
    sizing = sizing_of()
    with pytest.raises(BadInputError) as caught:
        shape_pool(sizing, engine_of(sizing, block_bytes=4096), Memory(), **options)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("engine", "integration", "words"),
    [
        (None, "vlm", "--integration: there is no engine 'vlm'"),
        ("trtllm", "trtllm", "cannot be prepared memory"),
        ("vllm", "sglang", "--integration: sglang is of sglang, and --engine says vllm"),
        ("trtllm", "vllm", "--integration: vllm is of vllm, and --engine says trtllm"),
    ],
)
def test_an_integration_that_cannot_be_is_refused(
    engine: str | None, integration: str, words: str
) -> None:
    with pytest.raises(BadInputError) as caught:
        chosen_integration(engine, integration)
    assert words in str(caught.value)


def test_blocks_of_no_known_size_are_not_guessed() -> None:
    with pytest.raises(BadInputError, match="size of a host block of a-model is not known"):
        shape_pool(sizing_of(), None, Memory(), integration="vllm-offloading")


def test_one_page_of_1_gib_holds_blocks_though_none_beside_the_directory() -> None:
    sizing = sizing_of(tp=1)
    engine = engine_of(sizing, block_bytes=2 * MIB)
    backings = (Backing.HUGETLB_1GI, Backing.BASE)
    memory = Memory(host_bytes=1500 * MIB)
    shape = shape_pool(
        sizing, engine, memory, integration="vllm-offloading", backings=backings
    )  # fmt: skip
    assert read(shape).region_bytes == GIB
    assert shape.sizing["groups"][0]["slots"] == 511
    said = "\n".join(shape.describe("kv", GIB))
    assert "511 host blocks in it, 0 with --warm" in said
    assert "It is 476 MiB less than 1.5 GiB" in said
    two = replace(memory, host_bytes=2 * GIB)
    shape = shape_pool(sizing, engine, two, integration="vllm-offloading", backings=backings)
    assert shape.notes == ()


def test_regions_for_several_engines_are_said_to_be_for_as_many() -> None:
    sizing = sizing_of(tp=1)
    engine = engine_of(sizing, block_bytes=2 * MIB)
    memory = Memory(host_bytes=GIB)
    shape = shape_pool(sizing, engine, memory, integration="vllm-offloading", regions="2")
    assert "Each node has 2, for 2 engines" in "\n".join(shape.describe("kv", GIB))
    one = shape_pool(sizing, engine, memory, integration="vllm-offloading", regions="1")
    assert "Each node" not in "\n".join(one.describe("kv", GIB))


def test_stages_of_different_size_are_refused_by_the_option_that_makes_them() -> None:
    sizing = sizing_of(tp=1, pp=3)
    engine = replace(engine_of(sizing, block_bytes=4096), host=())
    with pytest.raises(BadInputError, match=r"^--pp: with 3 stages") as caught:
        shape_pool(sizing, engine, Memory(), integration="vllm-offloading")
    assert "--engine" not in str(caught.value)


def test_memory_for_no_block_is_refused_with_what_would_do() -> None:
    sizing = sizing_of()
    engine = engine_of(sizing, block_bytes=64 * MIB)
    with pytest.raises(BadInputError) as caught:
        shape_pool(sizing, engine, Memory(host_bytes=32 * MIB), integration="vllm-offloading")
    assert "--host-memory: 256 MiB for 8 rank(s) holds no block" in str(caught.value)
    least = int(str(caught.value.remedy).split()[1].removesuffix("Mi"))
    memory = Memory(host_bytes=least * MIB)
    shape = shape_pool(sizing, engine, memory, integration="vllm-offloading")
    assert shape.sizing["groups"][0]["slots"] == 1


@pytest.mark.parametrize("name", [each.name for each in INTEGRATIONS if each.name != "trtllm"])
def test_every_integration_makes_a_pool_that_prepare_takes(name: str) -> None:
    sizing = sizing_of(tp=2)
    engine = None if name == "sglang" else engine_of(sizing, block_bytes=512 * KIB)
    shape = shape_pool(sizing, engine, Memory(host_bytes=2 * GIB), integration=name)
    spec = read(shape)
    assert spec.sizing is not None
    assert spec.sizing.to_json()["integration"] == name
    assert (spec.region_bytes or 0) * (spec.region_count or 1) >= 2 * 2 * GIB * 0.99
    assert f"exec kv --engine {name} --" in shape.command("kv")
