"""TensorRT-LLM: configuration for its KV cache connectors, whose memory another process has.

Its own host pools are anonymous memory and cannot be prepared: `hostprep exec --engine trtllm`
says so.

Names of TensorRT-LLM: tensorrt_llm/_torch/pyexecutor/connectors/registry.py and llm_args.py
(`lmcache-mp` with `server_url`), the Mooncake store connector of its pull request 19235
(connectors/mooncake_store/config.py), and of LMCache 0.5.6: lmcache/integration/tensorrt_llm.
"""

from __future__ import annotations

import json
import re
from typing import Any

from hostprep.engines.launching import EngineStart, Requirements
from hostprep.errors import BadInputError

CONNECTORS = ("lmcache", "mooncake")
_VARIABLES = {
    "TLLM_KV_CACHE_MANAGER_V2_PREFAULT_THREADS": "pools are populated by all CPUs of their NUMA "
    "node before any engine starts, so it has nothing to speed up",
    "TLLM_KV_CACHE_MANAGER_V2_THP": "a pool's backings choose the pages: HugeTLB2Mi for certain "
    "huge ones, THP for those it speaks of",
}
"""Its two variables for faster pools (issue 15430), and what takes their place."""
_URL = re.compile(r"(?:tcp|ipc|grpc)://[!-~]+", re.ASCII)
_ADDRESS = re.compile(r"(?:[A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\]):\d{1,5}", re.ASCII)


def requirements(start: EngineStart) -> Requirements:
    """Refuse: there is nothing to claim for it. Always raises BadInputError."""
    found = [f"; {name} is set: {why}" for name, why in _VARIABLES.items() if name in start.environ]
    raise BadInputError(
        "TensorRT-LLM allocates its host pools as anonymous memory, which cannot be prepared, "
        f"so there is nothing to claim for it{''.join(found)}",
        reason="NoMemoryOfItsOwn",
        remedy="keep its KV cache in an LMCache server or a Mooncake store that has the prepared "
        "memory: `hostprep engines trtllm --connector lmcache --server tcp://127.0.0.1:5555` "
        "prints the configuration for `trtllm-serve --config FILE`",
    )


def connector_config(connector: str, server: str | None, model_key: str | None) -> str:
    """Return the file for `trtllm-serve --config`, or Mooncake's for its client.

    The latter where `server`, the address of Mooncake's master, or a model's key is given.
    Raises BadInputError for an address of another form, and for a client without a key.
    """
    if connector == "lmcache":
        return _yaml(
            _lmcache(server or "tcp://127.0.0.1:5555"),
            "trtllm-serve MODEL --config THIS_FILE, with PYTHONHASHSEED=0 in its environment",
            "the memory is the LMCache server's: hostprep exec --engine lmcache",
        )
    if server or model_key:
        return _yaml(_mooncake_client(server or "127.0.0.1:50051", model_key))
    options = {
        "kv_cache_config": {"use_kv_cache_manager_v2": True, "enable_block_reuse": True},
        "kv_connector_config": {"connector": "mooncake-store"},
    }
    return _yaml(
        options,
        "trtllm-serve MODEL --config THIS_FILE, with MOONCAKE_CONFIG_PATH leading to the client's:",
        "hostprep engines trtllm --connector mooncake --server HOST:PORT --model-key KEY",
    )


def _lmcache(server: str) -> dict[str, Any]:
    if _URL.fullmatch(server) is None:
        raise BadInputError(
            f"--server {server!r} is no URL of an LMCache server",
            reason="BadServer",
            remedy="write it like tcp://127.0.0.1:5555",
        )
    return {
        "kv_cache_config": {"enable_block_reuse": True},
        "kv_connector_config": {"connector": "lmcache-mp", "server_url": server},
    }


def _mooncake_client(server: str, model_key: str | None) -> dict[str, Any]:
    """Return what MOONCAKE_CONFIG_PATH is to lead to: a client that lends no memory of its own."""
    if _ADDRESS.fullmatch(server) is None:
        raise BadInputError(
            f"--server {server!r} is no address of a Mooncake master",
            reason="BadServer",
            remedy="write it like 127.0.0.1:50051",
        )
    if not model_key:
        raise BadInputError(
            "keys in a Mooncake pool need to tell checkpoints apart",
            reason="NoModel",
            remedy="give --model-key, the same for all servers of one checkpoint and of no other",
        )
    return {
        "metadata_server": "P2PHANDSHAKE",
        "master_server_address": server,
        "protocol": "tcp",
        "device_name": "",
        "global_segment_size": 0,
        "local_buffer_size": 1 << 30,
        "role": "both",
        "model_key": model_key,
    }


def _yaml(options: dict[str, Any], *notes: str) -> str:
    """Return options as JSON, which YAML includes."""
    return "\n".join([*(f"# {note}" for note in notes), json.dumps(options, indent=2), ""])
