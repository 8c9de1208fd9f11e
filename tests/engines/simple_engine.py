"""A small engine around vLLM's own scheduler and connectors, for scenes in one process.

Real: vLLM's Scheduler, its connector factory, the connectors of the scheduler and of each rank,
the aggregation of what the ranks say, KV block hashing, the copy backend. Ours: the model. It
writes bytes into the KV blocks that follow from the tokens before them, and checks them wherever
the scheduler says that they need not be computed.
"""

from __future__ import annotations

import copy
import functools
import hashlib
import time
from typing import Any

import torch
from vllm.config import KVTransferConfig, set_current_vllm_config
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.engine.arg_utils import EngineArgs
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheTensor,
)
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

BLOCK_TOKENS = 32
LAYERS = ("l0", "l1", "l2", "l3")
ROW_BYTES = BLOCK_TOKENS * 2 * 64 * 2
"""Of one layer and block: keys and values, one head of 64, two bytes each."""
BLOCKS = 64
MIB = 1 << 20
HANG_S = 60.0

OURS = {
    "kv_connector": "HostprepSimpleConnector",
    "kv_connector_module_path": "hostprep.engines.vllm",
}
VLLMS = {"kv_connector": "SimpleCPUOffloadConnector"}


def configuration(model: str, *, world: int = 1, connector: dict[str, str], **extra: Any) -> Any:
    """Return a VllmConfig, as the engine makes it of its arguments."""
    config = copy.deepcopy(_configuration(model, world))
    config.kv_transfer_config = KVTransferConfig(
        **connector,
        kv_role="kv_both",
        kv_connector_extra_config={"cpu_bytes_to_use": 4 * MIB * world} | extra,
    )
    return config


@functools.cache
def _configuration(model: str, world: int) -> Any:
    return EngineArgs(
        model=model,
        skip_tokenizer_init=True,
        load_format="dummy",
        max_model_len=1024,
        max_num_seqs=8,
        block_size=BLOCK_TOKENS,
        enforce_eager=True,
        enable_prefix_caching=True,
        async_scheduling=False,
        tensor_parallel_size=world,
    ).create_engine_config()


def cache_of(rows: tuple[int, ...] = (ROW_BYTES,) * len(LAYERS), blocks: int = BLOCKS) -> Any:
    """Return a KVCacheConfig of one allocation, layer by layer; `rows`: bytes of each layer's."""
    whole = sum(rows) * blocks
    tensors = [
        KVCacheTensor(
            size=whole,
            layers=[name],
            layer_stride=row * blocks,
            block_stride=row,
            offset=sum(rows[:at]) * blocks,
        )
        for at, (name, row) in enumerate(zip(LAYERS, rows, strict=True))
    ]
    spec = FullAttentionSpec(
        block_size=BLOCK_TOKENS, num_kv_heads=1, head_size=64, dtype=torch.bfloat16
    )
    return KVCacheConfig(blocks, tensors, [KVCacheGroupSpec(list(LAYERS), spec)])


class Rank:
    """One worker: its connector and its "GPU" memory."""

    def __init__(self, config: Any, rank: int, cache: Any) -> None:
        self.number = rank
        self.config = copy.deepcopy(config)
        self.config.parallel_config.rank = rank
        self.cache = cache
        self.memory = torch.randint(0, 127, (cache.kv_cache_tensors[0].size,), dtype=torch.int8)
        self.connector: Any = KVConnectorFactory.create_connector(
            self.config, KVConnectorRole.WORKER, cache
        )

    def register(self) -> None:
        """Do what the model runner does once the KV cache is allocated."""
        self.connector.register_kv_caches(dict.fromkeys(LAYERS, self.memory))

    def rows(self, layer: int) -> torch.Tensor:
        """Return a layer's blocks, a row each."""
        tensor = self.cache.kv_cache_tensors[layer]
        span = self.cache.num_blocks * tensor.block_stride
        part = self.memory[tensor.offset : tensor.offset + span]
        return part.view(self.cache.num_blocks, tensor.block_stride)

    @property
    def worker(self) -> Any:
        return self.connector.worker_handler

    def step(self, output: Any, forward: Any) -> Any:
        """Do a step, in the order of vLLM's model runner mixin."""
        self.connector.handle_preemptions(output.kv_connector_metadata)
        self.connector.bind_connector_metadata(output.kv_connector_metadata)
        forward(self)
        self.connector.start_load_kv(None)
        self.connector.wait_for_save()
        result = self.connector.get_transfer_results(output.finished_req_ids)
        said = KVConnectorOutput(
            finished_sending=result.finished_sending,
            finished_recving=result.finished_recving,
            kv_connector_worker_meta=self.connector.build_connector_worker_meta(),
        )
        self.connector.clear_connector_metadata()
        return said


class SmallEngine:
    """A scheduler and its ranks. `metadata` keeps what the scheduler told them, step by step."""

    def __init__(self, config: Any, *, world: int = 1) -> None:
        self.config = config
        init_none_hash(sha256)
        self._hasher = get_request_block_hasher(BLOCK_TOKENS, sha256)
        cache = cache_of()
        config.cache_config.num_gpu_blocks = cache.num_blocks
        with set_current_vllm_config(config):
            self.scheduler: Any = Scheduler(
                vllm_config=config,
                kv_cache_config=cache,
                structured_output_manager=StructuredOutputManager(config),
                block_size=BLOCK_TOKENS,
                hash_block_size=BLOCK_TOKENS,
                log_stats=True,
            )
        self.ranks = [Rank(config, rank, cache) for rank in range(world)]
        self._aggregator = KVOutputAggregator.from_connector(self.scheduler.connector, world)
        self.metadata: list[Any] = []
        self.loaded_blocks = 0
        self.external_tokens: dict[str, int] = {}
        self._count = 0

    def start(self) -> None:
        """Register the KV caches, then what follows warm-up (v1/engine/core.py)."""
        for rank in self.ranks:
            rank.register()
        for rank in self.ranks:
            assert rank.connector.get_handshake_metadata() is None

    def ask(self, tokens: list[int], count: int = 4) -> Any:
        """Add a request; it runs as steps are done."""
        self._count += 1
        sampling = SamplingParams(max_tokens=count, temperature=0, ignore_eos=True)
        sampling.update_from_generation_config({}, eos_token_id=2)
        request = Request(f"r{self._count}", tokens, sampling, None, block_hasher=self._hasher)
        self.scheduler.add_request(request)
        return request

    def serve(self, tokens: list[int], count: int = 4) -> Any:
        """Run a request to its end, and let its stores drain."""
        request = self.ask(tokens, count)
        self.run_until(lambda: request.is_finished() and not self.scheduler.has_requests())
        return request

    def run_until(self, done: Any) -> None:
        """Step until that is so."""
        end_s = time.monotonic() + HANG_S
        while not done():
            assert time.monotonic() < end_s, "the engine hangs"
            self.step()
            time.sleep(0.001)

    def step(self) -> None:
        """Do one step of vLLM's engine core."""
        output = self.scheduler.schedule()
        self.metadata.append(output.kv_connector_metadata)
        spans = _spans(output)
        said = [rank.step(output, lambda rank: self._forward(rank, spans)) for rank in self.ranks]
        ids = list(output.num_scheduled_tokens)
        sampled = [self._sample(request_id, *spans[request_id]) for request_id in ids]
        outputs: list[Any] = [
            ModelRunnerOutput(
                ids, {name: at for at, name in enumerate(ids)}, sampled, kv_connector_output=one
            )
            for one in said
        ]
        self.scheduler.update_from_output(output, self._aggregator.aggregate(outputs))

    def forget_gpu(self) -> None:
        """Have the GPU's blocks hold anything, and their hashes forgotten; not the host's."""
        assert self.scheduler.kv_cache_manager.reset_prefix_cache()
        for rank in self.ranks:
            rank.memory.random_(0, 127)

    def close(self) -> None:
        """Shut down as vLLM does."""
        for rank in self.ranks:
            rank.connector.shutdown()
        self.scheduler.connector.shutdown()

    @property
    def stores(self) -> int:
        """Blocks that the ranks were told to store."""
        return sum(len(meta.store_gpu_blocks) for meta in self.metadata)

    @property
    def loads(self) -> int:
        """Blocks that the ranks were told to load."""
        return sum(len(meta.load_gpu_blocks) for meta in self.metadata)

    def _forward(self, rank: Rank, spans: dict[str, tuple[int, int]]) -> None:
        for request_id, (start, end) in spans.items():
            request = self.scheduler.requests[request_id]
            (block_ids,) = self.scheduler.kv_cache_manager.get_block_ids(request_id)
            for block in range(end // BLOCK_TOKENS):
                last = (block + 1) * BLOCK_TOKENS
                for layer in range(len(LAYERS)):
                    row = rank.rows(layer)[block_ids[block]]
                    wanted = _content(request.all_token_ids[:last], layer, rank.number)
                    if last <= start:
                        assert bool((row == wanted).all()), (request_id, block, layer)
                    else:
                        row.fill_(wanted)

    def _sample(self, request_id: str, start: int, end: int) -> list[int]:
        del start
        request = self.scheduler.requests[request_id]
        if end < request.num_tokens:
            return []
        return [sum(request.all_token_ids) % 911 + 3]


def _spans(output: Any) -> dict[str, tuple[int, int]]:
    """Return which tokens of each request are computed in this step."""
    begun = {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
    cached = output.scheduled_cached_reqs
    begun |= dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
    return {
        name: (begun[name], begun[name] + count)
        for name, count in output.num_scheduled_tokens.items()
    }


def _content(tokens: Any, layer: int, rank: int) -> int:
    text = ",".join(map(str, tokens)) + f"/{layer}/{rank}"
    return hashlib.sha256(text.encode()).digest()[0] % 127
