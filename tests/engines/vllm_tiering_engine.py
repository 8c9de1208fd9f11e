"""vLLM's own code for its Tiering spec, run as `vllm serve`: what it makes of our command line.

The command line is read by vLLM's parser, the spec is made by vLLM's factory, the scheduler's half
and a worker's region by vLLM's classes. Left out is the model, which needs a GPU to be offloaded.
Standard input holds further command lines, to be parsed only. Prints one JSON object.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from typing import Any

from vllm.engine.arg_utils import EngineArgs
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1.kv_offload.config import (
    OffloadingCacheConfig,
    OffloadingConfig,
    OffloadingGroupConfig,
    OffloadingModelConfig,
    OffloadingParallelConfig,
)
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.factory import OffloadingSpecFactory

BLOCK_BYTES = 1 << 20
MARK = b"from the worker"


def main() -> None:
    """Parse, attach by both halves, write by one and read by the other."""
    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    result: dict[str, Any] = {"parsed": [_parse(parser, words) for words in json.load(sys.stdin)]}
    config = parser.parse_args(sys.argv[3:]).kv_transfer_config
    result.update(_attach(config))
    print(json.dumps(result), flush=True)


def _parse(parser: Any, words: list[str]) -> dict[str, Any]:
    found = vars(parser.parse_args(words))
    config = found["kv_transfer_config"]
    return {
        "config": None if config is None else dataclasses.asdict(config),
        "data_parallel_size": found["data_parallel_size"],
        "data_parallel_size_local": found["data_parallel_size_local"],
        "data_parallel_start_rank": found["data_parallel_start_rank"],
        "max_model_len": found["max_model_len"],
    }


def _attach(config: Any) -> dict[str, Any]:
    begin_s = time.perf_counter()
    spec = OffloadingSpecFactory.create_spec(_offloading(config))
    manager = spec.get_manager()
    scheduler = spec._scheduler_mmap
    worker = SharedOffloadRegion(
        engine_id=config.engine_id,
        num_chunks=spec.num_chunks,
        rank=0,
        kv_bytes_per_chunk=spec.kv_bytes_per_chunk,
        cpu_page_size=spec.cpu_page_size_per_worker,
    )
    took_s = time.perf_counter() - begin_s
    for index, byte in enumerate(MARK):
        worker.base_tensor[index] = byte
    seen = bytes(scheduler.base_tensor[: len(MARK)].tolist())
    result = {
        "spec": type(spec).__name__,
        "creator": [scheduler._creator, worker._creator],
        "chunks": spec.num_chunks,
        "bytes": worker.total_size_bytes,
        "seen": seen.decode(),
        "took_s": took_s,
    }
    manager.shutdown()
    worker.cleanup()
    return result


def _offloading(config: Any) -> Any:
    return OffloadingConfig(
        groups=(OffloadingGroupConfig(tokens_per_block=16, layer_names=("l0",), group_id=0),),
        worker_kv_bytes_per_block=BLOCK_BYTES,
        enable_kv_cache_events=False,
        extra_config=config.kv_connector_extra_config,
        engine_id=config.engine_id,
        model=OffloadingModelConfig(name="m", dtype="bfloat16"),
        cache=OffloadingCacheConfig(tokens_per_hash=16, blocks_per_chunk=1),
        parallel=OffloadingParallelConfig(
            rank=0,
            world_size=1,
            tp_size=1,
            pp_size=1,
            pcp_size=1,
            dcp_size=1,
            data_parallel_index=0,
            data_parallel_size=1,
            data_parallel_rank_local=None,
            is_parallelism_agnostic=True,
        ),
    )


if __name__ == "__main__":
    main()
