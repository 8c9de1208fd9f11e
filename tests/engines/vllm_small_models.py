"""Starts vLLM on the CPU with each folder that is named, in this one process.

In the engines' interpreter. Arguments: GiB of KV cache, tokens of a step, the longest request, and
folders with a config.json. Standard error is vLLM's log, with a line `FOLDER is next` before each.
"""

from __future__ import annotations

import gc
import os
import sys
import traceback

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ["VLLM_CPU_KVCACHE_SPACE"] = sys.argv[1]
os.environ["VLLM_LOGGING_STREAM"] = "ext://sys.stderr"

from vllm import LLM
from vllm.distributed.parallel_state import cleanup_dist_env_and_memory


def start(folder: str) -> None:
    """Start an engine and drop it: its cache is made, and what kernels cannot comes after that."""
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
    except Exception:  # such as kernels that need a GPU, after the line that is asked for
        traceback.print_exc()
    gc.collect()
    cleanup_dist_env_and_memory()


if __name__ == "__main__":
    for name in sys.argv[4:]:
        print(f"{name} is next", file=sys.stderr, flush=True)
        start(name)
