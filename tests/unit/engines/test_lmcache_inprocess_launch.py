"""What `--engine lmcache-inprocess` asks of a pool, and how vLLM starts over its leases."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hostprep.backing import GIB, MIB
from hostprep.engines.catalogue import integration_of
from hostprep.engines.launching import EngineStart, Launch, Options, Requirements
from hostprep.engines.lmcache import launch, launch_inprocess
from hostprep.engines.lmcache.settings import requested_size
from hostprep.errors import BadInputError
from tests.unit.engines.leases import leases_of

pytestmark = pytest.mark.unit

LMCACHE, INPROCESS = integration_of("lmcache"), integration_of("lmcache-inprocess")
SERVE = ("vllm", "serve", "m")
NOTHING = {"PATH": "/nowhere"}
MODULE = "hostprep.engines.lmcache.vllm_connector"


def _given(**config: Any) -> tuple[str, str]:
    return "--kv-transfer-config", json.dumps(config)


def _required(*options: str, **environ: str) -> Requirements:
    return launch_inprocess.requirements(
        EngineStart(INPROCESS, (*SERVE, *options), NOTHING | environ, Options())
    )


def _completed(*options: str, size_bytes: int = 64 * MIB, python: str = "") -> Launch:
    begin = (python, "-m", *SERVE) if python else SERVE
    return launch_inprocess.complete(
        EngineStart(INPROCESS, (*begin, *options), NOTHING), leases_of(size_bytes)
    )


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"kv_connector": "LMCacheConnectorV1", "kv_role": "kv_both"},
        {
            "kv_connector": "LMCacheConnectorV1Dynamic",
            "kv_connector_module_path": "lmcache.integration.vllm.lmcache_connector_v1",
        },
        {"kv_connector": "HostprepLMCacheConnector", "kv_connector_module_path": MODULE},
    ],
)
def test_our_connector_stands_in_for_lmcaches(config: dict[str, Any]) -> None:
    extra = {"lmcache.chunk_size": 16}
    options = _given(**config, kv_connector_extra_config=extra) if config else ()
    assert _required(*options) == Requirements(count=1)
    done = _completed(*options)
    given = json.loads(done.command[done.command.index("--kv-transfer-config") + 1])
    assert given["kv_connector"] == "HostprepLMCacheConnector"
    assert given["kv_connector_module_path"] == MODULE
    assert given["kv_role"] == "kv_both"
    assert given.get("kv_connector_extra_config") == (extra if config else None)
    assert done.variables["PYTHONPATH"]
    assert done.command.count("--kv-transfer-config") == 1


def test_its_size_is_a_ranks_and_the_extra_configuration_comes_first() -> None:
    required = _required(LMCACHE_MAX_LOCAL_CPU_SIZE="0.5")
    assert required.size_bytes == 512 * MIB
    assert "LMCACHE_MAX_LOCAL_CPU_SIZE is 0.5" in required.because
    options = _given(kv_connector_extra_config={"lmcache.max_local_cpu_size": 2})
    required = _required(*options, "-tp", "4", LMCACHE_MAX_LOCAL_CPU_SIZE="0.5")
    assert required.size_bytes == 8 * GIB
    assert "4 share a region" in required.because
    assert _required("-dp", "2").count == 2


@pytest.mark.parametrize(
    ("options", "ranks"),
    [
        ("-tp 2 -pp 2", 4),
        ("-tp 2 -pcp 2", 4),
        ("-tp 2 --prefill-context-parallel-size=3", 6),
        ("-tp 8 --nnodes 2 --node-rank 1", 4),
        ("-tp 2 -dp 4 -dpl 2 -dpr 0 --nnodes 2", 2),
        ("-tp 4 -dp 2 -dpl 1 -dpr 1 --nnodes 4", 2),
        ("-tp 2 -dp 8 -dpn 5 --nnodes 2", 2),
    ],
)
def test_ranks_are_counted_as_vllm_counts_its_local_world(options: str, ranks: int) -> None:
    """vllm/config/parallel.py: world_size // nnodes_within_dp."""
    required = _required(*options.split(), LMCACHE_MAX_LOCAL_CPU_SIZE="1")
    assert required.size_bytes == ranks * GIB


@pytest.mark.parametrize("key", ["tensor-parallel-size", "prefill_context_parallel_size", "nnodes"])
def test_ranks_that_a_file_says_have_to_be_moved(tmp_path: Path, key: str) -> None:
    path = tmp_path / "vllm.yaml"
    path.write_text(f"{key}: 2\n")
    with pytest.raises(BadInputError, match=f"sets {key}"):
        _required("--config", str(path))


def test_parts_are_whole_pages_and_both_numbers_are_named() -> None:
    asked = _given(kv_connector_extra_config={"lmcache.max_local_cpu_size": 0.299})
    assert _required(*asked, "-tp", "2").size_bytes == 2 * 308 * MIB
    with pytest.raises(BadInputError) as refused:
        _completed(*asked, "-tp", "2", size_bytes=614 * MIB)
    assert refused.value.reason == "RegionTooSmall"
    for number in (int(0.299 * GIB), 306 * MIB):
        assert f"{number} bytes" in str(refused.value)
    assert _completed(*asked, "-tp", "2", size_bytes=616 * MIB).command


def test_more_ranks_than_pages_are_refused() -> None:
    with pytest.raises(BadInputError, match="asks for 1 bytes"):
        _completed("-tp", "2", size_bytes=2 * MIB)


@pytest.mark.parametrize(
    ("setting", "told"),
    [
        ({"hostprep.mode": "background"}, "hostprep.mode"),
        ({"hostprep.slotz": True}, "hostprep.slotz"),
        ({"hostprep.slots": True}, "hostprep.slots"),
        ({"hostprep.register": "perhaps"}, "hostprep.register"),
        ({"hostprep.deadline_s": 60}, "hostprep.deadline_s"),
        ({"cpu_bytes_to_use": 1 << 30}, "lmcache.max_local_cpu_size"),
        ({"cpu_bytes_to_use_per_rank": 1 << 30}, "lmcache.max_local_cpu_size"),
    ],
)
def test_settings_without_effect_are_refused_before_the_claim(
    setting: dict[str, Any], told: str
) -> None:
    with pytest.raises(BadInputError, match=told) as refused:
        _required(*_given(kv_connector_extra_config=setting))
    assert refused.value.exit_code == 2
    assert refused.value.remedy


def test_settings_that_it_has_are_taken() -> None:
    extra = {"hostprep.mode": "sync", "hostprep.register": "never", "hostprep.pool": "kv"}
    assert _required(*_given(kv_connector_extra_config=extra)) == Requirements(count=1)


def test_people_are_told_of_vllm_as_well(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/python3").touch(mode=0o755)
    for name in ("vllm-0.40.0", "lmcache-0.6.0"):
        (tmp_path / f"lib/python3.12/site-packages/{name}.dist-info").mkdir(parents=True)
    ray = ("--distributed-executor-backend", "ray")
    done = _completed(*ray, python=f"{tmp_path}/bin/python3")
    begins = ("vLLM 0.40.0 has never", "workers that Ray starts", "LMCache 0.6.0 has never")
    assert all(map(str.startswith, done.notes, begins))
    assert len(done.notes) == len(begins)


@pytest.mark.parametrize("size", ["0", "-1", "nan", "inf", "much"])
def test_a_size_that_is_none_is_refused(size: str) -> None:
    with pytest.raises(BadInputError, match="no size"):
        _required(LMCACHE_MAX_LOCAL_CPU_SIZE=size)


def test_a_size_in_lmcaches_file_has_to_be_moved(tmp_path: Path) -> None:
    path = tmp_path / "lmcache.yaml"
    path.write_text("chunk_size: 256\nmax_local_cpu_size: 64\n")
    with pytest.raises(BadInputError, match="LMCACHE_MAX_LOCAL_CPU_SIZE"):
        _required(LMCACHE_CONFIG_FILE=str(path))
    path.write_text("chunk_size: 256\n")
    assert _required(LMCACHE_CONFIG_FILE=str(path)) == Requirements(count=1)
    assert _required(LMCACHE_CONFIG_FILE="/nowhere") == Requirements(count=1)


def test_without_exec_the_connector_refuses_it_too(tmp_path: Path) -> None:
    """It asks `requested_size` what to take, in vLLM's process."""
    path = tmp_path / "lmcache.yaml"
    path.write_text("'max_local_cpu_size' : 64\n")
    with pytest.raises(BadInputError, match="LMCACHE_MAX_LOCAL_CPU_SIZE"):
        requested_size({}, {"LMCACHE_CONFIG_FILE": str(path)})


@pytest.mark.parametrize(
    "options",
    [
        _given(kv_connector="NixlConnector"),
        _given(kv_connector="LMCacheConnectorV1", kv_connector_module_path="mine"),
        ("--kv-offloading-size", "8"),
    ],
)
def test_another_connector_is_refused(options: tuple[str, ...]) -> None:
    with pytest.raises(BadInputError) as refused:
        _required(*options)
    assert refused.value.exit_code == 2
    assert "leave" in str(refused.value)


def test_a_part_that_one_call_could_not_register_is_fine() -> None:
    assert _completed(size_bytes=512 * GIB).command


def test_the_server_is_another_way() -> None:
    with pytest.raises(BadInputError, match="does not start a vLLM server"):
        launch_inprocess.requirements(
            EngineStart(INPROCESS, ("lmcache", "server"), NOTHING, Options())
        )
    with pytest.raises(BadInputError, match="--engine lmcache-inprocess") as refused:
        launch.requirements(
            EngineStart(LMCACHE, (*SERVE, *_given(kv_connector="LMCacheConnectorV1")), NOTHING)
        )
    assert refused.value.exit_code == 2
