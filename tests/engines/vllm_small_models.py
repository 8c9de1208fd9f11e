"""Starts vLLM on the CPU with each folder that is named, and prints what it logs of its cache.

In the engines' interpreter, in this one process. Arguments: GiB of KV cache, tokens of a step, the
longest request, and folders with a config.json. A line of JSON each: the folder, what was logged,
and what came after it where the start did not go on.
"""

from __future__ import annotations

import gc
import importlib
import json
import logging
import os
import sys
from typing import Any

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ["VLLM_CPU_KVCACHE_SPACE"] = sys.argv[1]
os.environ["VLLM_LOGGING_STREAM"] = "ext://sys.stderr"

from vllm import LLM
from vllm.distributed.parallel_state import cleanup_dist_env_and_memory


class Logged(logging.Handler):
    lines: list[str]

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def start(folder: str, listener: Logged) -> dict[str, Any]:
    listener.lines = []
    error = None
    try:
        engine = LLM(
            model=folder,
            load_format="dummy",
            skip_tokenizer_init=True,
            enforce_eager=True,
            max_model_len=int(sys.argv[3]),
            max_num_batched_tokens=int(sys.argv[2]),
        )
        del engine
    except Exception as raised:  # after the cache was made, where kernels need a GPU
        error = f"{type(raised).__name__}: {raised}"[:300]
    gc.collect()
    cleanup_dist_env_and_memory()
    said = [line for line in listener.lines if "KV cache size" in line]
    return {"folder": folder, "said": said, "error": error}


def main() -> None:
    listener = Logged()
    listener.lines = []
    module: Any = importlib.import_module("vllm.v1.core.kv_cache_utils")
    module.logger.addHandler(listener)
    for folder in sys.argv[4:]:
        print(json.dumps(start(folder, listener)), flush=True)


if __name__ == "__main__":
    main()
