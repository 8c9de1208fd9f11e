"""vLLM's own number of host blocks for a command that `hostprep exec` completed, and became.

Standard input has a line of JSON for each command: its words, and the variables of its lease.
vLLM's parser reads the words, its configuration and its functions size the caches, its factory
makes the connector of the scheduler. Left out is the model: its layers are described, and not made.
Prints a line of JSON for each: the blocks that the connector's manager has, and which one it is.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from typing import Any

from vllm.config import set_current_vllm_config
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.engine.arg_utils import EngineArgs
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1.attention.backends.utils import resolve_kv_cache_layout
from vllm.v1.core.kv_cache_utils import generate_scheduler_kv_cache_config, get_kv_cache_configs
from vllm.v1.kv_cache_interface import FullAttentionSpec

GPU_BYTES = 16 << 20
"""Of each rank, for caches."""


def main() -> None:
    """Answer one command after the other."""
    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    print(json.dumps("ready"), flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        os.environ.update(asked["environ"])
        try:
            answer = _blocks(parser.parse_args(asked["words"]))
        except BaseException:
            answer = {"wrong": traceback.format_exc()}
        for name in asked["environ"]:
            del os.environ[name]
        print(json.dumps(answer), flush=True)


def _blocks(arguments: Any) -> dict[str, Any]:
    config = EngineArgs.from_cli_args(arguments).create_engine_config()
    with set_current_vllm_config(config):
        model, parallel = config.model_config, config.parallel_config
        layer = FullAttentionSpec(
            block_size=config.cache_config.block_size,
            num_kv_heads=model.get_num_kv_heads(parallel),
            head_size=model.get_head_size(),
            dtype=model.dtype,
        )
        resolve_kv_cache_layout(config, [["LBNHC"]] * parallel.world_size, [layer])
        names = (f"model.layers.{n}.self_attn.attn" for n in range(model.get_num_layers(parallel)))
        layers = dict.fromkeys(names, layer)
        each = get_kv_cache_configs(
            config, [dict(layers) for _ in range(parallel.world_size)],
            [GPU_BYTES] * parallel.world_size,
        )  # fmt: skip
        caches = generate_scheduler_kv_cache_config(each)
        connector = KVConnectorFactory.create_connector(config, KVConnectorRole.SCHEDULER, caches)
        try:
            return _held_by(connector)
        finally:
            connector.shutdown()  # and with it what it has mapped


def _held_by(connector: Any) -> dict[str, Any]:
    """Return how many blocks the scheduler's manager hands out, whichever it is."""
    found = getattr(connector, "scheduler_manager", None) or connector.connector_scheduler.manager
    kinds = [type(found).__name__]
    for inside in ("inner", "primary_tier"):  # ours behind the gate; the tier in host memory
        if hasattr(found, inside):
            found = getattr(found, inside)
            kinds.append(type(found).__name__)
    if hasattr(found, "pool"):  # our slots
        (group,) = found.pool.layout.groups
        return {"blocks": group.slots, "managers": kinds}
    blocks = next(
        vars(found)[name] for name in ("num_cpu_blocks", "_num_chunks") if name in vars(found)
    )
    return {"blocks": blocks, "managers": kinds}


if __name__ == "__main__":
    main()
