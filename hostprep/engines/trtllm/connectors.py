"""Configuration for TensorRT-LLM's KV cache connectors, whose memory another process prepares.

Names of TensorRT-LLM: tensorrt_llm/_torch/pyexecutor/connectors/registry.py and llm_args.py
(`lmcache-mp` with `server_url`), the Mooncake store connector of its pull request 19235
(connectors/mooncake_store/config.py), and of LMCache 0.5.6: lmcache/integration/tensorrt_llm.
"""

from __future__ import annotations

import json
import re

from hostprep.errors import BadInputError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

__all__ = ["CONNECTORS", "connector_yaml", "lmcache", "mooncake", "mooncake_client"]

CONNECTORS = ("lmcache", "mooncake")

_URL = re.compile(r"(?:tcp|ipc|grpc)://[!-~]+", re.ASCII)
_ADDRESS = re.compile(r"(?:[A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\]):\d{1,5}", re.ASCII)


def lmcache(server: str) -> dict[str, Any]:
    """Return the options for an LMCache server, such as tcp://127.0.0.1:5555.

    Raises BadInputError for what is no URL.
    """
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


def mooncake() -> dict[str, Any]:
    """Return the options for a Mooncake store; its address is in the client's own file."""
    return {
        "kv_cache_config": {"use_kv_cache_manager_v2": True, "enable_block_reuse": True},
        "kv_connector_config": {"connector": "mooncake-store"},
    }


def mooncake_client(server: str, model: str, *, protocol: str = "tcp") -> dict[str, Any]:
    """Return what MOONCAKE_CONFIG_PATH is to lead to: a client that lends no memory of its own.

    `server` is the master's address, host:port. Raises BadInputError for another.
    """
    if _ADDRESS.fullmatch(server) is None:
        raise BadInputError(
            f"--server {server!r} is no address of a Mooncake master",
            reason="BadServer",
            remedy="write it like 127.0.0.1:50051",
        )
    if not model:
        raise BadInputError(
            "keys in a Mooncake pool need to tell checkpoints apart",
            reason="NoModel",
            remedy="give --model-key, the same for all servers of one checkpoint and of no other",
        )
    return {
        "metadata_server": "P2PHANDSHAKE",
        "master_server_address": server,
        "protocol": protocol,
        "device_name": "",
        "global_segment_size": 0,
        "local_buffer_size": 1 << 30,
        "role": "both",
        "model_key": model,
    }


def connector_yaml(options: dict[str, Any], *notes: str) -> str:
    """Return options as a file for `trtllm-serve --config`: JSON, which YAML includes."""
    lines = [f"# {note}" for note in notes]
    return "\n".join([*lines, json.dumps(options, indent=2)]) + "\n"
