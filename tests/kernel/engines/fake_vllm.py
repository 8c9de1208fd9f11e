"""A stand-in for `vllm`: opens the file that vLLM would, as vLLM does, and says what it found.

Run as a script by the path of a copy named `vllm`; imports nothing of ours. The order of the
calls is that of vLLM 0.33's SharedOffloadRegion: create exclusively, else join what is there.
"""

from __future__ import annotations

import json
import mmap
import os
import sys
import time
from typing import Any


def main() -> None:
    """Print one line of JSON for each region; then sleep where FAKE_VLLM_SLEEP_S says so."""
    words = sys.argv[1:]
    config = json.loads(words[words.index("--kv-transfer-config") + 1])
    ranks = int(words[words.index("-dp") + 1]) if "-dp" in words else 1
    engine_id = config["engine_id"]
    for rank in range(ranks):
        suffix = f"_dp{rank}" if ranks > 1 else ""
        found = join(f"/dev/shm/vllm_offload_{engine_id}{suffix}.mmap", config, rank)
        print(json.dumps({"argv": words, "config": config, **found}), flush=True)
    time.sleep(float(os.environ.get("FAKE_VLLM_SLEEP_S", "0")))


def join(path: str, config: dict[str, Any], rank: int) -> dict[str, Any]:
    """Map the rank's file as a joiner does, and leave a mark in its first page."""
    try:
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600))
    except FileExistsError:
        creator = False
    else:
        os.unlink(path)
        creator = True
    if creator:
        return {"path": path, "creator": True}
    size_bytes = config["kv_connector_extra_config"]["cpu_bytes_to_use"]
    fd = os.open(path, os.O_RDWR)
    status = os.fstat(fd)
    memory = mmap.mmap(fd, size_bytes)
    was_zero = not any(memory[: mmap.PAGESIZE])
    memory[:4] = b"rank"
    memory[4] = rank
    return {
        "path": path,
        "creator": False,
        "leads_to": os.path.realpath(path),
        "file_bytes": status.st_size,
        "was_zero": was_zero,
    }


if __name__ == "__main__":
    main()
