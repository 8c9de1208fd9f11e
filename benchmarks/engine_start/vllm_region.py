"""vLLM's SharedOffloadRegion made once, in vLLM's interpreter: ENGINE_ID BYTES CHUNK_BYTES.

Prints seconds, and whether vLLM made the file itself.
"""

from __future__ import annotations

import json
import os
import sys
import time

from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion


def main(engine_id: str, size_bytes: int, chunk_bytes: int) -> None:
    """Make it as the worker of rank 0 does, time its constructor, and let go of it."""
    is_creator = not os.path.exists(f"/dev/shm/vllm_offload_{engine_id}.mmap")
    begin_s = time.perf_counter()
    region = SharedOffloadRegion(
        engine_id=engine_id,
        num_chunks=size_bytes // chunk_bytes,
        rank=0,
        kv_bytes_per_chunk=chunk_bytes,
        cpu_page_size=chunk_bytes,
    )
    took_s = time.perf_counter() - begin_s
    told = {"took_s": took_s, "is_creator": is_creator}
    region.cleanup()
    print(json.dumps(told), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
